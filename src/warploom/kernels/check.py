"""Checking one run of a kernel: are the numbers right, and is every element written by one task?

Errors are judged against float64. The program says how large they may be: `tile.rounding` computes
how far its types, sums and functions round every element, so an fp32 result has tighter bounds than
one of 8-bit operands. The check asks two questions. Is the whole array within its bound, in norm?
That finds a slightly wrong factor. Is every element within its own bound? That finds one wrong
element.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.codegen.compile.build import Built
from warploom.codegen.ir.source import CudaSource
from warploom.emulate.kernel import Library
from warploom.errors import CheckFailed, InputError
from warploom.kernels.library import Entry, Values, entry
from warploom.kernels.user import NO_RESULT, written_names
from warploom.runtime.arrays import DeviceArray
from warploom.runtime.driver import CudaDevice
from warploom.tile import Program, interpret
from warploom.tile.footprint import Footprint, footprints
from warploom.tile.fragments import in_memory, in_order
from warploom.tile.interpret import bind
from warploom.tile.rounding import Spread, limits, spreads

# Standard deviations of the error by rounding that are allowed: of one element among millions, and
# of the norm of many, which hardly varies (less where they share an error: a factor of a row).
ELEMENT_DEVIATIONS = 8.0
NORM_DEVIATIONS = 3.0
EMULATED_BLOCKS = 4  # of a persistent kernel on the emulated GPU


@dataclass(frozen=True)
class Finding:
    """Elements of an output that are not as they should be: how many, and the first of them."""

    array: str
    count: int
    size: int
    first: tuple[int, ...]
    what: str

    def __str__(self) -> str:
        """One line."""
        first = f", the first {list(self.first)}" if self.first else ""
        return f"{self.array}: {self.count:,} of {self.size:,} elements {self.what}{first}"


@dataclass(frozen=True)
class CheckResult:
    """What one run of a kernel showed.

    errors      of each output, relative, in norm; inf where it is not written whole, or has NaN or
                inf in other places
    bounds      the error allowed for each
    wrong       elements beyond their own bounds
    unwritten   elements that no task writes, or that the run left as they were
    overlaps    elements that several tasks write, so that the last one wins
    judge       what gave the right results; `place` is "cpu" (the interpreter), "emulated" or "gpu"
    """

    kernel: str
    place: str
    judge: str
    sizes: dict[str, int]
    errors: dict[str, float]
    bounds: dict[str, float]
    wrong: tuple[Finding, ...] = ()
    unwritten: tuple[Finding, ...] = ()
    overlaps: tuple[Finding, ...] = ()

    @property
    def passed(self) -> bool:
        """Every output is within its bound, written whole, and each element by one task."""
        return not self.problems

    @property
    def problems(self) -> tuple[str, ...]:
        """What is wrong, a line each, causes first."""
        found = [*self.unwritten, *self.overlaps, *self.wrong]
        named = {one.array for one in found}
        beyond = [
            f"{name}: relative error {error:.2e}, allowed {self.bounds[name]:.1e}"
            for name, error in self.errors.items()
            if not (error <= self.bounds[name] or name in named)
        ]
        return (*map(str, found), *beyond)

    def require(self) -> CheckResult:
        """This result; raises `CheckFailed` with all that is wrong where something is."""
        if not self.passed:
            raise CheckFailed(f"{self.kernel} on {self.place}: {'; '.join(self.problems)}")
        return self

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {**asdict(self), "passed": self.passed}

    @property
    def numbers(self) -> str:
        """The error of every output, a line each."""
        return "\n".join(
            f"{self.kernel} {name} on {self.place}: relative error {error:.2e} (bound "
            f"{self.bounds[name]:.1e}) against {self.judge}"
            for name, error in self.errors.items()
        )

    def __repr__(self) -> str:
        return f"{'pass' if self.passed else 'FAIL'}: {self}"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"

    def __str__(self) -> str:
        """A line an output, then a line for everything that is wrong with its elements."""
        found = [*self.unwritten, *self.overlaps, *self.wrong]
        return "\n".join([self.numbers, *map(str, found)])


def checked(
    name: str,
    config: Any,
    sizes: Mapping[str, int],
    code: Built | CudaSource | None = None,
    seed: int = 0,
) -> CheckResult:
    """Run a kernel on random data and judge every output; `config` and `sizes` of `configure`.

    Without `code` the interpreter runs it; a built kernel runs on the GPU here, a source on the
    emulated GPU, whose order of events `seed` draws, too. Raises `InputError` for what cannot be
    run, `DeviceError` without a GPU, `Fault` for what a GPU does not allow.
    """
    kernel = entry(name)
    program = kernel.program(config)
    _refuse(name, program, sizes)
    try:
        arrays = bind(program, kernel.arrays(program, sizes, seed))
        got, place = _run(program, code, arrays, kernel.scalars, seed)
        wanted = kernel.outputs(config, arrays)
        found = _judged(kernel, program, arrays, got, wanted, seed)
    except MemoryError:
        text = ", ".join(f"{dim}={sizes[dim]:,}" for dim in program.dims)
        raise InputError(f"{name}: arrays of {text} do not fit this computer's memory") from None
    dims = {dim: sizes[dim] for dim in program.dims}
    return CheckResult(name, place, kernel.judge, dims, **found)


def _run(
    program: Program,
    code: Built | CudaSource | None,
    arrays: Values,
    scalars: Mapping[str, float],
    seed: int,
) -> tuple[Values, str]:
    """The arrays after a run, and where it was."""
    if code is None:
        return interpret(program, arrays, scalars), "cpu"
    if isinstance(code, Built):
        return run_on_gpu(program, code, arrays, scalars), "gpu"
    return Library([code]).run(0, program, arrays, scalars, EMULATED_BLOCKS, seed), "emulated"


def run_on_gpu(
    program: Program, built: Built, arrays: Values, scalars: Mapping[str, float] | None = None
) -> Values:
    """Every array as the kernel leaves it; the arguments stay unchanged.

    Values are rounded to the declared element types first, as `tile.interpret` does. Raises
    `InputError` for what the launch refuses and `DeviceError` for a fault.
    """
    values = in_memory(program, bind(program, arrays))
    kernel, device = built.kernel(), CudaDevice()
    memory = {one.name: DeviceArray(device, values[one.name], one.dtype) for one in program.arrays}
    try:
        kernel(memory, scalars, device.stream)
        return in_order(program, {name: array.numpy() for name, array in memory.items()})
    finally:
        for array in memory.values():
            array.free()
        device.close()


def _refuse(name: str, program: Program, sizes: Mapping[str, int]) -> None:
    if not written_names(program):
        raise InputError(f"{name}: the program stores nothing, so there is nothing to check")
    if missing := [dim for dim in program.dims if dim not in sizes]:
        raise InputError(
            f"{name}: a run does not know how long {missing[0]!r} is in this configuration; use it "
            "from Python with arrays of your own"
        )


def _judged(
    kernel: Entry,
    program: Program,
    arrays: Values,
    got: Values,
    wanted: Mapping[str, NDArray[np.float64]],
    seed: int,
) -> dict[str, Any]:
    """The fields of a `CheckResult` that say what was found."""
    expected = spreads(program, arrays, kernel.scalars, seed)
    prints = footprints(program, arrays)
    errors: dict[str, float] = {}
    bounds: dict[str, float] = {}
    wrong: list[Finding] = []
    unwritten: list[Finding] = []
    overlaps: list[Finding] = []
    for name, want in wanted.items():
        left = _left(arrays[name], got[name], want, prints[name].written)
        errors[name] = math.inf if left.any() else relative_error(got[name], want)
        bounds[name] = norm_bound(expected[name]) if kernel.bound is None else kernel.bound
        never = left & ~prints[name].written
        unwritten += _finding(name, never, "are never written")
        unwritten += _finding(name, left & ~never, "are NaN or were not written")
        overlaps += _overlap(prints[name])
        if kernel.bound is None:
            allowed = limits(expected[name], ELEMENT_DEVIATIONS)
            wrong += off_by_more(name, got[name], want, allowed, ~left)
    found = {"wrong": wrong, "unwritten": unwritten, "overlaps": overlaps}
    lists = {name: tuple(one) for name, one in found.items()}
    return {"errors": errors, "bounds": bounds, **lists}


def _left(
    before: NDArray[Any], after: NDArray[Any], want: NDArray[np.float64], written: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Elements that hold no result, as before the run; NaN may be one where it is the right one."""
    if before.dtype.kind != "f":
        return (before == NO_RESULT) & (after == NO_RESULT)
    return np.isnan(before) & np.isnan(after) & ~(np.isnan(want) & written)


