"""Pseudo-text is a pure function of prompt and position."""

from serve_app.emulation.pseudo_text import expected_tokens, prompt_digest, token_at
from serve_app.emulation.settings import EmulationSettings

SETTINGS = EmulationSettings(text_first_id=100, text_num_ids=50)


def test_token_depends_on_prompt_and_position_alone() -> None:
    digest = prompt_digest([1, 2, 3])
    one_by_one = [token_at(SETTINGS, digest, position) for position in (3, 1, 0, 2)]
    first, second, third, fourth = expected_tokens(SETTINGS, [1, 2, 3], 4)
    assert one_by_one == [fourth, second, first, third]


def test_longer_answer_begins_with_the_shorter_one() -> None:
    assert expected_tokens(SETTINGS, [7, 8], 20)[:5] == expected_tokens(SETTINGS, [7, 8], 5)


def test_different_prompts_get_different_text() -> None:
    prompts = [[1, 2, 3], [1, 2, 4], [1, 2], [1, 2, 3, 0]]
    assert len({tuple(expected_tokens(SETTINGS, prompt, 8)) for prompt in prompts}) == len(prompts)


def test_text_stays_within_its_ids_and_uses_most_of_them() -> None:
    ids = set(expected_tokens(SETTINGS, [5], 1_000))
    assert ids <= set(range(100, 150))
    assert len(ids) > 45


def test_text_is_the_same_in_every_process() -> None:
    assert expected_tokens(EmulationSettings(), [11, 12, 13], 3) == [2047, 7596, 2684]
