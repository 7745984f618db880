"""The table of operations: arity, what the result is made of, and the numpy meaning.

`group` decides the type rule (`tile.verify`) and the emitter's form:

    source      no tile operands (load, fill, coordinate)
    unary       same axes, same element type; computed in fp32 and rounded to the type
    binary      axes joined by name; operands of one element type, two (philox: four)
    compare     like binary, gives bool
    select      where(condition, a, b)
    reduce      one axis goes
    scan        along one axis, same type
    inverse     a square tile, same type
    matmul      the axis both operands share is contracted, fp32 result
    shape       transpose, rename, slice, cast, copy, gather, quad_order
    sink        store
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numpy = Callable[..., Any]
TAKEN_OFF = -1  # the value of a matmul whose product is taken off what it adds to
PHILOX_ROUNDS = 10
WORD, HALF = np.uint64(0xFFFFFFFF), np.uint64(32)  # the low word of two, and its bits
SLOPE = math.sqrt(2.0 / math.pi)  # of the tanh in a gelu
BLOCK = 64  # rows and columns of a tile that is inverted


@dataclass(frozen=True)
class OpSpec:
    """One kind of op: operand counts allowed, group and numpy meaning (None: `tile.evaluate`)."""

    kind: str
    group: str
    arity: tuple[int, ...]
    meaning: Numpy | None = None
    floats_only: bool = False
    integers_only: bool = False


def _erf(x: Any) -> Any:
    return np.vectorize(math.erf, otypes=[np.asarray(x).dtype])(x) if np.size(x) else x


def _relu(x: NDArray[Any]) -> NDArray[Any]:
    return np.where(x < 0, np.zeros_like(x), x)


def _philox(row: Any, column: Any, key: Any, second_key: Any) -> Any:
    """The word of each column of Philox4x32-10 (Salmon et al., SC 2011, table 2): a counter of
    column / 4 and row, a key of two words."""

    def words(x: Any) -> NDArray[np.uint64]:
        return np.asarray(x).astype(np.int64).astype(np.uint64) & WORD

    place, first, k0, k1 = words(column), words(row), words(key), words(second_key)
    zero = np.zeros(np.broadcast_shapes(place.shape, first.shape), np.uint64)
    c0, c1, c2, c3 = zero + (place >> np.uint64(2)), zero + first, zero, zero
    for _ in range(PHILOX_ROUNDS):
        left, right = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1 = (right >> HALF) ^ c1 ^ k0, right & WORD
        c2, c3 = (left >> HALF) ^ c3 ^ k1, left & WORD
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & WORD, (k1 + np.uint64(0xBB67AE85)) & WORD
    word = np.choose(
        np.broadcast_to(place & np.uint64(3), zero.shape).astype(int), (c0, c1, c2, c3)
    )
    return word.astype(np.uint32).view(np.int32)


def _unary(kind: str, meaning: Callable[[Any], Any], floats_only: bool = True) -> OpSpec:
    return OpSpec(kind, "unary", (1,), meaning, floats_only)


_ENTRIES = (
    OpSpec("load", "source", (0,)),
    OpSpec("fill", "source", (0,)),
    OpSpec("coordinate", "source", (0,)),
    _unary("exp", np.exp),
    _unary("exp2", np.exp2),
    _unary("log", np.log),
    _unary("log2", np.log2),
    _unary("sqrt", np.sqrt),
    _unary("rsqrt", lambda x: 1.0 / np.sqrt(x)),
    _unary("reciprocal", lambda x: 1.0 / x),
    _unary("tanh", np.tanh),
    _unary("erf", _erf),
    _unary("gelu", lambda x: x * 0.5 * (_erf(x * math.sqrt(0.5)) + 1.0)),
    _unary("gelu_tanh", lambda x: x * 0.5 * (np.tanh(x * (x * x * 0.044715 + 1.0) * SLOPE) + 1.0)),
    _unary("sin", np.sin),
    _unary("cos", np.cos),
    _unary("abs", np.abs, floats_only=False),
    _unary("neg", np.negative, floats_only=False),
    _unary("relu", _relu),
    _unary("low_nibble", lambda x: ((x & 15) ^ 8) - 8, floats_only=False),
    _unary("high_nibble", lambda x: x >> 4, floats_only=False),
    OpSpec("not", "unary", (1,), np.logical_not),
    OpSpec("add", "binary", (2,), np.add),
    OpSpec("sub", "binary", (2,), np.subtract),
    OpSpec("mul", "binary", (2,), np.multiply),
    OpSpec("div", "binary", (2,), np.divide, floats_only=True),
    OpSpec("floordiv", "binary", (2,), np.floor_divide, integers_only=True),
    # fmaxf and fminf return the number when one operand is NaN; so does the interpreter
    OpSpec("max", "binary", (2,), np.fmax),
    OpSpec("min", "binary", (2,), np.fmin),
    OpSpec("and", "binary", (2,), np.logical_and),
    OpSpec("or", "binary", (2,), np.logical_or),
    OpSpec("philox", "binary", (4,), _philox),
    OpSpec("lt", "compare", (2,), np.less),
    OpSpec("le", "compare", (2,), np.less_equal),
    OpSpec("gt", "compare", (2,), np.greater),
    OpSpec("ge", "compare", (2,), np.greater_equal),
    OpSpec("eq", "compare", (2,), np.equal),
    OpSpec("ne", "compare", (2,), np.not_equal),
    OpSpec("where", "select", (3,)),
    OpSpec("reduce_sum", "reduce", (1,), np.add.reduce),
    OpSpec("reduce_prod", "reduce", (1,), np.multiply.reduce),
    OpSpec("reduce_max", "reduce", (1,), np.fmax.reduce),
    OpSpec("reduce_min", "reduce", (1,), np.fmin.reduce),
    OpSpec("argmax", "reduce", (1,)),
    OpSpec("cumsum", "scan", (1,), np.cumsum),
    OpSpec("lower_inverse", "inverse", (1,)),
    OpSpec("mma", "matmul", (2, 3)),
    OpSpec("cast", "shape", (1,)),
    OpSpec("copy", "shape", (1,)),
    OpSpec("transpose", "shape", (1,)),
    OpSpec("rename", "shape", (1,)),
    OpSpec("slice", "shape", (1,)),
    OpSpec("gather", "shape", (2,)),
    OpSpec("quad_order", "shape", (1,)),
    OpSpec("reduce_scatter", "cluster", (1,)),
    OpSpec("store", "sink", (1,)),
    OpSpec("store_add", "sink", (1,)),
)

# Ops on int8: the signed number in the low and in the high four bits.
NIBBLES = ("low_nibble", "high_nibble")
OPS: dict[str, OpSpec] = {entry.kind: entry for entry in _ENTRIES}
CLUSTER_REDUCE = tuple(entry.kind for entry in _ENTRIES if entry.group == "cluster")