def _finding(name: str, mask: NDArray[np.bool_], what: str) -> list[Finding]:
    count = int(mask.sum())
    if not count:
        return []
    first = np.unravel_index(int(np.argmax(mask)), mask.shape)
    return [Finding(name, count, mask.size, tuple(int(at) for at in first), what)]


def _overlap(footprint: Footprint) -> list[Finding]:
    one = footprint.overlap
    if one is None:
        return []
    tasks = " and ".join(
        "task " + ", ".join(f"{axis}={at}" for axis, at in task.items()) for task in one.tasks
    )
    what = f"are written by more than one task ({tasks})"
    return [Finding(one.array, one.count, footprint.written.size, one.first, what)]


def off_by_more(
    name: str,
    got: NDArray[Any],
    want: NDArray[np.float64],
    allowed: NDArray[np.float64],
    judged: NDArray[np.bool_],
) -> list[Finding]:
    """What of an array is farther from what is right than allowed, where it is judged."""
    with np.errstate(invalid="ignore"):
        gap = np.abs(got - want)
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    beyond = judged & ~np.where(np.isfinite(want), gap <= allowed, same)
    found = _finding(name, beyond, "are off by more than rounding explains")
    if not found:
        return []
    at = found[0].first
    said = f"{found[0].what} ({got[at]:.6g}, expected {want[at]:.6g})"
    return [replace(found[0], what=said)]


def relative_error(got: NDArray[Any], want: NDArray[np.float64]) -> float:
    """The error of an array over the array, in norm; infinite where other elements are finite."""
    finite = np.isfinite(want)
    if not np.array_equal(finite, np.isfinite(got)):
        return math.inf
    exact = want[finite]
    return float(np.linalg.norm(got[finite] - exact) / (np.linalg.norm(exact) or 1.0))


def norm_bound(spread: Spread) -> float:
    """The error that rounding explains, as `relative_error` counts it."""
    many = math.sqrt(max(1, int(spread.known.sum())))
    return (NORM_DEVIATIONS + (ELEMENT_DEVIATIONS - NORM_DEVIATIONS) / many) * spread.relative
