"""Gates and weights of a chunk's rows as vectors of logarithms.

A gate is any real number a row. Where its formula is an exponential, a logistic function, one less
that, or a product of such, the logarithm is taken of the formula, so that gates near 1 and near
nothing keep their digits; else of the number, and its sign is counted beside it.
"""

from __future__ import annotations

from warploom import tile as tl
from warploom.derive.formula.graph import Node
from warploom.derive.kernel.chunk import rest_of_one
from warploom.derive.lower.boxes import SIMPLE, clean
from warploom.derive.lower.chunks import LOG2E, NOTHING, Weights, summed
from warploom.derive.lower.tilevalues import TileValues
from warploom.errors import InputError

Signed = tuple[tl.Tile, tl.Tile | None]
"""(log2 of |g|, 1 where g is negative and else 0); None where no g is."""


def weights(values: TileValues, node: Node) -> Weights | None:
    """What the rows of the present chunk weigh each other by; None where all weigh the same."""
    time, gated = str(node.attr("time")), int(node.attr("gated", 0))
    if len(node.inputs) == len(node.factors):
        return None
    axis = own(time)
    flat = tl.zeros(tl.FP32, **{axis: values.length(time)})
    decay, negative = _logarithm(values, node.inputs[3], time) if gated else (flat, None)
    sums, whole = summed(flat + decay, axis)
    before, end, ahead = tl.exp2(sums), tl.exp2(whole), tl.exp2(whole - sums)
    factor, sign = None, None
    for name in node.inputs[3 + gated :]:
        part = flat + _vector(values, name, time)
        factor = part if factor is None else factor * part
        ahead = ahead * part
    if negative is not None:
        turns = flat + negative
        sign, last = _parity(tl.cumsum(turns, axis)), _parity(tl.sum_along(turns, axis))
        before, end, ahead = before * sign, end * last, ahead * (sign * last)
        factor = sign if factor is None else factor * sign
    return Weights(sums, -sums, before, end, ahead, factor, sign, axis, clean(time), earlier(time))


def earlier(time: str) -> str:
    """The tile axis of the rows that others see."""
    return f"{clean(time)}_past"


def own(time: str) -> str:
    """The tile axis of vectors of numbers of rows."""
    return f"{clean(time)}_own"


def channel_gates(values: TileValues, node: Node) -> tl.Tile:
    """The natural logarithms of the gates of the present chunk, a matmul's operand [own, d]."""
    time, body = str(node.attr("time")), values.kernel.body
    gate = body.node.get(node.inputs[3])
    if gate is None:
        raise InputError(
            f"box {node.name!r}: its gates are handed on by another kernel; for every channel they "
            "need their formula: let nothing else read them"
        )
    if gate.op == "exp" and gate.inputs[0] in body.array:
        tile = values.load_tile(gate.inputs[0], {time: own(time)})
    else:
        tile = _logarithm(values, gate.name, time)[0] * (1.0 / LOG2E)
    return tile if tile.dtype is values.dtype else tile.cast(values.dtype)


def _logarithm(values: TileValues, name: str, time: str) -> Signed:
    """That of a gate, from its formula."""
    node = values.kernel.body.node.get(name)
    if node is not None and node.op == "exp":
        return _vector(values, node.inputs[0], time) * LOG2E, None
    if node is not None and node.op == "sigmoid":
        return _soft(_vector(values, node.inputs[0], time)), None
    if node is not None and node.op == "mul":
        (x, negative), (y, other) = (_logarithm(values, one, time) for one in node.inputs)
        if negative is not None and other is not None:
            return x + y, negative + other
        return x + y, other if negative is None else negative
    rest = rest_of_one(values.kernel.body, node) if node is not None else ""
    inner = values.kernel.body.node.get(rest)
    if inner is not None and inner.op == "sigmoid":
        return _soft(-_vector(values, inner.inputs[0], time)), None
    gate = _vector(values, name, time)
    size = tl.maximum(abs(gate), 2.0**NOTHING)
    return tl.log2(size), tl.where(gate < 0.0, 1.0, 0.0)


def _soft(x: tl.Tile) -> tl.Tile:
    """log2 of the logistic function, whose tails keep their digits."""
    return (-tl.maximum(-x, 0.0) - tl.log(tl.exp(-abs(x)) + 1.0)) * LOG2E


def _parity(count: tl.Tile) -> tl.Tile:
    """1 for an even count, -1 for an odd one."""
    half = (count * 0.5 + 0.25).cast(tl.INT32).cast(tl.FP32)
    return tl.where(count - half * 2.0 > 0.5, -1.0, 1.0)


def _vector(values: TileValues, name: str, time: str) -> tl.Tile:
    """A value of numbers of every row of the present chunk, along an axis of its own. Where they
    are one a row, every warp loads its rows: far apart in memory, all would be slow."""
    key, body = f"vector {name}", values.kernel.body
    if key in values.tiles:
        return values.tiles[key]
    node = body.node.get(name)
    if node is None:
        alone = values.shape(body.axes_of(name)).keys() == {clean(time)}
        tile = values.load_tile(name, {time: earlier(time) if alone else own(time)})
        tile = tile.cast(tl.FP32)
        tile = tile.rename(earlier(time), own(time)) if alone else tile
    elif node.kind == "const":
        tile = tl.full(float(node.attr("value")), tl.FP32)
    elif node.kind == "map":
        tile = SIMPLE[node.op](*(_vector(values, one, time) for one in node.inputs))
    else:
        raise InputError(
            f"box {name!r}: a gate of a recurrence by chunks is made of arrays and maps of them"
        )
    values.tiles[key] = tile
    return tile
