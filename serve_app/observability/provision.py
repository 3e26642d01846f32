"""Puts the generated dashboard into a running Grafana, through `grafana-api`: folder and dashboard, safe to repeat."""

from typing import Any
from urllib.parse import urlsplit

import requests
from grafana_api.grafana_api import GrafanaException
from grafana_api.grafana_face import GrafanaFace

from serve_app.observability.grafana import dashboard

FOLDER_UID = "fairway-serve"
FOLDER_TITLE = "fairway-serve"
SET_BY_GRAFANA = ("id", "version")
TIMEOUT_S = 10.0
MEANINGS = {
    401: "Grafana does not know this token (401); make a service account token and give it",
    403: "the token may not do this (403); its service account needs the role Editor",
    412: "somebody changed the dashboard at the same moment (412); run the command again",
}


class ProvisionError(RuntimeError):
    """Grafana was not reached or refused; the message says which, and what to do. It never holds the token."""


def push(url: str, token: str) -> list[str]:
    """Bring folder and dashboard up to date; returns what was done, one line each.

    Raises:
        ProvisionError: Grafana was not reached, or refused.
    """
    grafana = _client(url, token)
    try:
        return [_push_folder(grafana), _push_dashboard(grafana)]
    except GrafanaException as error:
        raise ProvisionError(f"{url}: {MEANINGS.get(error.status_code, error.message)}") from error
    except (requests.RequestException, ValueError) as error:
        raise ProvisionError(f"{url} can't be reached or is no Grafana: {type(error).__name__}") from error


def _client(url: str, token: str) -> GrafanaFace:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ProvisionError(f"--url is {url!r}; it must be like http://grafana.example:3000")
    prefix = f"{parts.path.strip('/')}/" if parts.path.strip("/") else ""
    return GrafanaFace(
        token, parts.hostname, parts.port, url_path_prefix=prefix, protocol=parts.scheme, timeout=TIMEOUT_S
    )


def _push_folder(grafana: GrafanaFace) -> str:
    if _existing(grafana, f"/folders/{FOLDER_UID}") is not None:
        return f"folder {FOLDER_TITLE}: unchanged"
    grafana.folder.create_folder(FOLDER_TITLE, FOLDER_UID)
    return f"folder {FOLDER_TITLE}: made"


def _push_dashboard(grafana: GrafanaFace) -> str:
    wanted = dashboard()
    title = wanted["title"]
    found = _existing(grafana, f"/dashboards/uid/{wanted['uid']}")
    if found is not None and _comparable(found["dashboard"]) == _comparable(wanted):
        return f"dashboard {title}: unchanged"
    body = {"dashboard": wanted, "folderUid": FOLDER_UID, "overwrite": True, "message": "fairway-serve grafana push"}
    grafana.dashboard.update_dashboard(body)
    return f"dashboard {title}: {'made' if found is None else 'updated'}"


def _existing(grafana: GrafanaFace, path: str) -> Any | None:
    try:
        return grafana.api.GET(path)
    except GrafanaException as error:
        if error.status_code == 404:
            return None
        raise


def _comparable(board: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in board.items() if key not in SET_BY_GRAFANA}
