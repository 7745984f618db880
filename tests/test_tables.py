"""Tables of variants: typed, refused where a row is wrong, printed; former names in the pages."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from warploom.cli import app
from warploom.codegen.ir.plan import FORMER as FORMER_PLAN
from warploom.errors import InputError
from warploom.kernels.attention.variants import ATTENTION, AttentionChoice
from warploom.kernels.gemm.variant import GEMM, GemmChoice
from warploom.kernels.library import FORMER
from warploom.search.actions import FORMER as FORMER_MOVES
from warploom.tables import as_text, read_toml, read_variants

GLOSSARY = Path(__file__).parents[1] / "docs" / "glossary.md"


def test_a_row_gives_its_columns_and_the_defaults_of_the_others(tmp_path):
    path = tmp_path / "t.toml"
    path.write_text('"a" = { tile = [64, 80], registers = [40, 232] }\n"b" = { tile = [1, 2] }\n')
    found = read_variants(path, read_toml(path), AttentionChoice)
    assert list(found) == ["a", "b"]
    assert found["a"] == AttentionChoice("a", (64, 80), registers=(40, 232))
    assert found["b"] == AttentionChoice("b", (1, 2))


@pytest.mark.parametrize(
    ("row", "kind", "says"),
    [
        ("{ tile = [64, 80], turns = true }", AttentionChoice, r"x: no column 'turns': expected"),
        ("{ tile = [64, 80, 1] }", AttentionChoice, r"x: tile=\[64, 80, 1\], expected tuple"),
        ("{ tile = [64, 80], depth = true }", AttentionChoice, r"depth=True, expected .*int"),
        ("{ tile = [64, 80], depth = 2.5 }", GemmChoice, r"depth=2.5, expected .*int"),
        ("{ tile = [64, 80], allow = [1] }", AttentionChoice, r"allow=\[1\], expected tuple"),
        ("{ depth = 2 }", GemmChoice, r"x: .*missing.*'tile'"),
        ("{ tile = [64, 80]", GemmChoice, "not TOML"),
    ],
)
def test_a_wrong_row_is_refused_by_name(row, kind, says, tmp_path):
    path = tmp_path / "t.toml"
    path.write_text(f'"x" = {row}\n')
    with pytest.raises(InputError, match=rf"t\.toml: .*{says}|t\.toml: {says}"):
        read_variants(path, read_toml(path), kind)


@pytest.mark.parametrize(
    ("name", "table"), [("gemm", GEMM.variants), ("attention", ATTENTION.variants)]
)
def test_the_command_prints_a_line_a_variant(name, table):
    done = CliRunner().invoke(app, ["variants", name], catch_exceptions=False)
    lines = done.stdout.splitlines()
    assert done.exit_code == 0 and [line.split()[0] for line in lines[1:]] == list(table)
    columns = lines[0].split()
    for line, variant in zip(lines[1:], table.values(), strict=True):
        values = dict(zip(columns, line.split(), strict=True))
        assert values["tile"] == "x".join(map(str, variant.tile))
        assert values["depth"] in (".", str(variant.depth))
    assert as_text(table) == done.stdout.rstrip("\n")


def test_the_glossary_has_every_former_name():
    text = GLOSSARY.read_text().partition("## Former names")[2]
    shown = set(re.findall(r"`(\w+)`", text))
    renamed = {name for name, now in FORMER_PLAN.items() if now.startswith("called")}
    for former in (*FORMER.values(), FORMER_MOVES):
        renamed |= former.keys() | set(former.values())
    assert renamed <= shown
