"""A user's own tile program as a kernel: what `FILE.py:OBJECT` may be on the command line.

OBJECT is a `UserKernel`, a `Program`, or a function that gives a `Program`. The parameters of the
function become settings (`--set block=128`), so each needs a default; dimensions of the program's
arrays are sizes (`--set m=4096`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from numbers import Integral
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from warploom.autosched.schedules import Policy
from warploom.codegen.ir.plan import LaunchPlan
from warploom.derive.formula.frontend import Expr, as_diagram
from warploom.derive.formula.graph import Diagram
from warploom.errors import InputError
from warploom.kernels.formula import formula_kernel
from warploom.objects import called, load_object
from warploom.tile import DType, Program, Tunable, interpret
from warploom.tile.widen import widened

Values = Mapping[str, NDArray[Any]]
FILLING = 4096  # of a dimension nobody gave, to time a kernel at
MOST_ELEMENTS = 2**27  # of an array then
USUAL_SIZE = 200  # of a dimension nobody gave: not a multiple of a tile, so tails are run
NO_RESULT = -1515870811  # stands in int32 arrays that are to be written, as NaN in floating ones
KINDS: dict[type, str] = {bool: "bool", int: "int", float: "float", str: "str", DType: "DType"}


@dataclass(frozen=True)
class UserKernel:
    """A program with what running and judging it needs beyond its arrays.

    program     the program, or a function of settings that gives it
    reference   {name: array} in float64 of the outputs, from the arrays by name (rounded to their
                element types); without it the program's own meaning in float64 judges a run
    sizes       of dimensions, for `run`; others are 200
    scalars     values of the program's scalars
    inputs      {name: array} for sizes and a random generator, for arrays that are not normal
                random numbers (int32 arrays always need it)
    launch      grid, clusters and tile scheduler; the default is persistent
    bound       the relative error a run may have; None: what the rounding of its types explains,
                for every output and every element (`kernels.check`)
    full        sizes of dimensions, to time a kernel at; others are those of `sizes`, or fill a GPU
    whole       the sizes of dimensions that tasks take whole: the program is for no others
    derivation  how the program follows from a formula, for a person
    """

    program: Program | Callable[..., Program]
    reference: Callable[[Values], Values] | None = None
    sizes: Mapping[str, int] = field(default_factory=dict[str, int])
    scalars: Mapping[str, float] = field(default_factory=dict[str, float])
    inputs: Callable[[Mapping[str, int], np.random.Generator], Values] | None = None
    launch: LaunchPlan | None = None
    bound: float | None = None
    full: Mapping[str, int] = field(default_factory=dict[str, int])
    whole: Mapping[str, int] = field(default_factory=dict[str, int])
    derivation: str = ""
    where: str = ""

    def trace(self, settings: Mapping[str, Any]) -> Program:
        """The program under these settings; raises `InputError` when it is none."""
        made: Any = self.program
        if not isinstance(self.program, Program):
            made = called(self.where, lambda: cast("Callable[..., Any]", self.program)(**settings))
        if not isinstance(made, Program):
            raise InputError(
                f"{self.where}: gives {type(made).__name__}, expected a warploom.tile.Program"
            )
        return made

    @property
    def policy(self) -> Policy:
        """Of the schedule that it gets unless another is named: by the shape of its loops."""
        return Policy(launch=self.launch or LaunchPlan())

    def refuse_others(self, sizes: Mapping[str, int]) -> None:
        """Raise `InputError` for other sizes of dimensions that tasks take whole."""
        for dim, size in self.whole.items():
            if sizes[dim] != size:
                raise InputError(
                    f"{self.where}: {dim}={sizes[dim]}, expected {size}, which the formula has and "
                    f"tasks take whole: give the formula the size, build(..., {{{dim!r}: "
                    f"{sizes[dim]}}})"
                )

    def default_sizes(self) -> dict[str, int]:
        """Every dimension of the arrays under the default settings."""
        program = self.trace({})
        for dim, size in self.sizes.items():
            given: Any = size
            if isinstance(given, bool) or not isinstance(given, Integral) or given < 0:
                raise InputError(
                    f"{self.where}: size {dim}={given!r}, expected a whole number, at least 0"
                )
        return {dim: int(self.sizes.get(dim, USUAL_SIZE)) for dim in program.dims}

    def full_sizes(self) -> dict[str, int]:
        """Every dimension under the default settings. Those that were not given fill a GPU and keep
        every array within `MOST_ELEMENTS`."""
        program, length = self.trace({}), FILLING
        while True:
            known = {**self.sizes, **self.full}
            sizes = {dim: int(known.get(dim, length)) for dim in program.dims}
            largest = max(prod(sizes[dim] for dim in one.dims) for one in program.arrays)
            if largest <= MOST_ELEMENTS or length == 1:
                return sizes
            length //= 2

    def arrays(
        self, program: Program, sizes: Mapping[str, int], seed: int
    ) -> dict[str, NDArray[Any]]:
        """Inputs for one run; arrays the program only writes are NaN."""
        given: Values = {}
        if inputs := self.inputs:
            given = called(self.where, lambda: inputs(sizes, np.random.default_rng(seed)))
        need = [read.array.name for read in program.every_read()]
        need += [one.name for one in program.arrays if not one.dtype.is_float]
        for name in need:
            if name not in given and name not in written_names(program):
                raise InputError(
                    f"{self.where}: array {name} is not floating: say what is in it with "
                    "UserKernel(inputs=...)"
                )
        return {**random_arrays(program, sizes, seed), **given}

    def outputs(
        self, settings: Mapping[str, Any], values: Values
    ) -> dict[str, NDArray[np.float64]]:
        """The right results in float64 of every array the program writes."""
        program = self.trace(settings)
        names = written_names(program)
        if self.reference is None:
            exact = interpret(widened(program), values, self.scalars)
            return {name: exact[name] for name in names}
        reference = self.reference
        found = called(self.where, lambda: reference(values))
        given: Any = found
        if not isinstance(given, Mapping):
            raise InputError(
                f"{self.where}: the reference gives {type(given).__name__}, expected a table of "
                "arrays by name"
            )
        missing = [name for name in names if name not in found]
        if missing:
            raise InputError(f"{self.where}: the reference gives no array {missing[0]!r}")
        right = {name: self._numbers(name, found[name]) for name in names}
        for name, array in right.items():
            if array.shape != values[name].shape:
                raise InputError(
                    f"{self.where}: the reference gives {name} of shape {list(array.shape)}, the "
                    f"program's is {list(values[name].shape)}"
                )
        return right

    def _numbers(self, name: str, given: object) -> NDArray[np.float64]:
        try:
            return np.asarray(given, np.float64)
        except (TypeError, ValueError):
            raise InputError(
                f"{self.where}: the reference gives {name} as {type(given).__name__}, expected an "
                "array of numbers"
            ) from None


def load_kernel(text: str) -> UserKernel:
    """The kernel FILE.py:OBJECT names; raises `InputError` for anything else."""
    found = load_object(text)
    if isinstance(found, UserKernel):
        kernel = found
    elif isinstance(found, (Diagram, Expr)):
        made = formula_kernel(as_diagram(found, text))
        kernel = UserKernel(
            made.program,
            made.reference,
            made.sizes,
            launch=made.launch,
            full=made.full,
            whole=made.whole,
            derivation=str(made.found),
        )
    elif isinstance(found, Program) or callable(found):
        kernel = UserKernel(cast("Program | Callable[..., Program]", found))
    else:
        raise InputError(
            f"{text} is {type(found).__name__}, expected a tile Program, a function that gives one,"
            " a formula, or a warploom.kernels.UserKernel"
        )
    object.__setattr__(kernel, "where", text)
    settings_kinds(kernel)
    return kernel


class _Traced:
    """The programs of a function for some settings: what another process gets of it."""

    def __init__(self, kernel: UserKernel, configs: Iterable[Mapping[str, Any]]) -> None:
        given = inspect.signature(cast("Callable[..., Program]", kernel.program)).parameters
        bare = [one.replace(annotation=inspect.Parameter.empty) for one in given.values()]
        self.__signature__ = inspect.Signature(bare)
        self._programs = {frozenset(one.items()): kernel.trace(one) for one in configs}

    def __call__(self, **settings: Any) -> Program:
        return self._programs[frozenset(settings.items())]


def portable(kernel: UserKernel, configs: Iterable[Mapping[str, Any]]) -> UserKernel:
    """A kernel for a process that cannot load it: its programs under these settings, without the
    functions that make inputs and results."""
    program = kernel.program
    if not isinstance(program, Program):
        program = _Traced(kernel, configs)
    return replace(kernel, program=program, reference=None, inputs=None)


def settings_kinds(kernel: UserKernel) -> dict[str, str]:
    """The settings of a kernel with the kind of each, from its function's defaults."""
    if isinstance(kernel.program, Program):
        return {}
    kinds: dict[str, str] = {}
    for name, parameter in inspect.signature(kernel.program).parameters.items():
        default: object = parameter.default
        kind = "int" if isinstance(default, Tunable) else KINDS.get(type(default))
        if kind is None:
            raise InputError(
                f"{kernel.where}: parameter {name} needs a default of type bool, int, float, str "
                "or DType; `--set` changes it"
            )
        kinds[name] = kind
    return kinds


