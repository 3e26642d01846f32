"""Tables that are narrow enough to read, and summaries of many traces."""

import pytest

from serve_app.sim.metrics import Row
from serve_app.sim.report import Target
from serve_app.sim.summary import SUMMARY_SHOWN, family_rows, has_families
from serve_app.sim.tables import as_text, markdown, seconds, show, targets_table, text_table


def row(ordering: str, p50_s: float, p99_s: float = 9.0, **others: object) -> Row:
    names = {"scenario": "gsp-12", "phase": "all", "ordering": ordering, "eviction": "lru", "router": "lbgr"}
    numbers = {"requests": 4_096, "ttft_p50_s": p50_s, "ttft_p99_s": p99_s, "ttft_max_s": 12_345.6, "hit_rate": 0.4567}
    return {**names, **numbers, "latency_p50_s": 1.0, **others}


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.001234, "0.00123"), (0.5, "0.500"), (1.2345, "1.23"), (99.96, "100.0"), (12_345.6, "12,346")],
)
def test_seconds_have_three_digits_and_no_exponent(value: float, text: str) -> None:
    assert seconds(value) == text


def test_what_all_rows_share_is_said_once_and_the_default_is_marked() -> None:
    rows = [row("fcfs", 1.5, starved=None), row("fairway", 0.25, starved=3, default=True)]
    assert as_text(text_table(rows)) == (
        "ordering   requests  p50 s  p99 s   max s  hit rate  starved\n"
        "fcfs          4,096   1.50   9.00  12,346    45.7 %        -\n"
        "fairway *     4,096  0.250   9.00  12,346    45.7 %        3\n"
        "scenario gsp-12, eviction lru, router lbgr; * the product's defaults in what is compared"
    )


def test_a_single_row_keeps_its_names_and_a_field_without_a_heading_keeps_its_own() -> None:
    table = text_table([row("fcfs", 1.0, price=2.0)], ("ordering", "router", "price"))
    assert (table.header, table.lines) == (("ordering", "router", "price"), (("fcfs", "lbgr", "2.00"),))


def test_table_goes_to_the_terminal_and_texts_and_truths_are_cells_too(capsys: pytest.CaptureFixture[str]) -> None:
    show(text_table([{"requests": "many", "cut": True, "ttft_p50_s": float("inf")}], ("requests", "cut", "ttft_p50_s")))
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["requests", "cut", "p50", "s"],
        ["many", "True", "inf"],
    ]


def test_markdown_escapes_what_would_end_a_cell() -> None:
    rows = [row("a|b", 1.0, default=True), row("lpm", 2.0)]
    assert markdown(text_table(rows, ("router", "ordering", "ttft_p50_s"))) == (
        "Router lbgr; \\* the product's defaults in what is compared.\n\n"
        "| ordering | p50 s |\n| --- | ---: |\n| a\\|b * | 1.00 |\n| lpm | 2.00 |"
    )


def test_lines_are_whole_however_narrow_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    rows = [row(f"ordering-{number}" * 4, 1.0, scenario=f"scenario-{number}" * 4) for number in range(3)]
    lines = as_text(text_table(rows)).splitlines()
    assert len(lines[0]) > 100
    assert all(rows[number]["ordering"] in lines[1 + number] for number in range(3))
    assert lines[1].endswith("45.7 %")


def test_many_targets_show_only_those_missed() -> None:
    met = [Target.at_most(f"t{number}", 1.0, 2.0) for number in range(30)]
    missed = Target.at_most("bad", 3.0, 2.0)
    assert targets_table([*met[:2], missed]).lines[2] == ("bad", "3.00", "2.00", "no")
    assert [line[0] for line in targets_table([*met[:2], missed]).lines] == ["t0", "t1", "bad"]
    assert [line[0] for line in targets_table([*met, missed]).lines] == ["bad"]


def trace(seed: int, ordering: str, phase: str, p50_s: float, p99_s: float, **others: object) -> Row:
    return row(ordering, p50_s, p99_s, scenario=f"filing-seed{seed}", phase=phase, **others)


def test_families_are_summarised_by_their_spike_with_ratios_taken_within_each_trace() -> None:
    rows = [
        trace(seed, ordering, phase, scale * p50_s, scale * p99_s, starved=starved)
        for seed, scale in enumerate((1.0, 10.0, 3.0))
        for ordering, p50_s, p99_s, starved in (("fcfs", 5.0, 8.0, 0), ("lpm", 1.0, 40.0, 2), ("fairway", 1.1, 4.0, 0))
        for phase in ("calm", "spike", "all")
    ]
    targets = [
        Target.at_most(f"filing-seed{seed}/{ordering}/{phase}/p99", value, 1.0)
        for seed in range(3)
        for ordering, values in (("fairway", (0.5, 0.5 + seed)), ("fcfs", (2.0, 2.0)))
        for phase, value in zip(("calm", "spike"), values, strict=True)
    ]
    assert has_families(rows)
    assert family_rows(rows, targets) == [
        {
            "scenario": "filing",
            "phase": "spike",
            "ordering": ordering,
            "eviction": "lru",
            "router": "lbgr",
            "traces": 3,
            **met,
            "requests": 4_096,
            "ttft_p50_s": pytest.approx(p50_s),
            "ttft_p99_s": pytest.approx(p99_s),
            "ttft_max_s": 12_345.6,
            "hit_rate": 0.4567,
            "p50_over_lpm": pytest.approx(over_lpm),
            "p99_over_fcfs": pytest.approx(over_fcfs),
            "starved": starved,
        }
        for ordering, met, p50_s, p99_s, over_lpm, over_fcfs, starved in (
            ("fcfs", {"traces_met": 0, "targets_met": 0.0, "targets": 2}, 15.0, 24.0, 5.0, 1.0, 0),
            ("lpm", {}, 3.0, 120.0, 1.0, 5.0, 6),
            ("fairway", {"traces_met": 1, "targets_met": 4 / 3, "targets": 2}, 3.3, 12.0, 1.1, 0.5, 0),
        )
    ]


def test_summary_without_baselines_or_spike_shows_every_phase_and_no_ratio() -> None:
    rows = [trace(seed, "fairway", phase, 1.0, 2.0, default=True) for seed in range(2) for phase in ("miss", "hit")]
    found = family_rows([*rows, row("fairway", 7.0)])
    assert [(one["scenario"], one["phase"], one["traces"]) for one in found] == [
        ("filing", "miss", 2),
        ("filing", "hit", 2),
        ("gsp-12", "all", 1),
    ]
    assert not any(name in one for one in found for name in ("p50_over_lpm", "traces_met", "starved"))
    assert text_table(found, SUMMARY_SHOWN).header[:3] == ("scenario", "phase", "traces")
    assert not has_families([row("fairway", 7.0)])
