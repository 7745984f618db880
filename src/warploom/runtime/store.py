"""The results store: one SQLite row a measurement, kept for ever, and the deploy form of a winner.

A row is found by its key: kernel hash, kernel name, shape, dtype, config, architecture, compiler
and driver version. Rows are only ever added; a search that grows invalidates none. JSON lines carry
them between machines and into git. What is deployed is a folder with `kernel.cubin` and
`manifest.json`, found by the same key with no search code on the path.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sqlite3
from collections.abc import Generator, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from warploom.errors import InputError
from warploom.files import write_bytes_atomically, write_text_atomically
from warploom.runtime.launch import LaunchSpec
from warploom.runtime.workbench import image_digest

USER_VERSION = 1
MANIFEST_SCHEMA = 1
MANIFEST = "manifest.json"
CUBIN = "kernel.cubin"


@dataclass(frozen=True)
class Key:
    """What a result is true of. `config` holds tile sizes, warps, stages: anything JSON."""

    kernel_hash: str
    kernel: str
    shape: str
    dtype: str
    config: Mapping[str, Any]
    arch: str
    compiler: str
    driver: str

    @property
    def digest(self) -> str:
        """A short name of the key, the same on every machine."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:24]


@dataclass(frozen=True)
class Result:
    """One measurement of one candidate.

    `candidate_hash` is the SHA-256 of the measured cubin; `speedup` and its 95 % interval are over
    the original; `control` is the A/A interval of the same run. The verdicts are JSON.
    """

    key: Key
    candidate_hash: str
    outcome: str
    median_us: float | None = None
    base_us: float | None = None
    speedup: float | None = None
    low: float | None = None
    high: float | None = None
    samples: int = 0
    seed: int = 0
    clock_mhz: float | None = None
    verdicts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    notes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    date: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data, the key inside."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Result:
        """A result back from JSON; raises `InputError` naming what is missing or unknown."""
        try:
            values = dict(data)
            values["key"] = Key(**values["key"])
            return cls(**values)
        except (KeyError, TypeError) as error:
            raise InputError(f"result is malformed: {error}") from None


_KEY_COLUMNS = tuple(entry.name for entry in fields(Key))
_COLUMNS = tuple(entry.name for entry in fields(Result) if entry.name != "key")
_JSON_COLUMNS = ("config", "verdicts", "notes")

_CREATE = f"""
CREATE TABLE results (
    id INTEGER PRIMARY KEY,
    key_digest TEXT NOT NULL,
    {", ".join(f"{name} TEXT NOT NULL" for name in _KEY_COLUMNS)},
    candidate_hash TEXT NOT NULL,
    outcome TEXT NOT NULL,
    median_us REAL, base_us REAL, speedup REAL, low REAL, high REAL,
    samples INTEGER NOT NULL, seed INTEGER NOT NULL, clock_mhz REAL,
    verdicts TEXT NOT NULL, notes TEXT NOT NULL, date TEXT NOT NULL
);
CREATE INDEX results_key ON results (key_digest);
CREATE UNIQUE INDEX results_once ON results (key_digest, candidate_hash, date, seed);
PRAGMA user_version = {USER_VERSION};
"""


