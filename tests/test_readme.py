"""The tables of README and docs are made from the evidence, and their claims have rows behind."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

import bench.tables
from bench.evidence import read_rows
from warploom.errors import InputError

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results.md"


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    return bench.tables


def test_tables_agree_with_the_results(tables: ModuleType) -> None:
    assert tables.MARKER.search(RESULTS.read_text()), "the page of results has no table"
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
    text = RESULTS.read_text()
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


def test_every_claim_of_the_readme_links_to_its_rows(tables: ModuleType) -> None:
    """Its file stands whole in docs/results.md, under a heading that the README links to."""
    text, results = (ROOT / "README.md").read_text(), RESULTS.read_text()
    linked = set(re.findall(r"docs/results\.md#([\w-]+)", text))
    claimed = {match[2] for match in tables.CLAIM.finditer(text)}
    assert len(claimed) >= 3
    assert linked == {_heading_of(file, results) for file in claimed}


def _heading_of(file: str, page: str) -> str:
    """The heading above the table of a file, as GitHub makes an address of it."""
    above = page[: page.index(f"<!-- table: {file} ")]
    heading = re.findall(r"^#+ (.+)$", above, re.MULTILINE)[-1]
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_claims_of_attention_hide_no_row_that_lost(tables: ModuleType) -> None:
    """What is behind among the defaults stands under one claim of the README or the other."""
    rows = tables.defaults(read_rows(ROOT / "bench" / "results" / "attention_forward.json"))
    claims = tables.CLAIM.finditer((ROOT / "README.md").read_text())
    picks = [match[3] for match in claims if match[2] == "attention_forward.json"]
    said = [row.shape for pick in picks for row in tables.PICKS[pick](rows)]
    assert len(said) == len(set(said))
    behind = {row.shape for row in rows if tables.verdict(row) in ("behind", "wrong")}
    assert behind <= set(said)


def test_a_claim_about_times_has_no_best_rate(tables: ModuleType) -> None:
    assert "best rate" in tables.claim("attention_forward.json", "dense")
    assert "best rate" not in tables.claim("sass_search_whole.json", "best-per-kernel")


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
