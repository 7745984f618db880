"""Hedgehog's attention with LoLCATs' window (arXiv 2402.04347, 2410.10254), forward.

A row weighs the rows of its own chunk of 64 up to itself and those of the chunk before by a
softmax's numerators, and all rows before these by features that are softmaxes themselves: with
s = scale q k and `top` its largest within the window,

    o_m = (sum w exp(s_mn - top_m) v_n + sum l phi(q_m) phi'(k_n) v_n) / the same without v
    phi(x) = [softmax(x M), softmax(-x M)],  phi' with a map of its own

Arrays: `q, k: [batch, rows, heads, d]`, `v, o: [batch, rows, heads, e]` in bf16, the maps `q_map,
k_map: [heads, d, f]` in bf16, and how much either part counts, `window, linear: [heads]` in fp32, w
and l, not below 0; scalar `scale`. The state [e, f] goes along in registers, as in
`kernels.recurrent.program`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from warploom import tile as t
from warploom.autosched.schedules import Policy
from warploom.codegen.ir.plan import LaunchPlan
from warploom.derive.lower.chunks import LOG2E
from warploom.errors import InputError
from warploom.kernels.recurrent.task import CHUNK, rows

FEATURES = 64  # columns of a map; there are twice as many features
COLUMNS = 128  # of the values, of a task
SAME = 16  # columns of sums over rows, all the same
LOWEST = -1e30  # a masked logarithm
FEATURE_SPAN = t.span(0, FEATURES, "n")
Wide = NDArray[np.float64]


@dataclass(frozen=True)
class HedgehogConfig:
    """What is static: d of the keys, a multiple of 8 up to 128."""

    key_dim: int = 128

    def __post_init__(self) -> None:
        """Refuse what has no tile."""
        if not 0 < self.key_dim <= 128 or self.key_dim % 8:
            raise InputError(
                f"hedgehog key_dim={self.key_dim}: expected a multiple of 8, at most 128"
            )

    @property
    def depth(self) -> int:
        """Of tiles along d, with zeros where a head is shorter."""
        return 128 if self.key_dim > CHUNK else CHUNK


def hedgehog(config: HedgehogConfig) -> t.Program:
    """The program of a configuration."""
    arrays = {name: t.array(t.BF16, "batch rows heads d") for name in ("q", "k")}
    arrays |= {name: t.array(t.BF16, "batch rows heads e") for name in ("v", "o")}
    arrays |= {name: t.array(t.BF16, "heads d f") for name in ("q_map", "k_map")}
    arrays |= {name: t.array(t.FP32, "heads") for name in ("window", "linear")}

    def body(**given: t.Array) -> None:
        _Task(config, given).run()

    return t.trace(body, arrays, name="hedgehog")


def default_policy() -> Policy:
    """Two groups, each with half of 128 columns. Beside their operands one slot of each load fits,
    so it is given back as soon as it is read: a fifth less time than at the end of the chunk."""
    plan = LaunchPlan(split="e", store_panels=1, divided=True)
    return Policy("lcsf-early", plan, depth=2, slots={"q": 1, "k": 1, "v": 1})


class _Task:
    """Traces a task: a head's rows, for 128 columns of the values. Rows are m, and i as operands;
    keys are n, and so are features."""

    def __init__(self, config: HedgehogConfig, arrays: Mapping[str, t.Array]) -> None:
        self.config, self.arrays = config, arrays
        places = {
            "batch": t.size("batch"),
            "heads": t.size("heads"),
            "cols": t.cdiv(t.size("e"), COLUMNS),
        }
        self.batch, self.head, self.column = t.grid(**places)
        self.depth = t.span(0, config.depth, "d")
        self.values = t.span(self.column * COLUMNS, COLUMNS, "e")
        self.window, self.linear = (t.load(arrays[x], self.head) for x in ("window", "linear"))

    def run(self) -> None:
        """All of it."""
        maps = [t.load(self.arrays[f"{x}_map"], self.head, self.depth, FEATURE_SPAN) for x in "qk"]
        states = [t.zeros(e=COLUMNS, n=FEATURES) for _ in range(2)]
        # Sums of features over rows are matmuls with ones, the same in every column: down the rows
        # of a register tile a sum takes 48 shuffles.
        ones = t.full(1.0, t.BF16, i=CHUNK, g=SAME)
        sums = [t.zeros(n=FEATURES, g=SAME) for _ in range(2)]
        scale, share = t.scalar("scale") * LOG2E, t.log2(self.window)
        m, n = t.coordinate("m", CHUNK), t.coordinate("n", CHUNK)
        for c in t.loop(t.cdiv(t.size("rows"), CHUNK)):
            first = t.number(c).equals(0)  # of the chunk before there is nothing
            q, k, old = self.keys("q", c, "m"), self.keys("k", c, "n"), self.keys("k", c - 1, "m")
            v, before = self.value(c, "n"), self.value(c - 1, "n")
            near, far, mapped = q @ k, q @ old.rename("m", "n"), q @ maps[0]
            near = t.where(m >= n, near, LOWEST)
            highest = t.where(first, LOWEST, t.max_along(far, "n"))
            top = t.maximum(t.max_along(near, "n"), highest) * scale - share
            near = t.exp2(near * scale - top)
            far = t.exp2(far * scale - t.where(first, -LOWEST, top))
            window = t.sum_along(near, "n"), t.sum_along(far, "n")
            weights = [part.cast(t.BF16).rename("m", "i") for part in (near, far)]
            # Each half from a product of its own, so that two groups may make one each.
            past = [old @ maps[1] for _ in range(2)]
            counts = [one.cast(t.BF16) for one in sums]
            asked = [phi(mapped, self.linear, half).cast(t.BF16) for half in range(2)]
            linear = t.max_along(asked[0] @ counts[0] + asked[1] @ counts[1], "g")
            asked = [part.rename("m", "i") for part in asked]
            kept = [
                phi(past[half], t.where(first, 0.0, 1.0), half).cast(t.BF16).rename("m", "i")
                for half in range(2)
            ]
            out = v @ weights[0]
            out += before @ weights[1]
            for operand, state in zip(asked, states, strict=True):
                out += state.cast(t.BF16) @ operand
            for half, operand in enumerate(kept):
                sums[half] += operand @ ones
                states[half] += before.rename("n", "i") @ operand
            out *= (1.0 / (window[0] + window[1] + linear)).rename("m", "i")
            where_out = self.batch, rows(c, "i"), self.head, self.values
            t.store(self.arrays["o"], *where_out, tile=out.T.cast(t.BF16))

    def keys(self, name: str, i: t.Index, axis: str) -> t.Tile:
        """The q or k of chunk i, [axis, d]."""
        return t.load(self.arrays[name], self.batch, rows(i, axis), self.head, self.depth)

    def value(self, i: t.Index, axis: str) -> t.Tile:
        """The v of chunk i, [axis, e]."""
        return t.load(self.arrays["v"], self.batch, rows(i, axis), self.head, self.values)


def phi(x: t.Tile, times: t.Tile, half: int) -> t.Tile:
    """The softmax of x [rows, n] along n, or that of -x, so many times."""
    if half:
        found = t.exp2(t.min_along(x, "n") * LOG2E - x * LOG2E)
    else:
        found = t.exp2(x * LOG2E - t.max_along(x, "n") * LOG2E)
    return found * (times / t.sum_along(found, "n"))


def reference(values: Mapping[str, NDArray[np.floating]], scale: float) -> Wide:
    """o in float64, from the arrays by name."""
    wide = {name: np.asarray(one, np.float64) for name, one in values.items() if name != "o"}
    count = int(wide["q"].shape[1])
    n = np.arange(count)
    m = n[:, None]
    near = (n <= m) & (n // CHUNK >= m // CHUNK - 1)
    s = np.where(near, np.einsum("bmhd,bnhd->bhmn", wide["q"], wide["k"]) * scale, -np.inf)
    weights = wide["window"][:, None, None] * np.exp(s - s.max(-1, keepdims=True))

    def mapped(name: str) -> Wide:
        x = np.einsum("brhd,hdf->brhf", wide[name], wide[f"{name}_map"])
        parts = [np.exp(y - y.max(-1, keepdims=True)) for y in (x, -x)]
        return np.concatenate([y / y.sum(-1, keepdims=True) for y in parts], -1)

    linear = np.einsum("bmhf,bnhf->bhmn", mapped("q"), mapped("k"))
    weights = weights + wide["linear"][:, None, None] * np.where((n <= m) & ~near, linear, 0.0)
    weights = weights / weights.sum(-1, keepdims=True)
    return np.einsum("bhmn,bnhe->bmhe", weights, wide["v"])
