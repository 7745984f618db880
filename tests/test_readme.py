"""The tables of README and docs are made from the evidence, and their claims have rows behind."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

import bench.tables
from warploom.errors import InputError
from warploom.evidence import read_rows

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    return bench.tables


def test_tables_agree_with_the_results(tables: ModuleType) -> None:
    assert tables.MARKER.search((ROOT / "README.md").read_text()), "the README has no table"
    stale = [
        page.name for page in tables.PAGES if tables.rendered(page.read_text()) != page.read_text()
    ]
    assert not stale, "run `make tables`"


def test_every_evidence_file_is_shown_whole(tables: ModuleType) -> None:
    """No row is left out of the page of results: every file is there, with no pick of the best."""
    shown = tables.MARKER.findall((ROOT / "docs" / "results.md").read_text())
    whole = {file for _, file, columns, _, _ in shown if columns.split()[0] not in tables.PICKS}
    assert whole == {path.name for path in (ROOT / "bench" / "results").glob("*.json")}


def test_a_changed_figure_is_noticed(tables: ModuleType) -> None:
    """Planted fault: one digit of one table."""
    text = (ROOT / "README.md").read_text()
    match = tables.MARKER.search(text)
    assert match is not None
    position = next(i for i in range(match.end(3) + 200, match.start(5)) if text[i].isdigit())
    changed = text[:position] + str((int(text[position]) + 1) % 10) + text[position + 1 :]
    assert tables.rendered(changed) == text != changed


def test_a_changed_claim_is_noticed(tables: ModuleType) -> None:
    """Planted fault: one more row ahead than there are."""
    text = (ROOT / "README.md").read_text()
    match = tables.CLAIM.search(text)
    assert match is not None, "the README claims nothing"
    ahead = re.search(r"(\d+) are ahead", match[4])
    assert ahead is not None
    changed = text.replace(ahead[0], f"{int(ahead[1]) + 1} are ahead")
    assert tables.rendered(changed) == text != changed


def test_every_headline_table_stands_under_its_claim(tables: ModuleType) -> None:
    """The README's tables of defaults each have the counted sentence before them."""
    text = (ROOT / "README.md").read_text()
    tabled = {
        m[2] for m in tables.MARKER.finditer(text) if m[3].split()[0] in ("defaults", "headline")
    }
    assert tabled == {match[2] for match in tables.CLAIM.finditer(text)} != set()


def test_an_extract_has_every_row_that_is_not_ahead(tables: ModuleType) -> None:
    rows = tables.defaults(read_rows(ROOT / "bench" / "results" / "attention_forward.json"))
    behind = replace(rows[0], shape="64 causal 4096", ci95=(0.8, 0.9), ratio_to_best=0.85)
    ahead = replace(behind, shape="64 full 4096", ci95=(1.8, 1.9), ratio_to_best=1.85)
    assert tables.headline([behind, ahead]) == [behind]


@pytest.mark.parametrize(
    ("ratio", "interval", "control", "verdict"),
    [
        (1.05, (1.03, 1.07), (0.99, 1.01), "ahead"),
        (1.02, (1.005, 1.04), (0.999, 1.01), "level"),  # inside of what a copy shows
        (1.02, (1.005, 1.04), (0.95, 1.001), "level"),  # the copy was slower: the same spread
        (1.02, (0.999, 1.04), (1.0, 1.0), "level"),
        (0.95, (0.93, 0.97), (0.99, 1.01), "behind"),
        (0.95, (0.93, 0.97), (0.99, 1.08), "level"),
    ],
)
def test_a_verdict_asks_the_control(
    tables: ModuleType,
    ratio: float,
    interval: tuple[float, float],
    control: tuple[float, float],
    verdict: str,
) -> None:
    row = next(iter(read_rows(ROOT / "bench" / "results" / "gemm.json")))
    row = replace(row, ratio_to_best=ratio, ci95=interval, control=control)
    assert tables.verdict(row) == verdict
    failed = replace(row, checks={**row.checks, "numerics": "fail 0.3"})
    assert tables.verdict(failed) == "wrong"


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
