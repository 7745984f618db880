"""The site of `make docs`: what its hooks change, what its pages have."""

from __future__ import annotations

from pathlib import Path

from bench.docs_site import on_page_markdown
from bench.reports import COMMANDS, WIDTHS

ROOT = Path(__file__).parents[2]


def test_notes_for_tests_are_left_out_and_reports_are_linked() -> None:
    page = "```python part\nx = 1\n```\n<!-- report: tune -->\n```\n$ y z\n```\n"
    want = "```python\nx = 1\n```\n[Open the page](reports/tune.html)\n```\n$ y z\n```\n"
    assert on_page_markdown(page) == want
    assert on_page_markdown("[one](../examples/a.py)") == "one (`examples/a.py`)"


def test_every_report_is_shown_at_two_widths_and_linked() -> None:
    """In pictures of less than 100 kB."""
    page = (ROOT / "docs" / "reports.md").read_text()
    for name in COMMANDS:
        assert f"<!-- report: {name} -->" in page
        for width in WIDTHS:
            picture = ROOT / "docs" / "img" / f"report_{name}_{width}.png"
            assert f"](img/{picture.name})" in page and picture.stat().st_size < 100_000
