"""One row of recurrent attention, its state in place: a step of decoding.

Arrays: `q, k: [batch, groups, d]`, `v, o: [batch, heads, e]`, `state: [batch, heads, d, e]` in fp32
([batch, heads, e, d] for the steps of Mamba-2, as mamba_ssm has it), which is read and written;
gates are those of `RecurrentConfig` without their rows. The state is moved twice and little else,
so there is nothing for tensor cores: a task is some columns of a head's state, and sums along d are
made over threads.
"""

from __future__ import annotations

from collections.abc import Mapping

from warploom import tile as t
from warploom.errors import InputError
from warploom.kernels.recurrent.config import RecurrentConfig
from warploom.kernels.recurrent.program import STATES, arrays_of

COLUMNS = 64  # of a state, a task
OF_MAMBA = "batch heads e d"


def recurrent_step(config: RecurrentConfig) -> t.Program:
    """The program of one row; scalar `scale` multiplies q k^T.

    Raises `InputError` for a configuration with states of its own arrays (`initial`, `final`),
    or with one of features (`taylor`).
    """
    if config.initial or config.final or config.states or config.taylor:
        raise InputError(
            "recurrent step: its state is in place; expected no initial, no final and no taylor"
        )
    arrays = arrays_of(config, "batch")
    arrays["state"] = t.array(t.FP32, STATES if config.decay != "step" else OF_MAMBA)

    def body(**given: t.Array) -> None:
        _Step(config, given).run()

    return t.trace(body, arrays, name="recurrent_step")


class _Step:
    """Traces what one task does."""

    def __init__(self, config: RecurrentConfig, arrays: Mapping[str, t.Array]) -> None:
        self.config, self.arrays = config, arrays
        self.scale = t.scalar("scale")
        blocks = t.cdiv(t.size("e"), COLUMNS)
        self.batch, self.head, column = t.grid(
            batch=t.size("batch"), heads=t.size("heads"), cols=blocks
        )
        group = 0 if config.shared else self.head * t.size("groups") // t.size("heads")
        self.depth = t.span(0, config.key_dim, "d")
        self.values = t.span(column * COLUMNS, min(COLUMNS, config.value_dim), "e")
        self.q, self.k = (
            t.load(arrays[name], self.batch, group, self.depth).cast(t.FP32) for name in ("q", "k")
        )
        self.v = t.load(arrays["v"], self.batch, self.head, self.values).cast(t.FP32)

    def run(self) -> None:
        """All of it."""
        config, sides = self.config, (self.depth, self.values)
        where = self.batch, self.head, *(sides if config.decay != "step" else sides[::-1])
        gate, weight = self.gate()
        state = t.load(self.arrays["state"], *where)
        if gate is not None:
            state = state * gate
        new = self.v
        if config.delta:
            new = new - t.sum_along(state * self.k, "d")
        if weight is not None:
            new = new * weight
        state = state + (self.k * new if config.decay != "step" else new * self.k)
        t.store(self.arrays["state"], *where, tile=state)
        out = t.sum_along(state * self.q, "d") * self.scale
        if config.skip:
            out = out + self.v * self.number("skip")
        t.store(self.arrays["o"], self.batch, self.head, self.values, tile=out.cast(t.BF16))

    def gate(self) -> tuple[t.Tile | None, t.Tile | None]:
        """(what the state is multiplied by, what the row is)."""
        config, weight = self.config, None
        if config.delta:
            weight = self.number("beta", True)
        if config.decay == "none":
            return None, weight
        if config.decay == "channel":
            gates = t.load(self.arrays["g"], self.batch, self.head, self.depth)
            return t.exp(gates.cast(t.FP32)), weight
        if config.decay != "step":
            return t.exp(self.number("g", config.decay == "token")), weight
        step = self.number("dt", True)
        if config.softplus:
            raw = step + self.number("bias")
            step = t.maximum(raw, 0.0) + t.log(t.exp(-abs(raw)) + 1.0)
        return t.exp(step * self.number("a")), step

    def number(self, name: str, by_batch: bool = False) -> t.Tile:
        """One of a head."""
        where = (self.batch, self.head) if by_batch else (self.head,)
        return t.load(self.arrays[name], *where).cast(t.FP32)
