"""Tables of variants: typed, refused where a row is wrong, printed; former names in the pages."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

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
        assert values["plan"].split() == list(variant.point.plan)
        assert values["rules"] == (" ".join(variant.point.rules) or ".")


def test_the_glossary_has_every_former_name():
    text = GLOSSARY.read_text().partition("## Former names")[2]
    shown = set(re.findall(r"`(\w+)`", text))
    renamed = {name for name, now in FORMER_PLAN.items() if now.startswith("called")}
    for former in (*FORMER.values(), FORMER_MOVES):
        renamed |= former.keys() | set(former.values())
    assert renamed <= shown
