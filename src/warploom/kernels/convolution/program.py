"""Long convolution, y = k * x, by Fourier transforms that are matmuls.

Arrays: `x, y: [batch, tiles, rows, 64]` are the sequences of all heads, one after the other in rows
of 64; a tile has those of one head, or of several where they are short (`matrices`), and 32 rows of
causal sequences or 64 of others. The spectrum of the heads' kernels is `kernel_re, kernel_im:
[heads N1, 64]`. A task takes two batches at a time as the real and the imaginary part of one
complex sequence: the kernel is real, so neither part gets anything of the other one (Monarch's two
products a direction: arXiv 2311.05908).

Of longer sequences a tile is a head, whose rows are blocks of 32, and a task is one block of y,
which adds up over the blocks of x until its own (overlap and save): the transform of x is made
again for every block of y, as registers hold one sum of frequencies.
"""

from __future__ import annotations

from collections.abc import Mapping

from warploom import tile as t
from warploom.autosched.schedules import Policy
from warploom.codegen.ir.plan import LaunchPlan
from warploom.kernels.convolution.config import COLUMNS, ROWS, ConvolutionConfig

MATRICES = {"left": "f a", "right": "b g"}
PARTS = ("re", "im")


def long_convolution(config: ConvolutionConfig) -> t.Program:
    """The program of a configuration."""
    arrays = {name: t.array(t.BF16, "batch tiles rows b") for name in ("x", "y")}
    arrays |= {f"kernel_{part}": t.array(t.BF16, "bands g") for part in PARTS}
    arrays |= {f"twiddle_{part}": t.array(t.BF16, "f b") for part in PARTS}
    names = MATRICES | ({"back": "o f"} if config.causal else {})
    for name, dims in names.items():
        arrays |= {f"{name}_{part}": t.array(t.BF16, dims) for part in PARTS}

    def body(**given: t.Array) -> None:
        (_block if config.blocks else _task)(config, given)

    return t.trace(body, arrays, name="long_convolution")


def default_policy(config: ConvolutionConfig) -> Policy:
    """What a configuration gets: three tasks abreast, or two of blocks, whose sums take registers.
    x has room for a second slot where it has half the rows; elsewhere its one slot goes back as
    soon as it is read."""
    plan = LaunchPlan(split="f", abreast=3, store_panels=1)
    if config.blocks:  # the longest tasks first
        plan = plan.with_options(abreast=2, reverse=("rows_tile",))
    elif config.causal:
        return Policy("unpipelined", plan, groups=1, slots={"x": 2})
    return Policy("lcsf-early", plan, groups=1, depth=1)


def _task(config: ConvolutionConfig, arrays: Mapping[str, t.Array]) -> None:
    """Sequences of one tile of heads."""
    taken, pairs = config.taken, config.pairs
    blocks = {"tiles": t.size("tiles"), "parts": t.cdiv(t.size("batch"), 2 * pairs)}
    tile, part = t.grid(**blocks)
    left, right = _matrix(arrays, "left", taken), _matrix(arrays, "right", COLUMNS)
    # A matrix instruction has 64 rows: of causal sequences only the first half is stored.
    back = _matrix(arrays, "back", ROWS) if config.causal else left
    for i in t.loop(pairs):
        batches = [(part * pairs + i) * 2 + n for n in (0, 1)]
        rows = t.span(0, taken, "a"), t.span(0, COLUMNS)
        re, im = (t.load(arrays["x"], batch, tile, *rows) for batch in batches)
        # Every iteration has them in a slot: in registers they would fill half of a thread's.
        twiddle = _factors(arrays, "twiddle", 0)
        kernel = _factors(arrays, "kernel", tile * ROWS)
        x = left @ t.Complex(re, im)
        x = _weighed(x, twiddle) @ right
        x = _by_conj(_weighed(x, kernel), right)
        x = _conj_by(back, _weighed(x, twiddle, conj=True))
        for batch, out in zip(batches, (x.re, x.im), strict=True):
            whole = t.span(0, ROWS, out.type.names[0]), t.span(0, COLUMNS)
            t.store(arrays["y"], batch, tile, *whole, tile=out.cast(t.BF16))


