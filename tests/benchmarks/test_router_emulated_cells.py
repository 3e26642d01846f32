"""The grid of the emulated comparison: which cells there are, how they are visited and where they are kept."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from router_emulated_app import routing_weights
from router_emulated_cells import ROUTERS, SEEDS, STATES, Cell, Scale, file_name, grid, partner, settings_of, visits

from serve_app.emulation.step_time import step_time_s
from serve_app.router.baselines import PUBLISHED_WEIGHTS, RULES

CELL = Cell("lbgr", 20.0, 0, "fresh")
VERSIONS = {"ray": "1"}


def test_every_rule_of_our_router_is_a_row() -> None:
    assert {router.rule for router in ROUTERS.values() if router.system == "app"} == set(RULES)


def test_two_seeds_in_both_states_take_two_visits_of_two_runs() -> None:
    todo = visits(grid(["lbgr"], [20.0], SEEDS, STATES))

    assert [(visit.fresh, visit.used) for visit in todo] == [
        (Cell("lbgr", 20.0, seed, "fresh"), Cell("lbgr", 20.0, partner(seed), "used")) for seed in SEEDS
    ]


def test_used_cell_alone_is_measured_after_its_partners_requests() -> None:
    (visit,) = visits([Cell("lmetric", 24.0, 2, "used")])

    assert (visit.first_seed, visit.fresh, visit.used) == (3, None, Cell("lmetric", 24.0, 2, "used"))


def test_fresh_cell_alone_is_followed_by_nothing() -> None:
    (visit,) = visits([CELL])

    assert (visit.first_seed, visit.fresh, visit.used) == (0, CELL, None)


def test_visits_measure_every_cell_once() -> None:
    cells = grid(ROUTERS, [17.0, 20.0], [0, 1], STATES)

    measured = Counter(cell for visit in visits(cells) for cell in (visit.fresh, visit.used))

    assert measured == Counter(cells)


def test_visits_to_one_system_follow_each_other() -> None:
    systems = [ROUTERS[visit.router].system for visit in visits(grid(ROUTERS, [17.0, 20.0], [0, 1], STATES))]

    changes = sum(before != after for before, after in pairwise(systems))
    assert changes == len(set(systems)) - 1


def test_no_visit_begins_with_requests_that_the_last_one_served() -> None:
    todo = visits(grid(ROUTERS, [17.0, 20.0], [0, 1], STATES))

    for before, after in pairwise(todo):
        assert (before.rate_per_s, partner(before.first_seed)) != (after.rate_per_s, after.first_seed)


@pytest.mark.parametrize(
    "other",
    [
        settings_of(CELL, Scale(time_scale=3.0), VERSIONS),
        settings_of(CELL, Scale(requests=32), VERSIONS),
        settings_of(CELL, Scale(), {"ray": "2"}),
    ],
)
def test_other_settings_make_another_file(other: dict[str, object]) -> None:
    ours = file_name(settings_of(CELL, Scale(), VERSIONS))

    assert ours.startswith("lbgr-20-seed0-fresh-")
    assert file_name(other).startswith("lbgr-20-seed0-fresh-")
    assert file_name(other) != ours


def test_each_cell_has_a_file_of_its_own() -> None:
    cells = grid(ROUTERS, [17.0, 20.0, 24.0], [0, 1], STATES)

    assert len({file_name(settings_of(cell, Scale(), VERSIONS)) for cell in cells}) == len(cells)


def test_step_takes_5_ms_and_a_tenth_of_a_ms_a_token_times_the_scale() -> None:
    assert step_time_s(Scale(time_scale=3.0).emulation, [(100, 900)]) == pytest.approx(3 * (0.005 + 100e-4))


def test_load_decays_on_the_scaled_clock_and_published_weights_stay() -> None:
    published = PUBLISHED_WEIGHTS["lbgr-published"]

    scaled = routing_weights("lbgr-published", 2.0)

    assert scaled.load_half_life_s == 2 * published.load_half_life_s
    assert scaled.model_copy(update={"load_half_life_s": published.load_half_life_s}) == published


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"requests": 33}, "requests is 33; it must be a multiple of 32"),
        ({"requests": 0}, "requests is 0"),
        ({"engines": 0}, "engines is 0; it must be from 1 to 100"),
        ({"time_scale": 0.0}, "time_scale is 0.0; it must be above 0"),
    ],
)
def test_impossible_scales_are_refused(changed: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(Scale(), **changed)  # type: ignore[arg-type]  # on purpose
