"""The README's tables are made from the evidence files, and its claims have rows behind them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from warploom.errors import InputError
from warploom.evidence import read_rows

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_tables", ROOT / "bench" / "tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_agree_with_the_results(tables: ModuleType) -> None:
    text = (ROOT / "README.md").read_text()
    assert tables.MARKER.search(text), "the README has no generated table"
    assert tables.rendered(text) == text, "run `make tables`"


def test_a_changed_figure_is_noticed(tables: ModuleType) -> None:
    """Planted fault: one digit of one table."""
    text = (ROOT / "README.md").read_text()
    match = tables.MARKER.search(text)
    assert match is not None
    position = next(i for i in range(match.end(3) + 200, match.start(5)) if text[i].isdigit())
    changed = text[:position] + str((int(text[position]) + 1) % 10) + text[position + 1 :]
    assert tables.rendered(changed) == text != changed


@pytest.mark.parametrize("path", sorted((ROOT / "bench" / "results").glob("*.json")), ids=str)
def test_evidence_is_whole(path: Path) -> None:
    rows = read_rows(path)
    assert rows, path
    for row in rows:
        assert row.ratio_to_best > 0
        assert row.baselines or row.checks, f"{row.kernel}: a claim needs a baseline or a check"
        if row.ci95 is not None:
            low, high = row.ci95
            assert low <= row.ratio_to_best <= high


def test_a_row_without_device_is_refused(tmp_path: Path) -> None:
    source = next(iter((ROOT / "bench" / "results").glob("*.json")))
    rows = json.loads(source.read_text())
    rows[0]["device"] = ""
    damaged = tmp_path / "damaged.json"
    damaged.write_text(json.dumps(rows))
    with pytest.raises(InputError, match="device is empty"):
        read_rows(damaged)