class Store:
    """A results store at `path`; `InputError` when it cannot be opened or written, or is newer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._explained():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(path, timeout=30)
            self._connection.execute("PRAGMA journal_mode = WAL")
            version = int(self._connection.execute("PRAGMA user_version").fetchone()[0])
            if version == 0:
                self._connection.executescript(f"BEGIN; {_CREATE} COMMIT;")
        if version not in (0, USER_VERSION):
            self._connection.close()
            raise InputError(
                f"{path}: store version {version}, this warploom reads {USER_VERSION}: upgrade it"
            )

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def add(self, results: Iterable[Result]) -> int:
        """Add rows in one transaction, passing over those already there; returns the new ones."""
        names = ("key_digest", *_KEY_COLUMNS, *_COLUMNS)
        marks = ", ".join("?" * len(names))
        statement = f"INSERT OR IGNORE INTO results ({', '.join(names)}) VALUES ({marks})"
        rows = [_row(result) for result in results]
        with self._explained(), self._connection:
            before = self._connection.total_changes
            self._connection.executemany(statement, rows)
            return self._connection.total_changes - before

    def find(self, key: Key) -> list[Result]:
        """Every row of a key, fastest first, failed candidates last."""
        return self._select(
            "WHERE key_digest = ? ORDER BY speedup IS NULL, speedup DESC, id", (key.digest,)
        )

    def best(self, key: Key) -> Result | None:
        """The fastest row of a key whose outcome is 'ok', or None."""
        return next((result for result in self.find(key) if result.outcome == "ok"), None)

    def every(self) -> list[Result]:
        """Every row, oldest first."""
        return self._select("ORDER BY id", ())

    def export_lines(self, path: Path) -> int:
        """Write every row as a JSON line; returns how many."""
        lines = [json.dumps(result.to_json(), sort_keys=True) for result in self.every()]
        write_text_atomically(path, "".join(f"{line}\n" for line in lines))
        return len(lines)

    def import_lines(self, path: Path) -> int:
        """Add the rows of a JSON-lines file, all or none; returns how many were new."""
        try:
            lines = path.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path}: cannot read results ({error})") from None
        results: list[Result] = []
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                results.append(Result.from_json(json.loads(line)))
            except (json.JSONDecodeError, InputError, AttributeError) as error:
                raise InputError(f"{path}, line {number}: {error}") from None
        return self.add(results)

    def _select(self, clause: str, arguments: tuple[Any, ...]) -> list[Result]:
        names = (*_KEY_COLUMNS, *_COLUMNS)
        with self._explained():
            rows = self._connection.execute(
                f"SELECT {', '.join(names)} FROM results {clause}", arguments
            ).fetchall()
        return [_result(dict(zip(names, row, strict=True))) for row in rows]

    @contextlib.contextmanager
    def _explained(self) -> Generator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise InputError(
                f"{self.path}: cannot use the results store ({error}); "
                "expected a writable SQLite file or a folder to make it in"
            ) from None


def _row(result: Result) -> tuple[Any, ...]:
    values = {**asdict(result.key), **result.to_json(), "key_digest": result.key.digest}
    values["date"] = result.date or datetime.now(UTC).isoformat(timespec="microseconds")
    for name in _JSON_COLUMNS:
        values[name] = json.dumps(values[name], sort_keys=True)
    return tuple(values[name] for name in ("key_digest", *_KEY_COLUMNS, *_COLUMNS))


def _result(values: dict[str, Any]) -> Result:
    for name in _JSON_COLUMNS:
        values[name] = json.loads(values[name])
    key = Key(**{name: values.pop(name) for name in _KEY_COLUMNS})
    return Result(key, **values)


def write_deployment(root: Path, result: Result, image: bytes, launch: LaunchSpec) -> Path:
    """Write `root/<key digest>/` with the cubin and its manifest; returns the folder.

    The manifest is written last and names the cubin's hash, so a reader never sees half a pair.
    Raises `InputError` when the image is not the one measured, or the folder cannot be written.
    """
    digest = image_digest(image)
    if digest != result.candidate_hash:
        raise InputError(
            f"the image is {digest[:12]}, the result is of {result.candidate_hash[:12]}"
        )
    folder = root / result.key.digest
    manifest = {
        "schema": MANIFEST_SCHEMA,
        "key": result.key.digest,
        "kernel": result.key.kernel,
        "arch": result.key.arch,
        "cubin": CUBIN,
        "sha256": digest,
        "result": result.to_json(),
        "launch": launch.to_json(),
    }
    write_bytes_atomically(folder / CUBIN, image)
    write_text_atomically(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    return folder


@dataclass(frozen=True)
class Deployment:
    """A deployed cubin: its bytes, the launch it belongs to and the result that chose it."""

    image: bytes
    launch: LaunchSpec
    result: Result


def read_deployment(root: Path, key: Key) -> Deployment | None:
    """The deployment of a key, or None on a miss. Raises `InputError` when it is damaged."""
    folder = root / key.digest
    path = folder / MANIFEST
    if not path.exists():
        return None
    try:
        manifest = json.loads(path.read_text())
        image = (folder / manifest["cubin"]).read_bytes()
        schema, digest = manifest["schema"], manifest["sha256"]
        launch = LaunchSpec.from_json(manifest["launch"])
        result = Result.from_json(manifest["result"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{folder}: damaged deployment ({error}); deploy it again") from None
    if schema != MANIFEST_SCHEMA or digest != image_digest(image):
        raise InputError(f"{folder}: manifest and cubin do not belong together; deploy it again")
    return Deployment(image, launch, result)
