"""Families and document sets share what they say, in the lengths and popularity that they say."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from serve_app.sim import workloads
from serve_app.sim.draws import TokenArray, zipf_ranks, zipf_weights
from serve_app.sim.workloads import (
    FilingParams,
    HitHeavyParams,
    LongdocParams,
    MixedParams,
    RecencyParams,
    RetrievalParams,
    WeakSpotParams,
    longdoc,
)

CALM = ["calm"]
FILING = FilingParams(num_documents=6, median_tokens=60, document_tokens=(20, 100), question_tokens=(3, 5))
RETRIEVAL = RetrievalParams(
    system_tokens=10, num_passages=8, passages=(2, 4), passage_tokens=(20, 30), question_tokens=(3, 5)
)
HIT_HEAVY = HitHeavyParams(num_prefixes=3, prefix_tokens=(50, 60), added_tokens=(4, 6), cold_tokens=(10, 40))
MIXED = MixedParams((0.5, 0.3, 0.2), 10, (20, 30), RETRIEVAL, replace(FILING, document_tokens=(200, 300)))
WEAK = WeakSpotParams(num_groups=4, prompt_tokens=(50, 100), shared_share=0.2)
RECENCY = RecencyParams(uses=5, working_set=3, prefix_tokens=(20, 30), question_tokens=(4, 6))
LONGDOC = LongdocParams(num_documents=5, document_tokens=(40, 60), questions_per_document=3, question_tokens=(3, 5))


def drawn(family: Any, phases: list[str], seed: int = 0) -> list[TokenArray]:
    prompts: list[TokenArray] = family.prompts(phases, np.random.default_rng(seed))
    return prompts


def common(one: TokenArray, other: TokenArray) -> int:
    shared = 0
    for left, right in zip(one.tolist(), other.tolist(), strict=False):
        if left != right:
            break
        shared += 1
    return shared


def starts(prompts: list[TokenArray], tokens: int) -> list[tuple[int, ...]]:
    return [tuple(prompt[:tokens].tolist()) for prompt in prompts]


def test_filing_prompts_are_a_whole_excerpt_and_a_question_of_its_own() -> None:
    documents = FILING.documents(np.random.default_rng(0))
    assert [20 <= len(document) <= 100 for document in documents] == [True] * 6
    for prompt in drawn(FILING, CALM * 50):
        (document,) = [one for one in documents if common(one, prompt) == len(one)]
        assert 3 <= len(prompt) - len(document) <= 5
    assert len(set(starts(drawn(FILING, CALM * 50), 200))) == 50


def test_filing_lengths_are_lognormal_about_their_median() -> None:
    params = FilingParams(num_documents=4_000, document_tokens=(1, 1_000_000))
    logs = np.log([len(document) for document in params.documents(np.random.default_rng(0))])
    assert np.mean(logs) == pytest.approx(np.log(4_000), abs=0.05)
    assert np.std(logs) == pytest.approx(0.8, abs=0.03)


def test_zipf_ranks_come_as_often_as_their_weights() -> None:
    assert zipf_weights(3, 1.0) == pytest.approx(np.array([6, 3, 2]) / 11)
    counts = np.bincount(zipf_ranks(3, 1.0, 11_000, np.random.default_rng(0)))
    assert counts == pytest.approx(np.array([6_000, 3_000, 2_000]), abs=250)


def test_excerpts_of_real_pages_are_whole_pages_and_share_from_the_same_page_on() -> None:
    params = replace(FILING, num_documents=60, pages_tokens=((30, 40, 25), (50, 20)))
    documents = params.documents(np.random.default_rng(1))
    runs = {sum(pages[i:j]) for pages in params.pages_tokens for i in range(3) for j in range(i + 1, len(pages) + 1)}
    first_pages = {30, 40, 25, 50, 20}
    beginnings = {tuple(document[:20].tolist()) for document in documents}
    assert len(beginnings) == 5
    for document in documents:
        assert len(document) in runs or len(document) < max(first_pages)
        assert len(document) <= 100
    for one in documents:
        for other in documents:
            shared = common(one, other)
            assert shared == 0 or shared == min(len(one), len(other))


def test_page_longer_than_the_excerpt_is_cut_to_it() -> None:
    params = replace(FILING, document_tokens=(20, 100), pages_tokens=((5_000,),))
    assert all(20 <= len(document) <= 100 for document in params.documents(np.random.default_rng(0)))


def test_real_question_lengths_replace_the_drawn_ones() -> None:
    filing = replace(FILING, document_tokens=(20, 20), questions_tokens=(7, 9))
    retrieval = replace(RETRIEVAL, passages=(2, 2), passages_tokens=(20, 20), questions_tokens=(7, 9))
    assert {len(prompt) for prompt in drawn(filing, CALM * 30)} == {27, 29}
    assert {len(prompt) for prompt in drawn(retrieval, CALM * 30)} == {57, 59}


def test_real_passages_are_used_once_each_while_they_last() -> None:
    params = replace(
        RETRIEVAL, num_passages=3, passages=(3, 3), passages_tokens=(100, 200, 400), question_tokens=(1, 1)
    )
    assert {len(prompt) for prompt in drawn(params, CALM * 10)} == {711}
    assert {len(prompt) for prompt in drawn(replace(params, passages_tokens=(50,)), CALM * 10)} == {161}


def test_retrieval_prompts_share_the_system_prompt_and_passages_from_the_most_popular_on() -> None:
    params = replace(RETRIEVAL, passage_tokens=(20, 20), question_tokens=(3, 3))
    prompts = drawn(params, CALM * 200)
    assert {len(prompt) for prompt in prompts} == {10 + 20 * number + 3 for number in (2, 3, 4)}
    shared = Counter(common(prompts[0], other) for other in prompts[1:])
    assert set(shared) <= {10, 30, 50, 70, 90}
    assert len(shared) >= 3
    # The order of popularity is one order for all: no two passages stand in either order.
    before: set[tuple[bytes, bytes]] = set()
    for prompt in prompts:
        body = prompt[10:-3]
        passages = [body[at : at + 20].tobytes() for at in range(0, len(body), 20)]
        assert len(set(passages)) == len(passages)
        before |= {(passages[i], passages[j]) for i in range(len(passages)) for j in range(i + 1, len(passages))}
    assert not {(two, one) for one, two in before} & before


def test_popular_passages_lead_most_often() -> None:
    leading = Counter(starts(drawn(RETRIEVAL, CALM * 500), 30)).most_common()
    # The most popular of 8 by Zipf is among three drawn in about 8 of 10 prompts, and then it leads.
    assert leading[0][1] > 300
    assert leading[0][1] > 2 * leading[1][1]


def test_hit_heavy_hits_add_little_and_the_spike_is_almost_all_hits() -> None:
    prompts = drawn(HIT_HEAVY, ["calm"] * 400 + ["spike"] * 400)
    hot = {start for start, count in Counter(starts(prompts, 10)).items() if count > 1}
    assert len(hot) == 3
    hits = [start in hot for start in starts(prompts, 10)]
    assert sum(hits[:400]) == pytest.approx(280, abs=40)
    assert sum(hits[400:]) == pytest.approx(380, abs=18)
    assert all(
        (54 <= len(one) <= 66) if hit else (10 <= len(one) <= 40) for one, hit in zip(prompts, hits, strict=True)
    )


def test_mixed_kinds_come_in_their_shares_and_lengths() -> None:
    lengths = np.array([len(prompt) for prompt in drawn(MIXED, CALM * 1_000)])
    chat, document = np.mean(lengths <= 30), np.mean(lengths >= 200)
    assert [chat, document] == pytest.approx([0.5, 0.2], abs=0.06)
    rest = lengths[(lengths > 30) & (lengths < 200)]
    assert rest.min() >= 53
    assert rest.max() <= 135


def test_weak_spot_shares_a_fifth_within_a_group_and_nothing_beyond() -> None:
    prompts = drawn(WEAK, CALM * 60)
    for one in prompts:
        for other in prompts:
            if one is not other:
                assert common(one, other) in (0, round(0.2 * len(one)))
    assert len(set(starts(prompts, 10))) == 4


def test_recency_uses_a_prefix_close_together_and_never_again() -> None:
    prompts = drawn(RECENCY, CALM * 400)
    assert len(prompts) == 400
    places: dict[tuple[int, ...], list[int]] = {}
    for place, start in enumerate(starts(prompts, 20)):
        places.setdefault(start, []).append(place)
    spans = [own[-1] - own[0] for own in places.values()]
    assert max(spans) <= 2 * RECENCY.uses * RECENCY.working_set
    assert Counter(map(len, places.values()))[5] >= 0.85 * len(places)
    assert max(map(len, places.values())) == 5


def test_longdoc_asks_about_every_document_as_often_in_random_order() -> None:
    arrivals = longdoc(LONGDOC, np.random.default_rng(0))
    first = starts([one.prompt for one in arrivals], 40)
    assert Counter(Counter(first).values()) == {3: 5}
    assert first not in (sorted(first), sorted(first, reverse=True))
    assert [one.at_s for one in arrivals] == sorted(one.at_s for one in arrivals)
    assert len({one.request_id for one in arrivals}) == 15
    assert all(43 <= len(one.prompt) <= 65 for one in arrivals)


def test_longdoc_comes_at_its_rate() -> None:
    arrivals = longdoc(replace(LONGDOC, num_documents=1_000, rate_per_s=5.0), np.random.default_rng(0))
    assert arrivals[-1].at_s == pytest.approx(600, rel=0.08)


@pytest.mark.parametrize("family", [FILING, RETRIEVAL, HIT_HEAVY, MIXED, WEAK, RECENCY])
def test_no_requests_are_no_prompts(family: Any) -> None:
    assert drawn(family, []) == []


def test_exported_names_are_there_and_named_once() -> None:
    assert all(hasattr(workloads, name) for name in workloads.__all__)
    assert len(set(workloads.__all__)) == len(workloads.__all__)


@pytest.mark.parametrize(
    ("params", "field", "value"),
    [
        (FILING, "num_documents", 0),
        (FILING, "median_tokens", 0.0),
        (FILING, "sigma", -0.1),
        (FILING, "document_tokens", (10, 9)),
        (FILING, "question_tokens", (0, 9)),
        (FILING, "zipf_exponent", float("nan")),
        (FILING, "pages_tokens", ((),)),
        (FILING, "pages_tokens", ((1, 0),)),
        (FILING, "questions_tokens", (0,)),
        (RETRIEVAL, "system_tokens", -1),
        (RETRIEVAL, "num_passages", 3),
        (RETRIEVAL, "passages", (1, 2, 3)),
        (RETRIEVAL, "passages_tokens", (1, 0)),
        (HIT_HEAVY, "hit_share", 1.1),
        (HIT_HEAVY, "spike_hit_share", -0.1),
        (HIT_HEAVY, "num_prefixes", 0),
        (MIXED, "shares", (0.5, 0.5, 0.5)),
        (MIXED, "shares", (0.5, 0.5)),
        (MIXED, "chat_tokens", (10, 30)),
        (MIXED, "system_tokens", -1),
        (WEAK, "prompt_tokens", (1, 2)),
        (WEAK, "shared_share", 1.1),
        (RECENCY, "uses", 0),
        (RECENCY, "working_set", 0),
        (LONGDOC, "questions_per_document", 0),
        (LONGDOC, "rate_per_s", 0.0),
    ],
)
def test_parameter_out_of_range_is_refused_by_name(params: Any, field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        replace(params, **{field: value})
