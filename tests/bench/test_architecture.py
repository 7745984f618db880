"""The house as it stands, and planted faults that its measures find."""

from __future__ import annotations

import pytest

from bench.architecture import MARKER, MEASURES, PAGE, house_of, top, working_tree

CONTRACT = """
[[tool.importlinter.contracts]]
layers = ["warploom.cli", "(warploom.search) | (warploom.tile)", "warploom.sass"]
"""
CLEAN = {
    "pyproject.toml": CONTRACT,
    "src/warploom/__init__.py": "",
    "src/warploom/cli/__init__.py": "from warploom.search import play\n",
    "src/warploom/search/__init__.py": "",
    "src/warploom/search/play.py": "from warploom.sass.decode import word\n",
    "src/warploom/sass/__init__.py": "",
    "src/warploom/sass/decode/__init__.py": "",
    "src/warploom/sass/decode/word.py": "",
}


def test_the_house_has_no_circle_no_upward_import_and_no_forgotten_module() -> None:
    house = working_tree()
    assert len(house.sources) > 300 and len(house.layers) > 8
    assert house.circles(top(house)) == []
    assert house.upward() == []
    assert house.without_importer() == []


def test_the_page_names_every_room_and_measure() -> None:
    page = PAGE.read_text()
    found = MARKER.search(page)
    assert found is not None
    for measure in MEASURES:
        assert f"| {measure} |" in found[3], "run `python -m bench.architecture`"
    told = page.replace(found[0], "")
    for room in {room.split("/")[0] for room in working_tree().rooms}:
        assert f"* `{room}`:" in told, f"docs/architecture.md does not say what {room} is"


def test_a_clean_house_is_clean() -> None:
    house = house_of(CLEAN.items())
    assert house.rooms == ["cli", "sass", "sass/decode", "search"]
    assert not house.circles(house.room) and not house.upward() and not house.without_importer()


FAULTS = {
    "circle": ("sass/decode/word", "def f():\n    from warploom.search import play\n"),
    "upward": ("search/play", "from warploom.sass.decode import word\nimport warploom.cli\n"),
    "alone": ("search/lonely", "from warploom.sass.decode import word\n"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str) -> None:
    path, text = FAULTS[fault]
    house = house_of({**CLEAN, f"src/warploom/{path}.py": text}.items())
    found = {
        "circle": [sorted(circle) for circle in house.circles(house.room)],
        "upward": house.upward(),
        "alone": house.without_importer(),
    }[fault]
    assert (
        found
        == {
            "circle": [["sass/decode", "search"]],
            "upward": ["warploom.search.play -> warploom.cli"],
            "alone": ["warploom.search.lonely"],
        }[fault]
    )


def test_measures_count_what_they_say() -> None:
    body = "    x = 1\n" * 60
    text = (
        "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass A:\n"
        "    def few(self, a, b, c, d, e, f, g): ...\n"
        "    def many(self, a, b, c, d, e, f, g, *, h): ...\n"
        f"def long():\n{body}def short():\n{body[:-10]}"
    )
    house = house_of({**CLEAN, "src/warploom/sass/decode/word.py": text}.items())
    measured = {name: of(house) for name, of in MEASURES.items()}
    assert measured["functions over 60 lines"] == 1
    assert measured["functions with 8 or more parameters"] == 1
    assert measured["dataclasses"] == 1
    assert measured["files"] == 7 and measured["lines of Python"] == text.count("\n") + 2
