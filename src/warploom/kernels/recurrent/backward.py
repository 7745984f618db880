"""Gradients of recurrent attention, its chunks from the last to the first.

With S the state before a chunk, R the gradient of the state after it, W what its rows weigh each
other by (`scale` and steps in it), b what they weigh S by, a what they have in the state after it
(`derive.lower.chunks.Weights`), and dO the gradient of the result,

    dP = W * (dO v^T),  P = W * (q k^T)
    dq = dP k + b dO S^T,  dk = dP^T q + a v R^T,  dv = P^T dO + a k R
    R <- exp(total) R + (b q)^T dO

which is the recurrence itself with its rows reversed. The gradient of a row's logarithm is <S, R>
of the state before the chunk less what every earlier row of the chunk has as q dq - k dk, in sum:
sums never leave a chunk, so a long sequence costs no accuracy.

A task has a part of R (`tile_of`): 64 or 128 columns of the values, and where both are longer than
64, half of the channels of the keys. So dP is whole in a task with all columns, and P, of which dv
is made, is a sum over the tasks that share out channels.

Arrays: those of `recurrent` without `o`, `initial` and `final`; `do` like `v`; `states`, which
`recurrent` leaves with `RecurrentConfig.states`; with `final` its gradient `dfinal`. Written are
`dq, dk: [batch, rows, slots, d]` in bf16, a slot for every head and tile of its values, to be
summed over slots that share a q and k; `dv: [batch, rows, parts, e]`, a part for every head and
tile of its channels; where there are such inputs `dinitial: [batch, heads, d, e]`, `dg` or `ddt:
[batch, rows, tasks]` in fp32, a task for every head and tile of R, and `dg` (of heads), `da`,
`dbias`, `dskip: [batch, tasks, lanes]`, 64 parts of a sum each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from warploom import tile as t
from warploom.autosched.schedules import Policy
from warploom.codegen.ir.plan import LaunchPlan
from warploom.derive.lower.chunks import LOG2E, Weights
from warploom.kernels.recurrent.backward_channel import ChannelKeys, ChannelQueries
from warploom.kernels.recurrent.backward_delta import DeltaRest, DeltaValues
from warploom.kernels.recurrent.backward_task import COLUMNS, BackwardTask
from warploom.kernels.recurrent.config import RecurrentConfig
from warploom.kernels.recurrent.program import STATES, arrays_of
from warploom.kernels.recurrent.scalar import GATES, LEAST_STEP, ScalarTask
from warploom.kernels.recurrent.task import CHUNK, rows

ALLOW = "spills", "stack"  # 24 to 88 B, of channels 904: rearranging did not help
WIDE = 128  # columns of a task's part of R that are not cut, of either axis
TOKENS, CHANNELS = "batch rows tasks", "batch rows slots d"
LANES, STARTS = "batch tasks lanes", "batch chunks slots d"
NUMBERS, PARTS = "batch chunks slots", "batch rows parts e"


def parts_of(config: RecurrentConfig) -> tuple[str, ...]:
    """The kernels of a backward pass, in order."""
    if config.delta:
        return "values", "rest"
    return ("keys", "queries") if config.decay == "channel" else ("rows",)


def recurrent_backward(config: RecurrentConfig, part: str = "rows") -> t.Program:
    """The program of one of `parts_of` a configuration; scalar `scale` as in `recurrent`.

    Raises `InputError` for d above 64 with a delta rule.
    """

    def body(**given: t.Array) -> None:
        TASKS[part](config, given).run()

    name = "recurrent_backward" + (f"_{part}" if part != "rows" else "")
    return t.trace(body, backward_arrays(config, part), name=name)


def backward_arrays(config: RecurrentConfig, part: str = "rows") -> dict[str, t.Array]:
    """The arrays of a part of a configuration, in order: what is read, then what is written."""
    arrays = arrays_of(replace(config, states=True), "batch rows")  # refuses what has none
    arrays["do"] = arrays.pop("o")
    for state in ("initial", "final"):
        arrays.pop(state, None)
    kept, value = arrays["states"], arrays["v"]
    states = {"dfinal": t.array(t.FP32, STATES)} if config.final else {}
    states |= {"dinitial": t.array(t.FP32, STATES)} if config.initial else {}
    made = {x: t.array(t.BF16, CHANNELS) for x in ("dq", "dk")} | states
    made["dv"] = t.array(t.BF16, PARTS) if tiles_of(config)[1] > 1 else value
    for name, dims in given_dims(config).items():
        made[name] = t.array(t.BF16 if dims == CHANNELS else t.FP32, dims)
    if part == "rows":
        return arrays | made
    starts = t.array(t.FP32, STARTS if config.decay == "channel" else NUMBERS)
    between = {"starts": starts} if config.decay != "none" else {}
    gates = list(given_dims(config))
    if part == "keys":
        return arrays | {x: made[x] for x in ("dk", "dv", *states)} | between
    if part == "queries":
        return arrays | between | {x: made[x] for x in ("dk", "dq", *gates)}
    between["after"] = kept
    needed = ("v", "fresh") if part == "values" else ("v", "inverse")
    arrays = {x: one for x, one in arrays.items() if x not in needed}
    if part == "values":
        return arrays | {"dv": value} | states | between
    return arrays | {"dv": value} | between | {x: made[x] for x in ("dq", "dk", *gates)}


def given_dims(config: RecurrentConfig) -> dict[str, str]:
    """The dimensions of the gradients of gates, by name."""
    gates = {"head": {"dg": LANES}, "token": {"dg": TOKENS}, "step": {"ddt": TOKENS, "da": LANES}}
    gates["channel"] = {"dg": CHANNELS}
    given = gates.get(config.decay, {}) | ({"dbeta": TOKENS} if config.delta else {})
    given |= {"dbias": LANES} if config.softplus else {}
    return given | ({"dskip": LANES} if config.skip else {})


def tile_of(config: RecurrentConfig) -> tuple[int, int]:
    """The part [e, d] of R that a task has: with 64 columns of the values all channels, with 128 no
    more than 64 of them, as both would not fit its registers. Delta rules and decays of channels
    have 64 columns."""
    if config.in_parts or config.value_dim <= COLUMNS:
        return COLUMNS, config.depth
    return WIDE, CHUNK


def tiles_of(config: RecurrentConfig) -> tuple[int, int]:
    """How many such parts there are of a head's R, along e and d."""
    e, d = tile_of(config)
    return -(-config.value_dim // e), config.depth // d


def slots_of(config: RecurrentConfig, heads: int) -> int:
    """How many parts of dq and dk there are."""
    return heads * tiles_of(config)[0]


def made_arrays(config: RecurrentConfig) -> dict[str, t.Array]:
    """What the kernels of a configuration write, in order; `starts` is theirs alone."""
    made: dict[str, t.Array] = {}
    for part in parts_of(config):
        ops = recurrent_backward(config, part).ops()
        written = {op.array.name for op in ops if op.kind == "store" and op.array is not None}
        made |= {x: one for x, one in backward_arrays(config, part).items() if x in written}
    return made


def sizes_of(config: RecurrentConfig, batch: int, rows: int, heads: int) -> dict[str, int]:
    """The sizes of the dimensions of `made_arrays`, and of what `recurrent` keeps."""
    (e, d), chunks = tiles_of(config), -(-rows // CHUNK)
    sizes = {"batch": batch, "rows": rows, "heads": heads, "chunks": chunks}
    sizes |= {"slots": heads * e, "parts": heads * d, "tasks": heads * e * d}
    sizes |= dict.fromkeys(("lanes", "r", "n"), CHUNK)
    return sizes | {"d": config.key_dim, "e": config.value_dim}


def backward_policy(config: RecurrentConfig, part: str = "rows") -> Policy:
    """What a part of a configuration gets: two blocks on an SM, each with a head."""
    plan = LaunchPlan(
        split={"queries": "m", "rest": "m"}.get(part, "e"), resident=2, store_panels=1
    )
    if part == "rows" and tile_of(config) == (COLUMNS, CHUNK):
        return Policy("multistage", plan)
    if config.delta:
        return Policy("unpipelined", plan)
    # One slot of each: given back where it was read last, 3 % (d of 128) to 8 % (channels) faster.
    return Policy("lcsf-early", plan, depth=1)


@dataclass(frozen=True)
class _Chunk:
    """The tiles of a chunk: q [m, d] and k [n, d] in parts along d, v [n, e] and do [m, e] in parts
    along e; the states [e, d] before it and the gradients after it as operands, in rows of parts
    along e; the weights, dt or g along t."""

    c: t.Index
    q: list[t.Tile]
    k: list[t.Tile]
    v: list[t.Tile]
    do: list[t.Tile]
    states: list[list[t.Tile]]
    after: list[list[t.Tile]]
    vector: t.Tile | None
    slope: t.Tile | None
    weights: Weights | None


class ScalarBackward(ScalarTask, BackwardTask):
    """Traces what one task does: the chunks of a head, for a tile of R."""

    def __init__(self, config: RecurrentConfig, arrays: Mapping[str, t.Array]) -> None:
        self.tile = tile_of(config)
        super().__init__(config, arrays)
        (e, d), count = self.tile, tiles_of(config)[1]
        across, down = self.column // count, self.column % count
        self.keys_slot = self.head * t.cdiv(t.size("e"), e) + across
        self.values_part = self.head * count + down
        self.parts = [t.span(down * d + at, CHUNK, "d") for at in range(0, d, CHUNK)]
        self.columns_of = [t.span(across * e + at, CHUNK, "e") for at in range(0, e, CHUNK)]
        self.grads = [[self.last("dfinal", y, x) for y in self.parts] for x in self.columns_of]
        # What all channels have is counted by the task of the first ones.
        self.once = t.where(t.number(down).equals(0), 1.0, 0.0) if count > 1 else None
        written = given_dims(config).items()
        self.sums = {name: t.zeros(t=CHUNK) for name, dims in written if dims == LANES}

    def third(self) -> tuple[str, t.Index]:
        """Tasks of a head are told apart by their tile of R, those of its channels first."""
        e, d = self.tile
        return "cols", t.cdiv(t.size("e"), e) * (self.config.depth // d)

    def place_of(self, name: str) -> t.Index:
        """Where a task leaves its part of a gradient."""
        return self.values_part if name == "dv" else self.keys_slot

    def run(self) -> None:
        """All of it."""
        last = self.chunks - 1
        gated = self.config.decay in GATES
        gates = [self.gate(last - n) for n in (0, 1)] if gated else []
        for i in t.loop(self.chunks):
            chunk = self.loaded(last - i, gates[0] if gated else None)
            self.rows_of(chunk)
            if gated:
                after = self.gate(chunk.c - 2)
                gates[0].assign(gates[1])
                gates[1].assign(after)
        for name, tile in self.sums.items():
            t.store(self.arrays[name], self.batch, self.slot, t.span(0, CHUNK, "t"), tile=tile)
        for columns, grads in zip(self.columns_of, self.grads, strict=True):
            for part, grad in zip(self.parts, grads, strict=True):
                self.first(part, grad, columns)

    def loaded(self, c: t.Index, gate: t.Tile | None) -> _Chunk:
        """Chunk c."""
        vector = self.vector(gate, c) if gate is not None else None
        slope = None
        if gate is not None and self.bias is not None:
            slope = t.sigmoid(gate.cast(t.FP32).rename("n", "t") + self.bias)
        return _Chunk(
            c,
            [t.load(self.arrays["q"], self.batch, rows(c, "m"), self.group, d) for d in self.parts],
            [t.load(self.arrays["k"], self.batch, rows(c, "n"), self.group, d) for d in self.parts],
            [self.of_values("v", c, "n", e) for e in self.columns_of],
            [self.of_values("do", c, "m", e) for e in self.columns_of],
            [[self.before(c, d, e) for d in self.parts] for e in self.columns_of],
            [[grad.cast(t.BF16) for grad in grads] for grads in self.grads],
            vector,
            slope,
            self.weights_of(vector) if vector is not None else self.constant(c),
        )

    def rows_of(self, chunk: _Chunk) -> None:
        """The gradients of its rows; R moves on to the state before it."""
        weights = chunk.weights
        scores, change = contracted(chunk.k, chunk.q), contracted(chunk.v, chunk.do)
        seen, change = self.weighed(chunk, scores, change)
        for columns, do, after in zip(self.columns_of, chunk.do, chunk.after, strict=True):
            dv = contracted(chunk.k, after)
            if weights is not None:
                dv *= weights.ahead.rename("t", "n")
            dv += seen @ do
            self.give("dv", chunk.c, "n", columns, dv)
        added = [self.part_of(chunk, n, change) for n in range(len(self.parts))]
        for n, one in enumerate(chunk.q):
            for do, grads in zip(chunk.do, self.grads, strict=True):
                if weights is not None:
                    grads[n] *= weights.whole
                grads[n] += self.weighed_do(chunk, do).T @ one
        if self.config.decay != "none":
            self.logarithms(chunk, added)

    def weighed(self, chunk: _Chunk, scores: t.Tile, change: t.Tile) -> tuple[t.Tile, t.Tile]:
        """P and dP, [n, m] each, from q k^T and dO v^T."""
        m, n = self.places
        skip = self.skip
        if skip is not None:
            own = t.sum_along(t.where(n.equals(m), change, 0.0), "m").rename("n", "t")
            skip, own = (x if self.once is None else x * self.once for x in (skip, own))
            self.sums["dskip"] += own
        between = chunk.weights.between() if chunk.weights is not None else self.scale
        seen, change = (t.where(n <= m, x * between, 0.0) for x in (scores, change))
        if skip is not None:
            seen = seen + t.where(n.equals(m), skip, 0.0)
        return seen.cast(t.BF16), change.cast(t.BF16)

    def part_of(self, chunk: _Chunk, number: int, change: t.Tile) -> tuple[t.Tile, t.Tile]:
        """q dq and k dk of the rows, summed over a part of d: [m] and [n]."""
        q, k, weights = chunk.q[number], chunk.k[number], chunk.weights
        dk = contracted(chunk.v, [after[number] for after in chunk.after])
        if weights is not None:
            dk *= weights.ahead.rename("t", "n")
        dk += change @ q
        self.give("dk", chunk.c, "n", self.parts[number], dk)
        asked = [self.weighed_do(chunk, do) for do in chunk.do]
        dq = contracted(asked, [states[number] for states in chunk.states])
        dq += change @ k
        self.give("dq", chunk.c, "m", self.parts[number], dq)
        return t.sum_along(q.cast(t.FP32) * dq, "d"), t.sum_along(k.cast(t.FP32) * dk, "d")

    def weighed_do(self, chunk: _Chunk, do: t.Tile) -> t.Tile:
        """The rows of do as the state before the chunk has their weight, [m, e].

        Both dq and R are made of these, rounded once: what is summed to the gradients of decays is
        a difference of the two, in which one rounding of do alone would stay for 64 rows.
        """
        weight = chunk.weights.before.rename("t", "m") if chunk.weights is not None else self.scale
        return (do.cast(t.FP32) * weight).cast(t.BF16)

    def logarithms(self, chunk: _Chunk, parts: list[tuple[t.Tile, t.Tile]]) -> None:
        """The gradients of the decays of a chunk, behind those of its rows."""
        (from_q, from_k), *rest = parts
        for one, other in rest:
            from_q, from_k = from_q + one, from_k + other
        from_q, from_k = from_q.rename("m", "t"), from_k.rename("n", "t")
        own = from_q - from_k
        start = [
            product(state.cast(t.FP32), grad)
            for states, grads in zip(chunk.states, self.grads, strict=True)
            for state, grad in zip(states, grads, strict=True)
        ]
        self.gates_of(chunk, sum(start[1:], start[0]) + (own - t.cumsum(own, "t")), from_k)

    def gates_of(self, chunk: _Chunk, change: t.Tile, from_k: t.Tile) -> None:
        """Store or add up the gradients of what the decays of a chunk are made from."""
        inside = t.coordinate("t", CHUNK, chunk.c * CHUNK) < t.size("rows")
        change = t.where(inside, change, 0.0)
        if chunk.vector is None:
            self.sums["dg"] += change
        elif self.config.decay == "token":
            self.give_row("dg", chunk.c, change)
        else:
            step = chunk.vector
            self.sums["da"] += change * step
            # k dk has the step as a factor.
            change = change * (self.rate / LOG2E) + from_k / t.maximum(step, LEAST_STEP)
            if chunk.slope is not None:
                change = change * chunk.slope
                self.sums["dbias"] += change
            self.give_row("ddt", chunk.c, change)


def contracted(left: list[t.Tile], right: list[t.Tile]) -> t.Tile:
    """The sum of products of parts along the axis that both have."""
    total = left[0] @ right[0]
    for one, other in zip(left[1:], right[1:], strict=True):
        total += one @ other
    return total


def product(one: t.Tile, other: t.Tile) -> t.Tile:
    """The sum of all products of elements [e, d]."""
    return t.sum_along(t.sum_along(one * other, "d"), "e")


TASKS = {
    "rows": ScalarBackward,
    "keys": ChannelKeys,
    "queries": ChannelQueries,
    "values": DeltaValues,
    "rest": DeltaRest,
}
