"""Tables of variants: typed, refused where a row is wrong, printed; former names in the pages."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench import tables
from bench.evidence import read_rows
from bench.tables import errors, extremes, launches
from warploom.cli import app
from warploom.codegen.ir.plan import FORMER as FORMER_PLAN
from warploom.errors import InputError
from warploom.kernels.attention.variants import ATTENTION
from warploom.kernels.gemm.variant import GEMM
from warploom.kernels.library import FORMER
from warploom.search.actions import FORMER as FORMER_MOVES

GLOSSARY = Path(__file__).parents[1] / "docs" / "glossary.md"


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ('{ order = "lcsf" }', "expected settings, order"),
        ('{ settings = { tile = "64,80" } }', "expected settings, order"),
        ('{ settings = 5, order = "lcsf" }', "expected settings, order"),
        ('{ settings = { tile = "64,80" }, order = "lcsf", depth = 2 }', "no 'depth': expected"),
        ('{ settings = { tile = "64,80" ', "not TOML"),
    ],
)
def test_a_wrong_row_is_refused_by_name(row, says, tmp_path):
    path = tmp_path / "t.toml"
    path.write_text(f'[variants]\n"x" = {row}\n')
    table = replace(GEMM, path=path)
    with pytest.raises(InputError, match=rf"t\.toml: .*{says}"):
        table.variants  # noqa: B018 (read when asked for)


@pytest.mark.parametrize(
    ("name", "table"), [("gemm", GEMM.variants), ("attention", ATTENTION.variants)]
)
def test_the_command_prints_a_line_a_variant(name, table):
    done = CliRunner().invoke(app, ["variants", name], catch_exceptions=False)
    head, *lines = [re.split("  +", line) for line in done.stdout.splitlines()]
    assert done.exit_code == 0 and [line[0] for line in lines] == list(table)
    for line, variant in zip(lines, table.values(), strict=True):
        values = dict(zip(head, line, strict=True))
        assert f"tile={dict(variant.point.settings)['tile']}" in values["sizes"]
        assert values["plan"] == (" ".join(variant.point.plan) or ".")
        assert values["rules"] == (" ".join(variant.point.rules) or ".")


def test_the_glossary_has_every_former_name():
    text = GLOSSARY.read_text().partition("## Former names")[2]
    shown = set(re.findall(r"`(\w+)`", text))
    renamed = {name for name, now in FORMER_PLAN.items() if now.startswith("called")}
    renamed |= set(FORMER_MOVES)
    for former in FORMER.values():
        renamed |= former.keys()
    assert renamed <= shown


def test_extremes_are_named_from_both_ends(monkeypatch) -> None:
    (first, *_) = read_rows(Path("bench/results/engine.json"))
    told = {"1x1": 1.0, "2x2": 0.5, "3x3": 1.5, "4x4": 0.75}
    rows = [
        replace(first, kernel="k default", shape=shape, ratio_to_best=ratio, notes="")
        for shape, ratio in told.items()
    ]
    rows[1] = replace(rows[1], kernel="other / greedy", notes="bursts; an earlier kernel")
    monkeypatch.setattr(tables, "read_rows", lambda _: rows)
    assert extremes("x.json", "", 2, 1) == (
        "Lowest: other 2x2 (0.500, an earlier kernel), 4x4 (0.750); highest: 3x3 (1.500).\n"
    )
    assert extremes("x.json", "defaults", 0, 2) == "Highest: 3x3 (1.500), 1x1 (1.000).\n"


def test_a_row_of_a_search_tells_of_every_launch() -> None:
    notes = [
        {"point": "a", "predicted": 110.0, "measured": 100.0},
        {"point": "b", "predicted": 100.0, "measured": 125.0},
    ]
    (first, *_) = read_rows(Path("bench/results/engine.json"))
    row = replace(first, kernel="textbook gemm", shape="1x1x1", notes=json.dumps(notes))
    again = replace(row, kernel="textbook gemm, measured")
    told = replace(first, baselines={"predicted": 90.0}, checks={"error": -0.1}, shape="2x2x2")
    assert [one.checks["error"] for one in launches([row, again, told])] == pytest.approx(
        [0.1, -0.2, -0.1]
    )
    assert errors([row, again, told]) == (
        "Over 3 launches the median error is 10.0%; 0 are within 8%, the largest is 20% (textbook "
        "gemm, 1x1x1). At 1 shapes the point predicted to be the fastest takes 25.0% longer than "
        "the fastest on the median, 25.0% at most."
    )