def free_sizes(kernel: UserKernel) -> dict[str, tuple[int, ...]]:
    """The settings that its author left open, with their choices."""
    if isinstance(kernel.program, Program):
        return {}
    parameters = inspect.signature(kernel.program).parameters
    return {
        name: one.default.choices
        for name, one in parameters.items()
        if isinstance(one.default, Tunable)
    }


def written_names(program: Program) -> tuple[str, ...]:
    """The arrays a program stores to, in order."""
    stored = {op.array.name for op in program.ops() if op.array and op.kind.startswith("store")}
    return tuple(one.name for one in program.arrays if one.name in stored)


def random_arrays(
    program: Program, sizes: Mapping[str, int], seed: int = 0
) -> dict[str, NDArray[Any]]:
    """Normal inputs for every array. Arrays that the program adds to are 0; arrays that it only
    stores to are NaN, or for integers a number that is no result."""
    random = np.random.default_rng(seed)
    kinds = {
        kind: {op.array.name for op in program.ops() if op.array and op.kind == kind}
        for kind in ("load", "store", "store_add")
    }
    result: dict[str, NDArray[Any]] = {}
    for one in program.arrays:
        shape = tuple(sizes[dim] for dim in one.dims)
        if one.name in kinds["store"] - kinds["load"]:
            result[one.name] = np.full(shape, np.nan if one.dtype.is_float else NO_RESULT)
        elif one.name in kinds["store_add"]:
            result[one.name] = np.zeros(shape)
        else:
            result[one.name] = random.normal(size=shape)
    return result


def scaled_arrays(
    program: Program, sizes: Mapping[str, int], seed: int = 0
) -> dict[str, NDArray[Any]]:
    """`random_arrays` where `scale_x` is a factor of x: x fills its type, and the factor undoes it.

    So are 8-bit operands made of activations, with one factor for the whole array.
    """
    result = random_arrays(program, sizes, seed)
    for name, values in result.items():
        factor = f"scale_{name}"
        if factor in result:
            largest = np.abs(values).max(initial=0.0) or 1.0
            result[factor][:] = largest / program.array(name).dtype.largest
            result[name] = values / result[factor][0]
    return result
