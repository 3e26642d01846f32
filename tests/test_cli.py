"""The command line: help that teaches, errors of one line, exit codes 0, 1 and 2."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from serve_app import model_files
from serve_app.cli import main
from serve_app.config import RoutingDocument

TOKEN = "correct-horse-battery"
COMMANDS = (
    ["version"],
    ["prepare-model"],
    ["profile"],
    ["doctor"],
    ["simulate"],
    ["weights", "get"],
    ["weights", "set"],
    ["grafana", "push"],
)


@dataclass
class Control:
    """A server that keeps one document as the control deployment does: token, version check, JSON errors."""

    url: str = ""
    document: RoutingDocument = field(default_factory=RoutingDocument)
    answer: tuple[int, bytes] | None = None
    """Given instead of the document's own, when set."""
    overtaken: bool = False
    """Somebody else changes the document after every read."""

    def get(self) -> tuple[int, bytes]:
        """Status and body of a read."""
        body = self.document.model_dump_json().encode()
        if self.overtaken:
            self.document = self.document.model_copy(update={"version": self.document.version + 1})
        return self.answer or (200, body)

    def put(self, authorization: str, body: bytes) -> tuple[int, bytes]:
        """Status and body of a change."""
        if authorization != f"Bearer {TOKEN}":
            return 401, b'{"detail": "changes need a token"}'
        wanted = RoutingDocument.model_validate_json(body)
        if wanted.version != self.document.version:
            detail = f"version {wanted.version} was read, but {self.document.version} is in force"
            return 409, json.dumps({"detail": detail}).encode()
        self.document = wanted.model_copy(update={"version": wanted.version + 1})
        return self.answer or (200, self.document.model_dump_json().encode())


@pytest.fixture
def control() -> Iterator[Control]:
    state = Control()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(*state.get() if self.path == "/fairway/weights" else (404, b"Not Found"))

        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self._send(*state.put(self.headers["Authorization"], body))

        def _send(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        state.url = f"http://127.0.0.1:{server.server_port}"
        yield state
        server.shutdown()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """Run a command: its exit code, stdout and stderr."""
    monkeypatch.setenv("FAIRWAY_TOKEN", TOKEN)
    monkeypatch.setattr("signal.signal", lambda number, handler: None)  # pytest's own stay in place

    def run_command(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        return code, *capsys.readouterr()

    return run_command


Run = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_of_every_command_has_an_example(command: list[str], run: Run) -> None:
    code, out, _ = run(*command, "--help")
    assert code == 0
    assert f"fairway-serve {' '.join(command)}" in " ".join(out.split())


def test_help_comes_at_once_since_nothing_heavy_is_imported() -> None:
    probe = "import sys, serve_app.cli; print({'torch', 'vllm', 'ray', 'transformers', 'numpy'} & set(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert loaded.stdout == "set()\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["profile"], "Missing option '--out'"),
        (
            ["profile", "--out", "x.json", "--lengths", "64,many"],
            "--lengths is '64,many'; give two or more whole numbers",
        ),
        (["profile", "--out", "x.json", "--lengths", "64"], "give two or more whole numbers"),
        (
            ["profile", "--out", "x.json", "--repeats", "0"],
            "'--repeats': Input should be greater than or equal to 1",
        ),
        (["weights", "set"], "Missing argument 'FIELD=VALUE"),
        (["weights", "set", "queue"], "'queue' is no change; write FIELD=VALUE with one of router, miss, hit, queue"),
        (["weights", "set", "quue=1"], "'quue=1' is no change"),
        (
            ["weights", "set", "queue=0"],
            "queue is '0'; it must be a number above 0 and at most 1000, for example queue=1",
        ),
        (["weights", "set", "hit=-1"], "hit is '-1'; it must be a number at least 0 and at most 1000"),
        (["weights", "set", "miss=nan"], "miss is 'nan'; it must be a number"),
        (["weights", "set", "router=dice"], "router is 'dice'; it must be one of lbgr, round-robin, power-of-two"),
    ],
)
def test_what_is_written_wrong_is_named_in_one_line(arguments: list[str], said: str, run: Run) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


def test_version_names_what_is_pinned(run: Run) -> None:
    code, out, _ = run("version")
    assert code == 0
    assert "ray 2.60.0\n" in out
    assert "0.29.0\n" in out


def test_prepare_model_says_what_it_made_and_then_that_it_is_complete(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(into: Path, report: model_files.Report) -> None:
        (into / "config.json").write_text("{}")
        report("save", 2_000_000, 2_000_000)

    monkeypatch.setattr(model_files, "make_smollm2", make)
    code, out, err = run("prepare-model", str(tmp_path / "model"))
    assert (code, err.split()[:3]) == (0, ["save", "2", "MB"])
    assert out.startswith(f"{tmp_path}/model: made in ")
    code, out, err = run("prepare-model", str(tmp_path / "model"))
    assert (code, err) == (0, "")
    assert out == f"{tmp_path}/model: complete already, 0 MB\n"


def test_prepare_model_that_fails_says_why_in_one_line(tmp_path: Path, run: Run) -> None:
    (tmp_path / "letter.txt").touch()
    code, out, err = run("prepare-model", str(tmp_path))
    assert (code, out) == (1, "")
    assert err == f"fairway-serve: {tmp_path} holds something that is not a model; name another directory\n"


def test_profile_refuses_before_it_measures(tmp_path: Path, run: Run) -> None:
    out_file = tmp_path / "profile.json"
    code, _, err = run("profile", "--model", str(tmp_path / "none"), "--out", str(out_file))
    assert code == 1
    assert err.startswith(f"fairway-serve: --model {tmp_path}/none: there is no directory")
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).touch()
    out_file.touch()
    code, _, err = run("profile", "--model", str(tmp_path), "--out", str(out_file))
    assert (code, err) == (1, f"fairway-serve: {out_file} exists; give --force to replace it, or another --out\n")


