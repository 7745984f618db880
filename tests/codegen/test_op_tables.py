"""An op that has a meaning has a spelling, C++ and a cost; the paths of the guide exist."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

import warploom.tile as t
from warploom.codegen.analysis.instructions import INSTRUCTIONS
from warploom.codegen.cuda.emit_ops import ALONG_COLUMNS
from warploom.codegen.cuda.operators import ANY_OPS, FLOAT_OPS, INT_OPS, REDUCE
from warploom.tile.ops import OPS

ROOT = Path(__file__).parents[2]
ELEMENTWISE = ("unary", "binary", "compare", "select")
# Spelt as Python operators, or by a longer word where the kind's is a keyword or a built-in.
SPELT = {"max": "maximum", "min": "minimum", "argmax": "argmax_along", "eq": "equals"} | {
    "ne": "differs", "reduce_sum": "sum_along", "reduce_prod": "product_along",
    "reduce_max": "max_along", "reduce_min": "min_along",
}  # fmt: skip
OPERATORS = {
    name: f"__{name}__"
    for name in ("abs", "neg", "add", "sub", "mul", "lt", "le", "gt", "ge", "and", "or")
} | {"div": "__truediv__", "floordiv": "__floordiv__", "not": "__invert__"}


def missing(
    ops: Iterable[str], expressions: Mapping[str, Any], costs: Mapping[str, Any]
) -> set[str]:
    """What an op lacks, as "op: what"."""
    found: set[str] = set()
    for kind in ops:
        group = OPS[kind].group if kind in OPS else "unary"
        if group not in (*ELEMENTWISE, "reduce", "scan"):
            continue
        if kind not in expressions:
            found.add(f"{kind}: no C++")
        if kind not in costs and kind not in ALONG_COLUMNS:
            found.add(f"{kind}: no cost")
        name = OPERATORS.get(kind) or SPELT.get(kind, kind)
        if not hasattr(t.Tile, name) and not hasattr(t, name):
            found.add(f"{kind}: no spelling")
    return found


EXPRESSIONS = {**FLOAT_OPS, **INT_OPS, **ANY_OPS, **REDUCE, **ALONG_COLUMNS}


def test_every_op_is_whole() -> None:
    assert not missing(OPS, EXPRESSIONS, INSTRUCTIONS)


@pytest.mark.parametrize("fault", ["tanh", "reduce_max", "cumsum"])
def test_a_forgotten_half_is_named(fault: str) -> None:
    """Planted faults: an expression taken out; an op that has a meaning and nothing else."""
    without = {key: value for key, value in EXPRESSIONS.items() if key != fault}
    assert f"{fault}: no C++" in missing(OPS, without, INSTRUCTIONS)
    assert len(missing(["floor"], EXPRESSIONS, INSTRUCTIONS)) == 3


def test_the_guide_names_what_is_there() -> None:
    text = (ROOT / "docs" / "extending.md").read_text()
    paths = re.findall(r"`((?:[\w-]+/)+[\w.-]*)`", text)
    assert len(paths) > 15
    gone = [
        p for p in paths if not any((root / p).exists() for root in (ROOT, ROOT / "src/warploom"))
    ]
    assert not gone
