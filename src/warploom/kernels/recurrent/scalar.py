"""A chunk under decays that are one number a row: linear attention, RetNet, simple GLA, Mamba-2."""

from __future__ import annotations

from collections.abc import Mapping

from warploom import tile as t
from warploom.derive.lower.chunks import LOG2E, Weights, summed
from warploom.kernels.recurrent.config import RecurrentConfig
from warploom.kernels.recurrent.task import CHUNK, Task

LEAST_STEP = 2.0**-120  # of a dt, which has a logarithm
GATES = {"token": "g", "step": "dt"}  # what says the decay of a row
RATES = {"head": "g", "step": "a"}  # and of a head


class _Ahead:
    """Gates of the chunks to come: loaded two chunks before their weights are made, while those of
    the present one are made, as the next fence for the tensor core waits for loads too."""

    def __init__(self, task: ScalarTask) -> None:
        self.task, self.now, self.later = task, task.gate(0), task.gate(1)

    def weights(self, i: t.Index) -> Weights:
        """Of chunk i."""
        return self.task.weights(self.now, i)

    def load(self, i: t.Index) -> t.Tile:
        """Behind the scores of chunk i: gates for a later one."""
        return self.task.gate(i + 2)

    def turn(self, after: t.Tile) -> None:
        """To the next chunk."""
        self.now.assign(self.later)
        self.later.assign(after)


class ScalarTask(Task):
    """Traces what one task does."""

    axis = "n"  # along rows of registers, as gates are loaded

    def __init__(self, config: RecurrentConfig, arrays: Mapping[str, t.Array]) -> None:
        super().__init__(config, arrays)
        rate = RATES.get(config.decay)
        self.rate = t.load(arrays[rate], self.head) * LOG2E if rate else LOG2E
        self.bias = t.load(arrays["bias"], self.head) if config.softplus else None
        self.skip = t.load(arrays["skip"], self.head) if config.skip else None
        self.places = t.coordinate("m", CHUNK), t.coordinate("n", CHUNK)

    def run(self) -> None:
        """All of it."""
        config, state, ahead = self.config, self.state(), self.ahead()
        if not config.output:
            self.add_up(state, ahead)
            return
        for i in t.loop(self.chunks):
            q, k, v = self.keys("q", i, "m"), self.keys("k", i, "n"), self.value(i, "n")
            self.keep(i, state)
            # ptxas waits for a matmul of loaded operands before one that takes registers, of which
            # a deep state has so many that they are better free again soon.
            scores = k @ q if config.depth > CHUNK else None
            out = state.cast(t.BF16) @ q
            scores = k @ q if scores is None else scores
            after = ahead.load(i) if ahead else None
            weights = ahead.weights(i) if ahead else self.constant(i)
            seen = self.seen(scores, weights.between() if weights else self.scale)
            added = v
            if weights is not None:
                added = weights.added(v)
                state *= weights.whole
            out *= weights.before.rename("t", "m") if weights else self.scale
            out += v @ seen.cast(t.BF16)
            state += added @ k
            self.put(i, out)
            if ahead is not None and after is not None:
                ahead.turn(after)
        self.end(state)

    def ahead(self) -> _Ahead | None:
        """Gates of chunks, where rows have some."""
        return _Ahead(self) if self.config.decay in GATES else None

    def add_up(self, state: t.Tile, ahead: _Ahead | None) -> None:
        """Only what rows add to the state."""
        for i in t.loop(self.chunks):
            k, v = self.keys("k", i, "n"), self.value(i, "n")
            weights = ahead.weights(i) if ahead else self.constant(i)
            if weights is None:
                state += v @ k
            else:
                added = weights.added(v)
                state *= weights.whole
                state += added @ k
            if ahead is not None:
                ahead.turn(ahead.load(i))
        self.end(state)

    def seen(self, scores: t.Tile, between: t.Tile | float) -> t.Tile:
        """How much of row n is in row m, [n, m]."""
        seen = t.where(self.places[1] <= self.places[0], scores * between, 0.0)
        if self.skip is not None:
            seen = seen + t.where(self.places[1].equals(self.places[0]), self.skip, 0.0)
        return seen

    def gate(self, i: t.Index | int) -> t.Tile:
        """What the weights of chunk i are made of."""
        return self.gates(GATES[self.config.decay], i, self.axis)

    def weights(self, gate: t.Tile, i: t.Index | int) -> Weights:
        """From the gates of chunk i."""
        return self.weights_of(self.vector(gate, i))

    def vector(self, gate: t.Tile, i: t.Index | int) -> t.Tile:
        """The g or dt of chunk i along an axis of their own."""
        vector = gate.cast(t.FP32).rename(self.axis, "t")
        if self.bias is not None:
            raw = vector + self.bias
            soft = t.maximum(raw, 0.0) + t.log(t.exp(-abs(raw)) + 1.0)
            vector = t.where(t.coordinate("t", CHUNK, i * CHUNK) < t.size("rows"), soft, 0.0)
        return vector

    def weights_of(self, vector: t.Tile) -> Weights:
        """From the g or dt of a chunk."""
        sums, whole = summed(vector * self.rate)
        # With a step a row is added dt times.
        step = self.config.decay == "step"
        other = t.log2(t.maximum(vector, LEAST_STEP)) - sums if step else -sums
        own, before = sums + t.log2(self.scale), t.exp2(sums) * self.scale
        return Weights(own, other, before, t.exp2(whole), t.exp2(whole + other))

    def constant(self, i: t.Index) -> Weights | None:
        """The weights of chunk i where no row has a gate; none where all are 1."""
        if self.config.decay == "none":
            return None
        sums = (t.coordinate("t", CHUNK, 1)).cast(t.FP32) * self.rate
        whole = t.number(t.minimum_index(t.size("rows") - i * CHUNK, CHUNK)) * self.rate
        own, before = sums + t.log2(self.scale), t.exp2(sums) * self.scale
        return Weights(own, -sums, before, t.exp2(whole), t.exp2(whole - sums))
