"""The routing document's durable history: one SQLite file, one row a version, written before anybody is told."""

import sqlite3
from contextlib import closing
from pathlib import Path

from serve_app.config import RoutingDocument, RoutingWeights

SCHEMA = (
    "CREATE TABLE IF NOT EXISTS routing (version INTEGER PRIMARY KEY, saved_at_s REAL NOT NULL, body TEXT NOT NULL)"
)


class LostRace(RuntimeError):
    """Someone else changed the document first; read it again and repeat."""


class WeightsStore:
    """Latest document and its history; every method is one short transaction."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._path = path
        with closing(self._connect()) as db, db:
            db.execute(SCHEMA)

    def latest(self) -> RoutingDocument | None:
        """The newest document; None in a fresh directory."""
        with closing(self._connect()) as db:
            row = db.execute("SELECT body FROM routing ORDER BY version DESC LIMIT 1").fetchone()
        return RoutingDocument.model_validate_json(row[0]) if row else None

    def save(self, router: str, weights: RoutingWeights, expected_version: int, now_s: float) -> RoutingDocument:
        """Write the next version after `expected_version`.

        Raises:
            LostRace: the newest version is another one.
            ValueError: `router` is unknown.
        """
        document = RoutingDocument.model_validate(
            {"version": expected_version + 1, "router": router, "weights": weights}
        )
        with closing(self._connect()) as db, db:
            db.execute("BEGIN IMMEDIATE")
            (newest,) = db.execute("SELECT COALESCE(MAX(version), ?) FROM routing", (expected_version,)).fetchone()
            if newest != expected_version:
                raise LostRace(f"version {expected_version} was read, but version {newest} is in force")
            db.execute("INSERT INTO routing VALUES (?, ?, ?)", (document.version, now_s, document.model_dump_json()))
        return document

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self._path, timeout=5.0)
