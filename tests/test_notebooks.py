"""The notebooks run cell by cell, and hold no outputs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.notebooks import FOLDER, ROOT, Ran, page, run

NAMES = ("study_schedules", "triton_kernel", "write_a_kernel")
SAYS = {
    "study_schedules": "confirmed by a second search",
    "triton_kernel": "legal (aliasing strict",
    "write_a_kernel": "no fault under 2 orders",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = page(FOLDER / f"{name}.ipynb")
    assert SAYS[name] in text
    assert len(text) < 60_000


def test_notebooks_are_short_and_stripped_and_on_the_site() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == list(NAMES)
    site = (ROOT / "mkdocs.yml").read_text()
    for name in NAMES:
        data = json.loads((FOLDER / f"{name}.ipynb").read_text())
        assert all(not cell.get("outputs") for cell in data["cells"])
        assert (data["nbformat"], data["nbformat_minor"]) == (4, 5) and len(data["cells"]) < 20
        assert f"notebooks/{name}.md" in site


def test_a_cell_shows_its_last_expression_and_an_error_goes_through(tmp_path: Path) -> None:
    path = tmp_path / "one.ipynb"
    cells = ["x = 2\nprint('said')\nx * 21", "x = None\nx", "1 / 0"]
    made = [{"cell_type": "code", "source": [text]} for text in cells]
    path.write_text(json.dumps({"cells": made}))
    ran = run(path)
    assert next(ran) == Ran("code", cells[0], "said\n42\n")
    assert next(ran).text == ""
    with pytest.raises(ZeroDivisionError):
        next(ran)
