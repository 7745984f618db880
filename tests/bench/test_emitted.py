"""examples/emitted holds what is emitted today, and figures that stand in bench/results."""

from __future__ import annotations

import json
import re

import pytest

from bench.emitted import CASES, FOLDER, MOST_LINES, facts, readme, text_of


def bare(text: str) -> str:
    """Without the lines of Python that steps came from: those move with every edit."""
    return re.sub(r"  \w+\.py:\d+$", "", text, flags=re.MULTILINE)


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_is_the_one_that_is_emitted_today(name: str) -> None:
    """Else: `python -m bench.emitted`."""
    text = (FOLDER / f"{name}.cu").read_text()
    assert bare(text) == bare(text_of(CASES[name]))
    assert bare(text) != bare(text.replace("barrier_wait", "barrier_test", 1)) or name == "softmax"
    assert len(text.splitlines()) <= MOST_LINES
    known = json.loads((FOLDER / f"{name}.json").read_text())
    told = json.loads(json.dumps(facts(CASES[name])))
    assert {key: known[key] for key in told} == told


def test_the_list_is_made_of_the_files() -> None:
    found = {name: json.loads((FOLDER / f"{name}.json").read_text()) for name in CASES}
    assert (FOLDER / "README.md").read_text() == readme(found)
