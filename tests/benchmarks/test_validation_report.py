"""What the validation makes of its runs: medians over runs, targets, and files to go on from."""

from dataclasses import replace
from pathlib import Path

import pytest
from validation_report import MEASURED, SIMULATED, Pair, read_pair, rows_of, table, targets_of, write_pair

from serve_app.emulation.settings import EmulationSettings
from serve_app.sim.columns import Served

NAMES = {name: {"ordering": name, "eviction": "lru", "router": "-"} for name in ("fcfs", "lpm")}


def test_rows_are_medians_over_the_runs_of_each_side() -> None:
    pairs = [_pair("fcfs", number, measured_s, 2 * measured_s) for number, measured_s in enumerate([1.0, 9.0, 2.0])]

    measured, simulated = rows_of(pairs, NAMES)

    assert (measured["scenario"], simulated["scenario"]) == (f"cpu-{MEASURED}", f"cpu-{SIMULATED}")
    assert (measured["ttft_p50_s"], simulated["ttft_p50_s"]) == (2.0, 4.0)
    assert (measured["requests"], measured["runs"], measured["ordering"]) == (6, 3, "fcfs")
    assert measured["hit_rate"] == 0.25


@pytest.mark.parametrize(("simulated_s", "met"), [(2.19, True), (2.21, False), (1.81, True), (1.79, False)])
def test_median_is_met_within_the_tolerance_either_way(simulated_s: float, met: bool) -> None:
    median, order = targets_of([_pair("fcfs", 0, 2.0, simulated_s)], {"cpu": 0.1})

    assert (median.name, median.met) == ("cpu/fcfs/median differs", met)
    assert median.value == pytest.approx(abs(simulated_s / 2 - 1))
    assert order.met


def test_swapped_policies_miss_the_order() -> None:
    same = [_pair("fcfs", 0, 2.0, 2.1), _pair("lpm", 0, 1.9, 2.0)]
    swapped = [_pair("fcfs", 0, 2.0, 2.1), _pair("lpm", 0, 1.9, 2.2)]

    assert [targets_of(pairs, {"cpu": 0.2})[-1].value for pairs in (same, swapped)] == [0, 1]


def test_table_has_one_line_for_each_engine_and_policies() -> None:
    text = table([_pair("fcfs", 0, 2.0, 2.2), _pair("fcfs", 1, 2.0, 1.8), _pair("lpm", 0, 1.0, 1.0)])

    fcfs, lpm = text.splitlines()[2:]
    assert fcfs.startswith("| cpu | fcfs | 2 | 2.000 | 2.000 | 1.000 | 0.90 1.10 |")
    assert lpm.startswith("| cpu | lpm | 1 | 1.000 | 1.000 | 1.000 | 1.00 |")
    assert lpm.endswith("| 0.250 | 0.250 | 3 |")


def test_kept_pair_is_read_back_as_it_was(tmp_path: Path) -> None:
    pair = _pair("fcfs", 0, 2.0, 2.2)
    write_pair(tmp_path / "pair.json", pair)

    assert read_pair(tmp_path / "pair.json") == pair


@pytest.mark.parametrize("text", ["", "{}", '{"measured": [{}], "simulated": []}'])
def test_file_of_something_else_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "pair.json").write_text(text)

    with pytest.raises(ValueError, match=r"pair\.json holds no pair of runs"):
        read_pair(tmp_path / "pair.json")


def _pair(policies: str, number: int, measured_s: float, simulated_s: float) -> Pair:
    device = EmulationSettings(step_base_s=0.01)
    return Pair("cpu", policies, number, 0, device, 0.003, _served(measured_s), _served(simulated_s))


def _served(ttft_s: float) -> list[Served]:
    """Two requests with this median."""
    one = Served("a", "replica-0", "all", 0.0, ttft_s - 0.5, ttft_s, 100, 25, 4)
    return [one, replace(one, request_id="b", ttft_s=ttft_s + 0.5, latency_s=ttft_s + 1)]
