"""`fairway-serve grafana push` against a double of Grafana's HTTP endpoints; no real Grafana was available."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from serve_app.cli import main
from serve_app.observability.grafana import dashboard
from serve_app.observability.provision import ProvisionError, push
from serve_app.router.ray_internals import free_ports

TOKEN = "glsa_secret_token"


@dataclass
class Grafana:
    """What the real one keeps and answers at the four endpoints that are used."""

    url: str = ""
    folders: dict[str, str] = field(default_factory=dict)
    boards: dict[str, dict[str, Any]] = field(default_factory=dict)
    refuses: int | None = None
    num_writes: int = 0

    def answer(self, method: str, path: str, token: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if self.refuses:
            return self.refuses, {"message": "refused"}
        if token != f"Bearer {TOKEN}":
            return 401, {"message": "invalid API key"}
        kind, _, name = path.removeprefix("/api/").rpartition("/")
        if method == "GET":
            return self._read("folders" if kind == "folders" else "dashboards", name)
        self.num_writes += 1
        if path == "/api/folders":
            self.folders[body["uid"]] = body["title"]
            return 200, {"uid": body["uid"]}
        assert body["folderUid"] in self.folders
        board = {**body["dashboard"], "id": 7, "version": self.num_writes}
        self.boards[board["uid"]] = board
        return 200, {"status": "success", "uid": board["uid"]}

    def _read(self, kind: str, name: str) -> tuple[int, dict[str, Any]]:
        if kind == "folders" and name in self.folders:
            return 200, {"uid": name, "title": self.folders[name]}
        if kind == "dashboards" and name in self.boards:
            return 200, {"dashboard": self.boards[name], "meta": {}}
        return 404, {"message": "not found"}


@pytest.fixture
def grafana() -> Iterator[Grafana]:
    state = Grafana()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            body = json.loads(self.rfile.read(length) or b"{}")
            status, answer = state.answer(self.command, self.path, self.headers.get("authorization", ""), body)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        do_GET = do_POST = _answer

        def log_message(self, *_: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}"
    yield state
    server.shutdown()
    server.server_close()
    thread.join()


def test_first_push_makes_folder_and_dashboard_and_a_second_changes_nothing(grafana: Grafana) -> None:
    assert [line.rpartition(": ")[2] for line in push(grafana.url, TOKEN)] == ["made", "made"]
    assert grafana.boards[dashboard()["uid"]]["panels"] == dashboard()["panels"]
    writes = grafana.num_writes
    assert [line.rpartition(": ")[2] for line in push(grafana.url, TOKEN)] == ["unchanged", "unchanged"]
    assert grafana.num_writes == writes


def test_dashboard_that_somebody_edited_is_brought_back(grafana: Grafana) -> None:
    push(grafana.url, TOKEN)
    grafana.boards[dashboard()["uid"]]["title"] = "mine"
    assert push(grafana.url, TOKEN)[1].endswith("updated")


@pytest.mark.parametrize(
    ("status", "says"), [(401, "401"), (403, "role Editor"), (412, "run the command again"), (500, "500")]
)
def test_refusal_says_what_to_do_and_never_shows_the_token(grafana: Grafana, status: int, says: str) -> None:
    grafana.refuses = status
    with pytest.raises(ProvisionError, match=says) as caught:
        push(grafana.url, TOKEN)
    assert TOKEN not in str(caught.value)


def test_wrong_token_is_refused(grafana: Grafana) -> None:
    with pytest.raises(ProvisionError, match="does not know this token"):
        push(grafana.url, "wrong")


@pytest.mark.parametrize("url", ["grafana:3000", "ftp://grafana", ""])
def test_url_that_is_none_is_named(url: str) -> None:
    with pytest.raises(ProvisionError, match="--url is"):
        push(url, TOKEN)


def test_unreachable_grafana_is_named() -> None:
    (port,) = free_ports(1, "127.0.0.1")
    with pytest.raises(ProvisionError, match="can't be reached"):
        push(f"http://127.0.0.1:{port}", TOKEN)


def test_command_reads_the_token_from_the_environment(
    grafana: Grafana, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("GRAFANA_TOKEN", raising=False)
    assert main(["grafana", "push", "--url", grafana.url]) == 2
    assert "GRAFANA_TOKEN" in capsys.readouterr().err
    monkeypatch.setenv("GRAFANA_TOKEN", TOKEN)
    assert main(["grafana", "push", "--url", grafana.url]) == 0
    assert "made" in capsys.readouterr().out