def _block(config: ConvolutionConfig, arrays: Mapping[str, t.Array]) -> None:
    """One block of a pair of sequences of a head."""
    taken, blocks = config.taken, t.cdiv(t.size("rows"), config.taken)
    j, tile, part = t.grid(rows=blocks, tiles=t.size("tiles"), parts=t.cdiv(t.size("batch"), 2))
    left, right = _matrix(arrays, "left", taken), _matrix(arrays, "right", COLUMNS)
    back, batches = _matrix(arrays, "back", ROWS), [part * 2 + n for n in (0, 1)]
    re, im = (t.zeros(t.FP32, f=ROWS, g=COLUMNS) for _ in PARTS)
    for i in t.loop(j + 1):
        rows = t.span(i * taken, taken, "a"), t.span(0, COLUMNS)
        x = t.Complex(*(t.load(arrays["x"], batch, tile, *rows) for batch in batches))
        twiddle = _factors(arrays, "twiddle", 0)
        kernel = _factors(arrays, "kernel", (tile * blocks + j - i) * ROWS)
        x = _weighed(left @ x, twiddle) @ right
        more = _product(x, kernel)
        re[:], im[:] = re + more.re, im + more.im
    # What a loop loads comes by TMA: outside of one, threads would read the factors one by one.
    for _ in t.loop(1):
        twiddle = _factors(arrays, "twiddle", 0)
        x = _by_conj(t.Complex(re, im).cast(t.BF16), right)
        x = _conj_by(back, _weighed(x, twiddle, conj=True))
        for batch, out in zip(batches, (x.re, x.im), strict=True):
            whole = t.span(j * taken, ROWS, out.type.names[0], stop=(j + 1) * taken)
            t.store(arrays["y"], batch, tile, whole, t.span(0, COLUMNS), tile=out.cast(t.BF16))


def _matrix(arrays: Mapping[str, t.Array], name: str, columns: int) -> t.Complex:
    re, im = (t.load(arrays[f"{name}_{p}"], t.span(0, ROWS), t.span(0, columns)) for p in PARTS)
    return t.Complex(re, im)


def _factors(arrays: Mapping[str, t.Array], name: str, first: t.Index | int) -> t.Complex:
    where = t.span(first, ROWS, "f"), t.span(0, COLUMNS)
    re, im = (t.load(arrays[f"{name}_{part}"], *where) for part in PARTS)
    return t.Complex(re, im)


def _by_conj(a: t.Complex, b: t.Complex) -> t.Complex:
    """a times the conjugate of b, which is loaded and so has no negative."""
    re, im = a.re @ b.re, a.im @ b.re
    re += a.im @ b.im
    im -= a.re @ b.im
    return t.Complex(re, im)


def _conj_by(a: t.Complex, b: t.Complex) -> t.Complex:
    """The conjugate of a, which is loaded, times b."""
    re, im = a.re @ b.re, a.re @ b.im
    re += a.im @ b.im
    im -= a.im @ b.re
    return t.Complex(re, im)


def _weighed(x: t.Complex, by: t.Complex, conj: bool = False) -> t.Complex:
    """x by the factors, or by their conjugates, as operands of the next product."""
    return _product(x, by, conj).cast(t.BF16)


def _product(x: t.Complex, by: t.Complex, conj: bool = False) -> t.Complex:
    """x by the factors, or by their conjugates. Every product has casts of its own, so that they
    are made where they are used."""

    def times(one: t.Tile, factor: t.Tile) -> t.Tile:
        return one * factor.cast(t.FP32)

    if conj:
        re = times(x.re, by.re) + times(x.im, by.im)
        return t.Complex(re, times(x.im, by.re) - times(x.re, by.im))
    re = times(x.re, by.re) - times(x.im, by.im)
    return t.Complex(re, times(x.re, by.im) + times(x.im, by.re))
