"""Columns keep what the requests were, through a file too."""

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from serve_app.sim.columns import COLUMNS, Columns, Served, columns, load_columns, save_columns
from tests.sim.test_sim_metrics import random_run


def requests_of(run: Columns) -> list[tuple[object, ...]]:
    return [
        (
            run.replicas[run.replica[n]],
            run.phases[run.phase[n]],
            *(getattr(run, name)[n] for name in COLUMNS if name not in ("replica", "phase")),
        )
        for n in range(len(run))
    ]


def test_columns_hold_every_request_in_order_of_arrival_then_id() -> None:
    run = random_run(0)
    run.append(replace(run[0], request_id="a-twin", ttft_s=99.0))
    ordered = sorted(run, key=lambda one: (one.arrival_s, one.request_id))
    names = [field.name for field in fields(Served) if field.name != "request_id"]
    assert requests_of(columns(run)) == [tuple(getattr(one, name) for name in names) for one in ordered]


def test_replicas_are_in_order_of_their_numbers_and_idle_ones_are_known() -> None:
    run = [replace(one, replica_id=f"replica-{number}") for number, one in enumerate(random_run(0, size=12))]
    assert columns(run).replicas == tuple(f"replica-{number}" for number in range(12))
    assert columns(run[:1], ["replica-1", "replica-0", "replica-2"]).replicas == ("replica-1", "replica-0", "replica-2")


def test_file_gives_back_what_was_saved_and_is_the_same_bytes_again(tmp_path: Path) -> None:
    run = columns(random_run(1))
    save_columns(tmp_path / "one.npz", run)
    save_columns(tmp_path / "two.npz", run)
    loaded = load_columns(tmp_path / "one.npz")
    assert requests_of(loaded) == requests_of(run)
    assert (loaded.replicas, loaded.phases) == (run.replicas, run.phases)
    assert (tmp_path / "one.npz").read_bytes() == (tmp_path / "two.npz").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.npz", "two.npz"]


def test_a_run_that_served_nothing_is_kept_too(tmp_path: Path) -> None:
    save_columns(tmp_path / "empty.npz", columns([], ["replica-0"]))
    loaded = load_columns(tmp_path / "empty.npz")
    assert (len(loaded), loaded.replicas, loaded.phases) == (0, ("replica-0",), ())


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut off", b"text"])
def test_broken_file_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "broken.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"broken\.npz holds no columns"):
        load_columns(path)


def test_file_without_a_column_is_named(tmp_path: Path) -> None:
    path = tmp_path / "other.npz"
    with path.open("wb") as file:
        np.savez(file, arrival_s=np.zeros(3))
    with pytest.raises(ValueError, match=r"other\.npz holds no columns of a run: .*ttft_s"):
        load_columns(path)


def test_file_that_could_not_be_written_whole_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "run.npz"
    path.write_bytes(b"old")
    broken = columns(random_run(2))
    object.__setattr__(broken, "ttft_s", np.array([object()]))
    with pytest.raises(ValueError, match="pickle"):
        save_columns(path, broken)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_columns_of_different_lengths_and_codes_without_a_name_are_refused() -> None:
    run = columns(random_run(3))
    with pytest.raises(ValueError, match="ttft_s has 199 values; it must have 200"):
        replace(run, ttft_s=run.ttft_s[1:])
    with pytest.raises(ValueError, match="replica goes from 0 to 2; there are 2 names"):
        replace(run, replicas=run.replicas[:2])
