"""Recurrent attention forward, S_t = G_t S_{t-1} + k_t v_t^T and o_t = scale q_t S_t, in chunks.

Arrays: `q, k: [batch, rows, groups, d]`, `v, o: [batch, rows, heads, e]`; `heads / groups`
neighbouring heads share their q and k. The state is fp32, one a head. With a the running sum of the
logarithms of G from the start of a chunk of rows,

    o = exp(a) q S + (q k^T * exp(a_i - a_j) for j <= i) v
    S = exp(a_C) S + (exp(a_C - a) k)^T v

so every exponent is at most 0. What G is (`RecurrentConfig.decay`) gives linear attention,
RetNet and lightning attention, simple GLA, or Mamba-2's SSD (arXiv 2405.21060, section 6).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from warploom.autosched.schedules import schedule_named
from warploom.codegen.ir.plan import KernelSchedule, LaunchPlan
from warploom.errors import InputError
from warploom.tile import (
    BF16,
    FP32,
    Array,
    DType,
    Index,
    Program,
    Tile,
    array,
    cdiv,
    coordinate,
    cumsum,
    exp,
    exp2,
    grid,
    load,
    log,
    log2,
    loop,
    maximum,
    minimum_index,
    number,
    scalar,
    size,
    span,
    store,
    sum_along,
    trace,
    where,
    zeros,
)

LOG2E = math.log2(math.e)
CHUNK = 64  # rows
LEAST_STEP = 2.0**-120  # of a dt, which has a logarithm
DECAYS = ("none", "head", "token", "step")


@dataclass(frozen=True)
class RecurrentConfig:
    """What is static in recurrent attention.

    decay       what the state is multiplied by before a row is added:
                "none"   1
                "head"   exp(g), g: [heads], the same in every row
                "token"  exp(g), g: [batch, rows, heads]
                "step"   exp(dt a), dt: [batch, rows, heads], a: [heads]; rows are added as
                         dt k v^T (Mamba-2)
    softplus    the dt of a "step" is softplus(dt + bias), bias: [heads]
    gates       the element type of g, or dt, of every row
    key_dim     d, a multiple of 8, at most 128
    value_dim   e, a multiple of 8; a task has 64 or 128 of them
    shared      all heads have one q and k: groups is 1
    skip        o += skip_h v, skip: [heads] (Mamba-2's D)
    initial     the state before the first row is given: [batch, heads, d, e]
    final       the state after the last row is stored: [batch, heads, d, e]
    """

    decay: str = "token"
    softplus: bool = False
    gates: DType = FP32
    key_dim: int = 64
    value_dim: int = 64
    shared: bool = False
    skip: bool = False
    initial: bool = False
    final: bool = False

    def __post_init__(self) -> None:
        """Refuse what has no meaning or no tile."""
        if self.decay not in DECAYS:
            raise InputError(f"recurrent decay={self.decay!r}: expected one of {', '.join(DECAYS)}")
        if self.softplus and self.decay != "step":
            raise InputError(f"recurrent softplus=True decay={self.decay!r}: expected 'step'")
        if self.gates not in (FP32, BF16):
            raise InputError(f"recurrent gates={self.gates}: expected fp32 or bf16")
        if not 0 < self.key_dim <= 128 or self.key_dim % 8:
            raise InputError(
                f"recurrent key_dim={self.key_dim}: expected a multiple of 8, at most 128"
            )
        if self.value_dim <= 0 or self.value_dim % 8:
            raise InputError(f"recurrent value_dim={self.value_dim}: expected a multiple of 8")

    @property
    def depth(self) -> int:
        """Of the state's tile along d, with zeros where a head is shorter."""
        return 128 if self.key_dim > 64 else 64

    @property
    def columns(self) -> int:
        """Of the state's tile along e."""
        return 128 if self.value_dim > 64 else 64


def recurrent(config: RecurrentConfig) -> Program:
    """The program of a configuration; scalar `scale`, above 0, multiplies q k^T."""
    arrays = {name: array(BF16, "batch rows groups d") for name in ("q", "k")}
    arrays |= {name: array(BF16, "batch rows heads e") for name in ("v", "o")}
    heads, tokens, states = "heads", "batch rows heads", "batch heads d e"
    more = {"head": {"g": heads}, "token": {"g": tokens}, "step": {"dt": tokens, "a": heads}}
    given = more.get(config.decay, {}) | ({"skip": heads} if config.skip else {})
    given |= {"initial": states} if config.initial else {}
    given |= {"final": states} if config.final else {}
    given |= {"bias": heads} if config.softplus else {}
    narrow = {name: config.gates for name in ("g", "dt") if given.get(name) == tokens}
    arrays |= {name: array(narrow.get(name, FP32), dims) for name, dims in given.items()}

    def body(**given: Array) -> None:
        _Task(config, given).run()

    return trace(body, arrays, name="recurrent")


@dataclass(frozen=True)
class _Weights:
    """What the rows of a chunk are weighed by, as vectors along an axis t of their own: a thread
    then has few of them, and no warp waits for another one.

    Row m weighs row n by 2 ** (own_m + other_n), and what was before the chunk by `before`; in the
    state after the chunk row n has the weight `ahead`, the state before it the weight `whole`.
    """

    own: Tile
    other: Tile
    before: Tile
    whole: Tile
    ahead: Tile

    def between(self) -> Tile:
        """By what row m weighs row n, as a tile [n, m]."""
        return exp2(self.other.rename("t", "n") + self.own.rename("t", "m"))


class _Task:
    """Traces what one task does: a head's rows, for some columns of its state.

    Everything is transposed: the state, [e, d], is then the first operand of its product with q, so
    it stays in registers, and groups that share out its rows need nothing of one another.
    """

    def __init__(self, config: RecurrentConfig, arrays: Mapping[str, Array]) -> None:
        self.config, self.arrays = config, arrays
        self.scale = scalar("scale")
        blocks = cdiv(size("e"), config.columns)
        self.batch, self.head, column = grid(batch=size("batch"), heads=size("heads"), cols=blocks)
        # What does not depend on the head is loaded once for a cluster of them.
        own = self.head * size("groups") // size("heads")
        self.group: Index | int = 0 if config.shared else own
        self.depth = span(0, config.depth, "d")
        self.values = span(column * config.columns, config.columns, "e")
        self.places = coordinate("m", CHUNK), coordinate("n", CHUNK)

    def run(self) -> None:
        config, arrays = self.config, self.arrays
        where_state = self.batch, self.head, self.depth, self.values
        if config.initial:
            state = load(arrays["initial"], *where_state).T.copy()
        else:
            state = zeros(e=config.columns, d=config.depth)
        now, later = self._vector(0), self._vector(1)
        skip = load(arrays["skip"], self.head) if config.skip else None
        for i in loop(cdiv(size("rows"), CHUNK)):
            rows, others = span(i * CHUNK, CHUNK, "m"), span(i * CHUNK, CHUNK, "n")
            q = load(arrays["q"], self.batch, rows, self.group, self.depth)
            k = load(arrays["k"], self.batch, others, self.group, self.depth)
            v = load(arrays["v"], self.batch, others, self.head, self.values)
            scores = k @ q
            out = state.cast(BF16) @ q
            weights = self._weights(now, i)
            seen = scores * (weights.between() if weights else self.scale)
            seen = where(self.places[1] <= self.places[0], seen, 0.0)
            if skip is not None:
                seen = seen + where(self.places[1].equals(self.places[0]), skip, 0.0)
            added = v
            if weights is not None:
                added = (v.T.cast(FP32) * weights.ahead.rename("t", "n")).cast(BF16)
                state *= weights.whole
            out *= weights.before.rename("t", "m") if weights else self.scale
            out += v @ seen.cast(BF16)
            state += added @ k
            store(arrays["o"], self.batch, rows, self.head, self.values, tile=out.T.cast(BF16))
            after = self._vector(i + 2)
            if now is not None and later is not None and after is not None:
                now[:] = later
                later[:] = after
        if config.final:
            store(arrays["final"], *where_state, tile=state.T)

    def _vector(self, i: Index | int) -> Tile | None:
        """What a chunk's weights are made of, loaded two chunks ahead: fences for the tensor core
        wait for loads too."""
        name = {"token": "g", "step": "dt"}.get(self.config.decay)
        if name is None:
            return None
        # Along rows of tiles every warp loads its own: far apart in memory, all would be slow.
        rows = span(i * CHUNK, CHUNK, "n")
        return load(self.arrays[name], self.batch, rows, self.head)

    def _weights(self, vector: Tile | None, i: Index) -> _Weights | None:
        config = self.config
        if config.decay == "none":
            return None
        if vector is None:
            return self._constant(i)
        vector = vector.cast(FP32).rename("n", "t")
        if config.softplus:
            raw = vector + load(self.arrays["bias"], self.head)
            soft = maximum(raw, 0.0) + log(exp(-abs(raw)) + 1.0)
            vector = where(coordinate("t", CHUNK, i * CHUNK) < size("rows"), soft, 0.0)
        rate = load(self.arrays["a"], self.head) * LOG2E if config.decay == "step" else LOG2E
        sums = cumsum(vector * rate, "t")
        # The last of the sums to the last bit: the last row's weight is 1.
        last = coordinate("t", CHUNK).equals(CHUNK - 1)
        whole = sum_along(where(last, sums, 0.0), "t")
        # With a step a row is added dt times.
        other = log2(maximum(vector, LEAST_STEP)) - sums if config.decay == "step" else -sums
        own, before = sums + log2(self.scale), exp2(sums) * self.scale
        return _Weights(own, other, before, exp2(whole), exp2(whole + other))

    def _constant(self, i: Index) -> _Weights:
        rate = load(self.arrays["g"], self.head) * LOG2E
        sums = (coordinate("t", CHUNK, 1)).cast(FP32) * rate
        whole = number(minimum_index(size("rows") - i * CHUNK, CHUNK)) * rate
        own, before = sums + log2(self.scale), exp2(sums) * self.scale
        return _Weights(own, -sums, before, exp2(whole), exp2(whole - sums))


def default_schedule(config: RecurrentConfig) -> KernelSchedule:
    """The schedule that a configuration gets.

    Where weights are made of what a row says they are made beside the matmuls of the chunk before.
    """
    name = "skewed" if config.decay in ("token", "step") else "lcsf"
    return schedule_named(recurrent(config), name, default_launch(config))


def default_launch(config: RecurrentConfig) -> LaunchPlan:
    """The launch plan of the default schedule: two states on an SM, in two blocks or two groups."""
    return LaunchPlan(split="e", resident=1 if config.columns > 64 else 2, store_panels=1)
