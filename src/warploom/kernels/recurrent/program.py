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
    Index,
    Program,
    Tile,
    array,
    cdiv,
    coordinate,
    cumsum,
    exp2,
    grid,
    load,
    log2,
    loop,
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
LEAST_STATE = 64  # rows of the state's tile: a shorter head is padded with zeros
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
    key_dim     d, at most 128; value_dim: e, a multiple of value_block
    value_block columns of the state that one task has; 0: as many as fit, at most 64
    chunk       rows of a chunk
    skip        o += skip_h v, skip: [heads] (Mamba-2's D)
    initial     the state before the first row is given: [batch, heads, d, e]
    final       the state after the last row is stored: [batch, heads, d, e]
    """

    decay: str = "token"
    key_dim: int = 64
    value_dim: int = 64
    value_block: int = 0
    chunk: int = 64
    skip: bool = False
    initial: bool = False
    final: bool = False

    def __post_init__(self) -> None:
        """Refuse what has no meaning or no tile."""
        if self.decay not in DECAYS:
            raise InputError(f"recurrent decay={self.decay!r}: expected one of {', '.join(DECAYS)}")
        if not 0 < self.key_dim <= 128 or self.key_dim % 8:
            raise InputError(
                f"recurrent key_dim={self.key_dim}: expected a multiple of 8, at most 128"
            )
        if self.value_dim <= 0 or self.columns % 16 or self.value_dim % 8:
            raise InputError(
                f"recurrent value_dim={self.value_dim} value_block={self.value_block}: expected a "
                "multiple of 8 and one of 16"
            )
        if self.chunk not in (64, 128):
            raise InputError(f"recurrent chunk={self.chunk}: expected 64 or 128")

    @property
    def depth(self) -> int:
        """Rows of the state's tile."""
        return -(-self.key_dim // LEAST_STATE) * LEAST_STATE

    @property
    def columns(self) -> int:
        """Columns of the state's tile."""
        return self.value_block or min(64, -(-self.value_dim // 16) * 16)


def recurrent(config: RecurrentConfig) -> Program:
    """The program of a configuration; scalar `scale` multiplies the result."""
    arrays = {name: array(BF16, "batch rows groups d") for name in ("q", "k")}
    arrays |= {name: array(BF16, "batch rows heads e") for name in ("v", "o")}
    heads, tokens, states = "heads", "batch rows heads", "batch heads d e"
    more = {"head": {"g": heads}, "token": {"g": tokens}, "step": {"dt": tokens, "a": heads}}
    given = more.get(config.decay, {}) | ({"skip": heads} if config.skip else {})
    given |= {"initial": states} if config.initial else {}
    given |= {"final": states} if config.final else {}
    arrays |= {name: array(FP32, dims) for name, dims in given.items()}

    def body(**given: Array) -> None:
        _Task(config, given).run()

    return trace(body, arrays, name="recurrent")


@dataclass(frozen=True)
class _Weights:
    """What the rows of a chunk are weighed by, as vectors along rows (m) and columns (n).

    inside    exponents of 2, so that row i weighs row j by 2 ** (own_i - other_j)
    whole     by what the state before the chunk is multiplied
    ahead     of each row, its weight in the state after the chunk
    """

    own: Tile
    other: Tile
    whole: Tile
    ahead: Tile


class _Task:
    """Traces what one task does: a head's rows, for some columns of its state."""

    def __init__(self, config: RecurrentConfig, arrays: Mapping[str, Array]) -> None:
        self.config, self.arrays = config, arrays
        self.factor = scalar("scale")
        blocks = cdiv(size("e"), config.columns)
        self.batch, self.head, column = grid(batch=size("batch"), heads=size("heads"), cols=blocks)
        self.group = self.head * size("groups") // size("heads")
        self.depth = span(0, config.depth, "d")
        self.values = span(column * config.columns, config.columns, "e")
        self.places = coordinate("m", config.chunk), coordinate("n", config.chunk)

    def run(self) -> None:
        config, arrays, chunk = self.config, self.arrays, self.config.chunk
        where_state = self.batch, self.head, self.depth, self.values
        if config.initial:
            state = load(arrays["initial"], *where_state)
        else:
            state = zeros(d=config.depth, e=config.columns)
        kept = state.cast(BF16)
        vectors = self._vectors(0)
        skip = load(arrays["skip"], self.head) if config.skip else None
        for i in loop(cdiv(size("rows"), chunk)):
            rows, others = span(i * chunk, chunk, "m"), span(i * chunk, chunk, "n")
            q = load(arrays["q"], self.batch, rows, self.group, self.depth)
            k = load(arrays["k"], self.batch, others, self.group, self.depth)
            v = load(arrays["v"], self.batch, others, self.head, self.values)
            scores = q @ k
            out = q @ kept
            weights = self._weights(vectors, i)
            if weights is None:
                state += k @ v
            else:
                for name, vector in self._vectors(i + 1).items():
                    vectors[name][:] = vector
                # The state goes on beside the scores: what they need of it is kept.
                keys = (k.T.cast(FP32) * weights.ahead).cast(BF16)
                state *= weights.whole
                state += keys @ v
                scores *= exp2(weights.own - weights.other)
            scores[:] = where(self.places[0] >= self.places[1], scores, 0.0)
            if skip is not None:
                same = self.places[0].equals(self.places[1])
                scores[:] = where(same, scores + skip, scores)
            if weights is not None:
                out *= exp2(weights.own)
            out += scores.cast(BF16) @ v
            result = (out * self.factor).cast(BF16)
            store(arrays["o"], self.batch, rows, self.head, self.values, tile=result)
            kept[:] = state.cast(BF16)
        if config.final:
            store(arrays["final"], *where_state, tile=state)

    def _vectors(self, i: Index | int) -> dict[str, Tile]:
        """What a chunk's weights are made of, loaded a chunk ahead."""
        name = {"token": "g", "step": "dt"}.get(self.config.decay)
        if name is None:
            return {}
        chunk = self.config.chunk
        return {
            axis: load(self.arrays[name], self.batch, span(i * chunk, chunk, axis), self.head)
            for axis in "mn"
        }

    def _weights(self, vectors: Mapping[str, Tile], i: Index) -> _Weights | None:
        config = self.config
        if config.decay == "none":
            return None
        if config.decay == "head":
            return self._constant(i)
        rate = LOG2E
        if config.decay == "step":
            rate = load(self.arrays["a"], self.head) * LOG2E
        own, other = (cumsum(vectors[axis] * rate, axis) for axis in "mn")
        whole = sum_along(vectors["n"] * rate, "n")
        if config.decay == "step":
            # A row is added dt times.
            other = other - log2(vectors["n"])
        return _Weights(own, other, exp2(whole), exp2(whole - other))

    def _constant(self, i: Index) -> _Weights:
        rate = load(self.arrays["g"], self.head) * LOG2E
        own, other = ((place + 1).cast(FP32) * rate for place in self.places)
        length = minimum_index(size("rows") - i * self.config.chunk, self.config.chunk)
        whole = number(length) * rate
        return _Weights(own, other, exp2(whole), exp2(whole - other))


def default_schedule(config: RecurrentConfig) -> KernelSchedule:
    """The schedule that a configuration gets: two blocks on an SM, each with a state."""
    plan = LaunchPlan(resident=2, store_panels=1)
    return schedule_named(recurrent(config), "lcsf", plan)