def test_weights_get_prints_what_set_takes(control: Control, run: Run) -> None:
    code, out, err = run("weights", "get", "--url", control.url)
    assert (code, err) == (0, "")
    weights = control.document.weights.model_dump()
    assert out.splitlines() == ["version=1", "router=lbgr", *(f"{name}={value}" for name, value in weights.items())]


def test_weights_set_changes_what_is_named_and_prints_the_difference(control: Control, run: Run) -> None:
    code, out, err = run("weights", "set", "queue=2", "router=round-robin", "--url", control.url + "/")
    assert (code, err) == (0, "")
    assert out.splitlines() == ["version: 1 -> 2", "router: lbgr -> round-robin", "queue: 1.0 -> 2.0"]
    weights = RoutingDocument().weights.model_copy(update={"queue": 2.0})
    assert control.document == RoutingDocument(version=2, router="round-robin", weights=weights)


def test_weights_set_of_what_is_in_force_changes_nothing(control: Control, run: Run) -> None:
    code, out, _ = run("weights", "set", "queue=1", "--url", control.url)
    assert (code, out) == (0, "nothing to change: version 1 has these values\n")
    assert control.document.version == 1


def test_token_is_read_from_a_file_and_a_wrong_one_is_named(
    control: Control, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "right").write_text(TOKEN + "\n")
    (tmp_path / "wrong").write_text("guess")
    (tmp_path / "empty").touch()
    monkeypatch.delenv("FAIRWAY_TOKEN")
    command = ("weights", "set", "hit=3", "--url", control.url)
    code, _, err = run(*command)
    assert (code, err.split(":")[1]) == (2, " a token is needed")
    assert run(*command, "--token-file", str(tmp_path / "empty"))[0] == 2
    code, _, err = run(*command, "--token-file", str(tmp_path / "wrong"))
    assert code == 1
    assert "did not accept the token; give control's own in FAIRWAY_TOKEN or --token-file" in err
    code, _, err = run(*command, "--token-file", str(tmp_path / "absent"))
    assert code == 1
    assert "No such file" in err
    assert run(*command, "--token-file", str(tmp_path / "right"))[:2] == (0, "version: 1 -> 2\nhit: 1.0 -> 3.0\n")


def test_overtaken_change_says_so_and_changes_nothing(control: Control, run: Run) -> None:
    control.overtaken = True
    code, out, err = run("weights", "set", "queue=2", "--url", control.url)
    assert (code, out) == (1, "")
    assert err == (
        "fairway-serve: somebody else changed the weights meanwhile (version 1 was read, but 2 is in force); "
        "nothing was changed, run it again\n"
    )
    assert control.document.weights == RoutingDocument().weights


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            (503, b'{"detail": "no ingress replica answered\\nwithin 3 s"}'),
            "503: no ingress replica answered within 3 s",
        ),
        ((500, b"Internal Server Error"), "answered 500: Internal Server Error"),
        ((404, b"Not Found"), "does not exist; --url must name the host and port"),
        ((200, b"<html>"), "answered something else than weights"),
        ((200, b'{"version": 0}'), "answered something else than weights (version: "),
    ],
)
def test_other_answers_are_one_clear_line(control: Control, run: Run, answer: tuple[int, bytes], said: str) -> None:
    control.answer = answer
    code, out, err = run("weights", "get", "--url", control.url)
    assert (code, out) == (1, "")
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "nonsense", "http://[half"])
def test_address_that_cannot_be_reached_is_named(url: str, run: Run) -> None:
    code, out, err = run("weights", "get", "--url", url)
    assert (code, out) == (1, "")
    assert f"{url}/fairway/weights cannot be reached" in err
    assert err.count("\n") == 1


def test_doctor_names_every_check_and_fails_on_a_missing_model(tmp_path: Path, run: Run) -> None:
    code, out, err = run("doctor", "--model", str(tmp_path / "none"))
    assert code == 1
    assert f"wrong model        there is no directory {tmp_path}/none; make it with `fairway-serve prepare-model" in out
    assert [line.split()[1] for line in out.splitlines()][:4] == ["python", "ray", "vllm", "torch"]
    assert "found something wrong" in err


def test_interrupted_command_says_so(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(model_files, "prepare_model", interrupt)
    code, _, err = run("prepare-model")
    assert (code, err.splitlines()[-1:]) == (130, ["fairway-serve: interrupted"])
