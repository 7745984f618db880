"""Long convolution, y = k * x, by Fourier transforms that are matmuls.

Arrays: `x, y: [batch, rows, 64]` are the sequences of all heads, a head's one after the other's in
rows of 64; the spectrum of the heads' kernels is `kernel_re, kernel_im: [heads N1, 64]`
(`matrices`). A task has a tile of them: the sequences of one head, or of several where they are
short, and takes two batches at a time as the real and the imaginary part of one complex sequence:
the kernel is real, so neither part gets anything of the other one (Monarch's two products a
direction: arXiv 2311.05908).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from warploom.autosched.named import multistage
from warploom.codegen.ir.plan import KernelSchedule, LaunchPlan
from warploom.kernels.convolution.config import COLUMNS, ROWS, ConvolutionConfig
from warploom.tile import (
    BF16,
    FP32,
    Array,
    Complex,
    Index,
    Op,
    Program,
    Tile,
    array,
    cdiv,
    grid,
    load,
    loop,
    size,
    span,
    store,
    trace,
)

MATRICES = {"left": "f a", "right": "b g", "back": "o f"}
PARTS = ("re", "im")


def long_convolution(config: ConvolutionConfig) -> Program:
    """The program of a configuration."""
    arrays = {name: array(BF16, "batch rows b") for name in ("x", "y")}
    arrays |= {f"kernel_{part}": array(BF16, "bands g") for part in PARTS}
    arrays |= {f"twiddle_{part}": array(BF16, "f b") for part in PARTS}
    for name, dims in MATRICES.items():
        arrays |= {f"{name}_{part}": array(BF16, dims) for part in PARTS}

    def body(**given: Array) -> None:
        _task(config, given)

    return trace(body, arrays, name="long_convolution")


def default_schedule(config: ConvolutionConfig) -> KernelSchedule:
    """The schedule that a configuration gets: two blocks on an SM, beside which only x has room for
    a second slot, where no matrix takes it, and stores have none."""
    plan = LaunchPlan(split="f", resident=2, store="direct")
    program = long_convolution(config)
    made = multistage(program, 1, plan, 1, 0)
    ((index, schedule),) = made.loops.items()
    (loop,) = program.loops()
    loads = [op for op in loop.body if isinstance(op, Op) and op.kind == "load"]
    slots = 2 if config.square or config.causal else 1
    rows = {op.label: slots for op in loads if op.array is not None and op.array.name == "x"}
    depths = {**schedule.ring_depth, **rows}
    return replace(made, loops={index: replace(schedule, ring_depth=depths)})


def _task(config: ConvolutionConfig, arrays: Mapping[str, Array]) -> None:
    """Sequences of one tile of heads."""
    taken, pairs = config.taken, config.pairs
    blocks = {"tiles": cdiv(size("rows"), taken), "parts": cdiv(size("batch"), 2 * pairs)}
    tile, part = grid(**blocks)
    right = _matrix(arrays, "right", COLUMNS)
    # Where both transforms have one length, one matrix does for both.
    whole = config.square and not config.causal
    left = right.rename("b", "f") if whole else _matrix(arrays, "left", taken)
    back = _matrix(arrays, "back", ROWS)
    for i in loop(pairs):
        batches = [(part * pairs + i) * 2 + n for n in (0, 1)]
        rows = span(tile * taken, taken, "g" if whole else "a")
        re, im = (load(arrays["x"], batch, rows, span(0, COLUMNS)) for batch in batches)
        # Every iteration has them in a slot: in registers they would fill half of a thread's.
        twiddle = _factors(arrays, "twiddle", 0)
        kernel = _factors(arrays, "kernel", tile * ROWS)
        x = left @ Complex(re, im)
        x = _weighed(x, twiddle) @ right
        x = _by_conj(_weighed(x, kernel), right)
        x = back @ _weighed(x, twiddle, conj=True)
        for batch, out in zip(batches, (x.re, x.im), strict=True):
            kept = span(tile * taken, ROWS, "o", stop=(tile + 1) * taken)
            store(arrays["y"], batch, kept, span(0, COLUMNS), tile=out.cast(BF16))


def _matrix(arrays: Mapping[str, Array], name: str, columns: int) -> Complex:
    re, im = (load(arrays[f"{name}_{p}"], span(0, ROWS), span(0, columns)) for p in PARTS)
    return Complex(re, im)


def _factors(arrays: Mapping[str, Array], name: str, first: Index | int) -> Complex:
    where = span(first, ROWS, "f"), span(0, COLUMNS)
    re, im = (load(arrays[f"{name}_{part}"], *where) for part in PARTS)
    return Complex(re, im)


def _by_conj(a: Complex, b: Complex) -> Complex:
    """a times the conjugate of b, which is loaded and so has no negative."""
    re, im = a.re @ b.re, a.im @ b.re
    re += a.im @ b.im
    im -= a.re @ b.im
    return Complex(re, im)


def _weighed(x: Complex, by: Complex, conj: bool = False) -> Complex:
    """x by the factors, or by their conjugates, as operands of the next product. Every product has
    casts of its own, so that they are made where they are used."""

    def times(one: Tile, factor: Tile) -> Tile:
        return one * factor.cast(FP32)

    if conj:
        re = times(x.re, by.re) + times(x.im, by.im)
        return Complex(re, times(x.im, by.re) - times(x.re, by.im)).cast(BF16)
    re = times(x.re, by.re) - times(x.im, by.im)
    return Complex(re, times(x.re, by.im) + times(x.im, by.re)).cast(BF16)
