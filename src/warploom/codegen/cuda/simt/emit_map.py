"""Code for what each thread does with its own elements: maps, joins, conversions, fills."""

from __future__ import annotations

from warploom.codegen.cuda.lines import indent
from warploom.codegen.cuda.names import c_name
from warploom.codegen.cuda.operators import ANY_OPS, FLOAT_OPS, INT_OPS, literal
from warploom.codegen.cuda.prelude import memory_type
from warploom.codegen.cuda.simt.emit_memory import unroll
from warploom.codegen.cuda.simt.places import col, row
from warploom.codegen.cuda.values import c_index
from warploom.codegen.simt.facts import WORDS
from warploom.codegen.simt.forms import COL, ROW, SCALAR, TILE, Layout
from warploom.errors import InputError
from warploom.tile import DType, Op
from warploom.tile.dtypes import FP32

# Ops whose result is a value of the type when the operands are: nothing to round.
EXACT = ("abs", "neg", "relu", "max", "min", "where", "copy", "rename")
NAMES = {TILE: "[i][j]", ROW: "[i]", COL: "[j]", SCALAR: ""}


def expression(layout: Layout, op: Op, form: str, operands: list[str], exact: bool) -> str:
    """One element of the result, from one of each operand; with `exact` its reader rounds it."""
    assert op.dst is not None
    kind = FP32 if exact and op.dst.type.dtype.is_float else op.dst.type.dtype
    if op.kind == "fill":
        return fill_value(op, kind)
    if op.kind == "coordinate":
        assert op.start is not None
        start = c_index(op.start)
        inner = {ROW: row(layout), COL: col(layout)}.get(form)
        return f"{start} + {inner}" if inner else start
    if op.kind == "cast":
        return cast(operands[0], op.srcs[0].type.dtype, kind)
    values = op.srcs[-1].type.dtype
    table = INT_OPS if values.kind == "int" else FLOAT_OPS
    template = ANY_OPS.get(op.kind) or table.get(op.kind)
    if template is None:
        raise InputError(f"{op.where}: {op.kind} of {op.srcs[-1].type} has no code")
    text = template.format(*operands)
    return text if op.kind in EXACT or kind.kind != "float" else rounded(text, kind)


def philox_lines(layout: Layout, op: Op, before: list[str], operands: list[str]) -> list[str]:
    """Four neighbours from one block: the compiler does not find out that they share it."""
    assert op.dst is not None
    row_, column, *keys = operands
    rows, columns = layout.extents(op.dst.type, TILE)
    name = c_name(op.dst.name)
    lines = [
        f"const int j = {WORDS} * q;",
        f"unsigned words[{WORDS}];",
        f"philox_block(words, unsigned({row_}), unsigned({column}) >> 2, {', '.join(keys)});",
        *unroll("h", WORDS, [f"{name}[i][j + h] = int(words[h]);"]),
    ]
    whole = unroll("i", rows, unroll("q", columns // WORDS, lines))
    return ["{", *indent((*before, *whole)), "}"]


def fill_value(op: Op, kind: DType) -> str:
    """The constant of a fill."""
    if kind.kind == "bool":
        return "true" if op.value else "false"
    if kind.kind == "int":
        return literal(float(op.value or 0), "int32")
    return rounded(literal(float(op.value or 0), "fp32"), kind)


def rounded(text: str, kind: DType) -> str:
    """`text` rounded to a floating type."""
    return text if kind is FP32 else f"rounded<{memory_type(kind)}>({text})"


def cast(value: str, source: DType, target: DType) -> str:
    """A conversion, rounding as `tile.dtypes.round_to` does."""
    if target.kind == "bool":
        return f"({value} != 0)"
    if target.kind == "int":
        return f"int({value})" if source.kind != "float" else f"__float2int_rz({value})"
    if source.kind == "bool":
        return rounded(f"({value} ? 1.0f : 0.0f)", target)
    if source.kind == "int":
        return rounded(f"__int2float_rn({value})", target)
    return value if source is target else rounded(value, target)
