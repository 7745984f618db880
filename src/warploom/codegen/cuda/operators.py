"""What each operator on elements is in C++, and its result as the element type holds it."""

from __future__ import annotations

import math

import numpy as np

from warploom.tile import Op, round_to

# Ops whose result is a value of the type when the operands are: nothing to round.
EXACT = ("load", "abs", "neg", "relu", "max", "min", "where", "copy", "transpose", "rename")

# Expression of each elementwise op on floats; {0}, {1}, {2} are the operands.
FLOAT_OPS = {
    "exp": "exp2_fast({0} * 1.4426950408889634f)",
    "exp2": "exp2_fast({0})",
    "log": "(log2_fast({0}) * 0.6931471805599453f)",
    "log2": "log2_fast({0})",
    "sqrt": "__fsqrt_rn({0})",
    "rsqrt": "rsqrtf({0})",
    "reciprocal": "rcp_fast({0})",
    "tanh": "tanh_fast({0})",
    "erf": "erf_fast({0})",
    "gelu": "gelu_fast({0})",
    "gelu_tanh": "gelu_tanh_fast({0})",
    "sin": "sin_of({0})",
    "cos": "cos_of({0})",
    "abs": "fabsf({0})",
    "neg": "(-{0})",
    "relu": "({0} < 0.0f ? 0.0f : {0})",
    "add": "({0} + {1})",
    "sub": "({0} - {1})",
    "mul": "({0} * {1})",
    "div": "__fdividef({0}, {1})",
    "max": "fmaxf({0}, {1})",
    "min": "fminf({0}, {1})",
}
INT_OPS = {
    "abs": "::abs({0})",
    "neg": "(-{0})",
    "low_nibble": "low_nibble({0})",
    "high_nibble": "high_nibble({0})",
    "add": "({0} + {1})",
    "sub": "({0} - {1})",
    "mul": "({0} * {1})",
    "floordiv": "floor_div({0}, {1})",
    "max": "::max({0}, {1})",
    "min": "::min({0}, {1})",
    "philox": "philox({0}, {1}, {2}, {3})",
}
ANY_OPS = {
    "lt": "({0} < {1})",
    "le": "({0} <= {1})",
    "gt": "({0} > {1})",
    "ge": "({0} >= {1})",
    "eq": "({0} == {1})",
    "ne": "({0} != {1})",
    "and": "({0} && {1})",
    "or": "({0} || {1})",
    "not": "(!{0})",
    "where": "({0} ? {1} : {2})",
    "copy": "{0}",
    "transpose": "{0}",  # the same register; the axes have names
    "rename": "{0}",
}
# What a reduction combines with, and what it begins with: floating, integer.
REDUCE = {
    "reduce_sum": ("add", "0.0f", "0"),
    "reduce_max": ("max", "-INFINITY", "-2147483647 - 1"),
    "reduce_min": ("min", "INFINITY", "2147483647"),
    "reduce_prod": ("mul", "1.0f", "1"),
}


def literal(value: float, dtype: str) -> str:
    """A number as a C++ literal."""
    if dtype == "bool":
        return "true" if value else "false"
    if dtype == "int32":
        return str(int(value))
    if math.isnan(value):
        return "NAN"
    if math.isinf(value):
        return "INFINITY" if value > 0 else "-INFINITY"
    return f"{value!r}f"


def rounded(op: Op, text: str) -> str:
    """The result `text` of an op as its element type holds it."""
    assert op.dst is not None
    kind, source = op.dst.type.dtype, op.srcs[0].type.dtype if op.srcs else None
    if op.kind in EXACT or not kind.is_float or kind.bits == 32:
        return text
    if op.kind == "cast" and source is kind:
        return text
    if op.kind == "fill":
        return literal(float(round_to(kind, np.array(op.value or 0.0))), "fp32")
    return f"rounded_{kind}({text})"
