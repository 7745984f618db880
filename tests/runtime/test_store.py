"""The results store: rows stay, keys find them, damage is named."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from fake_device import image, spec

from warploom.errors import InputError
from warploom.runtime import Key, Result, Store, image_digest
from warploom.runtime.store import CUBIN, MANIFEST, read_deployment, write_deployment

KEY = Key("abc", "flip", "1000", "bf16", {"warps": 4}, "sm_90a", "ptxas 13.5", "580.0")


def row(speedup: float | None, outcome: str = "ok", date: str = "2026-01-01") -> Result:
    return Result(
        KEY,
        image_digest(image(us=10)),
        outcome,
        speedup=speedup,
        verdicts={"static": "legal"},
        notes={"moves": [1, 2]},
        date=f"{date}-{speedup}-{outcome}",
    )


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "deep" / "results.sqlite")


def test_rows_come_back_equal_and_best_is_the_fastest_that_ran(store: Store) -> None:
    rows = [row(1.01), row(1.05), row(None, "wrong"), row(1.03)]
    assert store.add(rows) == 4
    assert store.every() == rows
    assert [result.speedup for result in store.find(KEY)] == [1.05, 1.03, 1.01, None]
    assert store.best(KEY) == rows[1]
    other = Key(**{**KEY.__dict__, "driver": "581.0"})
    assert store.best(other) is None


def test_a_key_is_its_content_not_its_spelling() -> None:
    one = Key(**{**KEY.__dict__, "config": {"a": 1, "b": 2}})
    two = Key(**{**KEY.__dict__, "config": {"b": 2, "a": 1}})
    assert one.digest == two.digest != KEY.digest


def test_adding_twice_adds_once_and_a_date_is_given(store: Store) -> None:
    assert store.add([row(1.0), row(1.0)]) == 1
    assert store.add([row(1.0)]) == 0
    undated = Result(KEY, "f" * 64, "ok")
    store.add([undated])
    assert store.find(KEY)[-1].date.startswith("20")


def test_json_lines_carry_rows_between_stores(store: Store, tmp_path: Path) -> None:
    store.add([row(1.01), row(1.02)])
    lines = tmp_path / "rows.jsonl"
    assert store.export_lines(lines) == 2
    other = Store(tmp_path / "other.sqlite")
    assert other.import_lines(lines) == 2
    assert other.import_lines(lines) == 0
    assert other.every() == store.every()


def test_a_bad_line_imports_nothing_and_names_itself(store: Store, tmp_path: Path) -> None:
    lines = tmp_path / "rows.jsonl"
    lines.write_text(json.dumps(row(1.0).to_json()) + "\n{broken\n")
    with pytest.raises(InputError, match=r"rows\.jsonl, line 2"):
        store.import_lines(lines)
    lines.write_text('{"key": {}}\n')
    with pytest.raises(InputError, match=r"line 1: result is malformed"):
        store.import_lines(lines)
    assert store.every() == []
    with pytest.raises(InputError, match="cannot read results"):
        store.import_lines(tmp_path / "none.jsonl")


def test_two_writers_share_a_store(store: Store) -> None:
    second = Store(store.path)
    second.add([row(1.0)])
    store.add([row(2.0)])
    assert len(second.every()) == 2
    mode = sqlite3.connect(store.path).execute("PRAGMA journal_mode").fetchone()[0]
    assert mode == "wal"


def test_an_unusable_store_is_named(tmp_path: Path) -> None:
    block = tmp_path / "file"
    block.write_text("hello, I am no database at all, not even close")
    with pytest.raises(InputError, match="cannot use the results store"):
        Store(block / "results.sqlite")
    with pytest.raises(InputError, match="cannot use the results store"):
        Store(block)


def test_a_store_of_a_newer_warploom_is_refused(store: Store) -> None:
    connection = sqlite3.connect(store.path)
    connection.execute("PRAGMA user_version = 9")
    connection.close()
    with pytest.raises(InputError, match="store version 9, this warploom reads 1"):
        Store(store.path)


def test_a_winner_is_deployed_and_found_by_key(tmp_path: Path) -> None:
    winner = row(1.05)
    folder = write_deployment(tmp_path, winner, image(us=10), spec())
    assert sorted(path.name for path in folder.iterdir()) == [CUBIN, MANIFEST]
    found = read_deployment(tmp_path, KEY)
    assert found is not None
    assert (found.image, found.launch, found.result) == (image(us=10), spec(), winner)
    assert read_deployment(tmp_path, Key(**{**KEY.__dict__, "shape": "7"})) is None


def test_a_damaged_deployment_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the image is"):
        write_deployment(tmp_path, row(1.0), b"another", spec())
    folder = write_deployment(tmp_path, row(1.05), image(us=10), spec())
    (folder / CUBIN).write_bytes(b"changed")
    with pytest.raises(InputError, match="do not belong together"):
        read_deployment(tmp_path, KEY)
    (folder / MANIFEST).write_text("{}")
    with pytest.raises(InputError, match="damaged deployment"):
        read_deployment(tmp_path, KEY)
