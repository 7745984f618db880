"""A tile program that is called: on PyTorch's tensors it is traced, built, kept and launched.

    @warploom.kernel(a="m k", b="k n", c="m n")
    def product(a, b, c, tile: int = 128):
        ...

    c = product(a, b)

What is declared are the names of dimensions; sizes and element types are those of the tensors.
"""

from __future__ import annotations

import functools
import hashlib
import html
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from warploom.errors import InputError
from warploom.integrations import torch_program as ops
from warploom.kernels.library import Entry, user_entry
from warploom.kernels.select import suited
from warploom.kernels.user import UserKernel
from warploom.objects import PYTHON
from warploom.tile import BF16, Array, DType, Program, array, interpret, trace
from warploom.tile.dtypes import DTYPES

LIBRARY = "warploom_kernels"
Operator = tuple[Any, Callable[..., Any], Any]
OPERATORS: dict[str, Operator] = {}
"""Every operator that was registered, by its name, with what runs it past torch's dispatcher, and
torch."""
GPUS = {9: "h200", 8: "a100"}  # by the major number of a capability: whose code runs there
Named = Mapping[str, Any]


@dataclass(frozen=True, repr=False)
class TileKernel(UserKernel):
    """A `UserKernel` that is called on tensors; `warploom.run`, `build`, `optimize` and
    `FILE.py:OBJECT` take it as they take any other.

    body, declared   what `kernel` was given: the function of the arrays, and of each array its
                     dimensions, or type and dimensions
    home             FILE.py:OBJECT where a file defines it: its tuned table lies beside that file
    """

    body: Callable[..., object] | None = None
    declared: Mapping[str, Array | str] = field(default_factory=dict[str, Array | str])
    home: str = ""
    entries: dict[Any, Entry] = field(default_factory=dict[Any, Entry], compare=False)
    operators: dict[Any, Operator] = field(default_factory=dict[Any, Operator], compare=False)

    def __call__(self, *args: Any, **named: Any) -> Any:
        """What the program writes, as new tensors: one, or a tuple in the program's order.

        args    the arrays it reads, in order, then its scalars; both may also be given by name
        named   settings, too: `tile=64`

        Queued on torch's current stream of the tensors' device. Built at the first call with these
        element types and settings; where `optimize --record` wrote a tuned table, the sizes choose
        from it. `torch.compile` takes calls like an earlier one into its graph. Raises
        `InputError` for tensors that are on no GPU, of a type or shape that does not fit, or a name
        that is none.
        """
        given, numbers, settings = self._bound(args, named)
        self._check_place(given)
        form = (*(tensor.dtype for tensor in given.values()), *settings.items())
        if form not in self.entries:
            types = {name: self._type(name, tensor) for name, tensor in given.items()}
            self.entries[form] = user_entry(self._typed(types))
        entry = self.entries[form]
        sizes: dict[str, int] = {}
        if entry.table is not None and entry.table.known:
            sizes = self._sizes(given)
        device = next(iter(given.values())).device
        key = (*form, *sizes.values(), str(device))
        if key not in self.operators:
            self.operators[key] = self._operator(entry, sizes, settings, _gpu(self.name, device))
        operator, run, torch = self.operators[key]
        if not torch.compiler.is_compiling() and all(_plain(x, torch) for x in given.values()):
            operator = run
        return operator(*given.values(), *numbers.values())

    def interpret(self, *args: Any, **named: Any) -> Any:
        """What a call gives, as NumPy arrays, by the interpreter: on any computer, of arrays or
        tensors, in the declared element types (bf16 where only dimensions are declared)."""
        given, numbers, settings = self._bound(args, named)
        program = self.trace(settings)
        outputs = ops.written_arrays(program)
        inputs = [one for one in program.arrays if one not in outputs]
        values = {name: _numbers(value) for name, value in given.items()}
        shapes = ops.result_shapes(inputs, outputs, [value.shape for value in values.values()])
        for one, shape in zip(outputs, shapes, strict=True):
            values[one.name] = np.full(shape, np.nan if one.dtype.is_float else 0)
        found = interpret(program, values, numbers)
        made = [found[one.name] for one in outputs]
        return made[0] if len(made) == 1 else tuple(made)

    @property
    def name(self) -> str:
        """What it is called."""
        return self._usual.name

    def __repr__(self) -> str:
        inputs, outputs = self._interface
        parts = [*map(str, inputs), *(f"{one.name}: {one.type}" for one in self._usual.scalars)]
        parts += [f"{name}={value.default}" for name, value in self._settings.items()]
        made = ", ".join(map(str, outputs))
        return f"kernel {self.name}({', '.join(parts)}) -> {made}"

    def _repr_html_(self) -> str:
        shown = "\n\n".join((repr(self), str(self._usual)))
        return f"<pre>{html.escape(shown)}</pre>"

    @cached_property
    def _usual(self) -> Program:
        """The program under its usual settings and types."""
        return self.trace({})

    @cached_property
    def _interface(self) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        """The arrays it reads and those it writes."""
        outputs = ops.written_arrays(self._usual)
        return tuple(one for one in self._usual.arrays if one not in outputs), outputs

    @cached_property
    def _settings(self) -> Mapping[str, inspect.Parameter]:
        if isinstance(self.program, Program):
            return {}
        return inspect.signature(self.program).parameters

    def _bound(self, args: Sequence[Any], named: Named) -> tuple[Named, Named, Named]:
        """(tensors of the arrays it reads, scalars, settings) of a call, each by name."""
        arrays = [one.name for one in self._interface[0]]
        takes = [*arrays, *(one.name for one in self._usual.scalars)]
        call = f"{self.name}({', '.join(takes)})"
        if len(args) > len(takes):
            written = ", ".join(one.name for one in self._interface[1])
            raise InputError(f"{call} was called with {len(args)} arguments; it gives {written}")
        values = dict(zip(takes, args, strict=False))
        settings: dict[str, Any] = {}
        for name, value in named.items():
            if name in values:
                raise InputError(f"{call}: {name} was given twice")
            if name in takes:
                values[name] = value
            elif name in self._settings:
                settings[name] = value
            else:
                known = ", ".join([*takes, *self._settings])
                raise InputError(f"{call} takes no {name!r}, expected one of {known}")
        if missing := [name for name in takes if name not in values]:
            raise InputError(f"{call} was called without {missing[0]}")
        given = {name: values[name] for name in arrays}
        return given, {name: values[name] for name in takes[len(arrays) :]}, settings

    def _check_place(self, given: Named) -> None:
        """Refuse what is no tensor, and tensors on no GPU."""
        if not all(getattr(value, "is_cuda", False) for value in given.values()):
            self._refuse(given)
        ops.check_devices(self.name, given)

    def _refuse(self, given: Named) -> None:
        takes = ", ".join(given)
        for name, value in given.items():
            if not (hasattr(value, "data_ptr") and hasattr(value, "device")):
                raise InputError(
                    f"{self.name}: {name} is {type(value).__module__}.{type(value).__name__}, "
                    "expected a torch tensor on a GPU (torch.from_dlpack makes one without a "
                    f"copy); {self.name}.interpret({takes}) takes NumPy arrays"
                )
        on_cpu = any(value.device.type == "cpu" for value in given.values())
        if on_cpu and not ops.torch_module().cuda.is_available():
            raise InputError(
                f"{self.name} is launched on a GPU, and torch finds none here; "
                f"{self.name}.interpret({takes}) gives its results on this CPU, and "
                f"warploom.run({self.name}, on='emulated') runs its CUDA C++"
            )

    def _type(self, name: str, tensor: Any) -> DType:
        """The element type of a tensor; raises `InputError` where another one was declared."""
        found = ops.allowed_type(tensor, f"{self.name}: {name}", tuple(DTYPES))
        if not isinstance(self.declared.get(name), str):
            declared = self._usual.array(name).dtype
            if found != declared:
                raise InputError(f"{self.name}: {name} is {found}, it was declared {declared}")
        return found

    def _sizes(self, given: Named) -> dict[str, int]:
        """The sizes of the tensors, by dimension; raises `InputError` where they do not agree."""
        inputs, outputs = self._interface
        shapes = [tensor.shape for tensor in given.values()]
        ops.result_shapes(inputs, outputs, shapes)
        return {
            dim: int(extent)
            for one, shape in zip(inputs, shapes, strict=True)
            for dim, extent in zip(one.dims, shape, strict=True)
        }

    def _typed(self, types: Mapping[str, DType]) -> UserKernel:
        """The kernel of arrays of these types; outputs of no declared type have that of the first
        array of none."""
        usual = {one.name: one.dtype for one in self._usual.arrays}
        open_ = [name for name, what in self.declared.items() if isinstance(what, str)]
        first = next((types[name] for name in open_ if name in types), BF16)
        chosen = {**dict.fromkeys(open_, first), **types}
        same = all(usual[name] == kind for name, kind in chosen.items())
        values = {one.name: getattr(self, one.name) for one in fields(UserKernel)}
        if not same and self.body is not None:
            arrays = _arrays(self.declared, chosen)
            values["program"] = described(self.body, arrays)
        # A table is of the program that its author wrote.
        values["where"] = self.home if same else f"{PYTHON}{self.name}"
        return UserKernel(**values)

    def _operator(self, entry: Entry, sizes: Mapping[str, int], settings: Named, gpu: str) -> Any:
        known = {**entry.full, **sizes}
        found = suited(entry, dict(settings), known, frozenset(settings), gpu)
        order = json.dumps(found.schedule.to_json(), sort_keys=True)
        text = f"{found.program}{order}{found.arch}{found.allow}"
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        name = f"{LIBRARY}::{self.name}_{digest}"
        if name not in OPERATORS:
            made = ops.torch_program(name, found.program, found.schedule, found.arch, found.allow)
            OPERATORS[name] = made, ops.RUNS[name], ops.torch_module()
        return OPERATORS[name]


def kernel(made: Any = None, /, **arrays: Array | str) -> Any:
    """A tile program as a function of tensors; a decorator of the function that describes it.

        @warploom.kernel(x="m n", y="m n")
        def doubled(x, y, block: int = 32):
            (i,) = t.grid(m=t.cdiv(t.size("m"), block))
            rows, cols = t.span(i * block, block), t.span(0, 64)
            t.store(y, rows, cols, tile=(t.load(x, rows, cols) * 2.0).cast(y.dtype))

        y = doubled(x)          # x: a tensor on a GPU
        y = doubled(x, block=64)
        y = doubled.interpret(x)  # on any computer

    arrays   for each array parameter the names of its dimensions, `"m k"`; its element type is
             that of the tensor, and of an array that is written that of the first such tensor.
             `t.array(t.FP32, "m k")` declares the type.
    made     without arrays: a `tile.Program`, a function of settings that gives one, or a
             `UserKernel`, whose types are those it has

    The other parameters of the function need defaults; they are settings. Raises `InputError` for
    a function that does not describe a program.
    """
    if made is None:
        if not arrays:
            raise InputError('warploom.kernel(): expected arrays, such as kernel(x="m n", y="m n")')
        return functools.partial(kernel, **arrays)
    if isinstance(made, UserKernel):
        if arrays:
            raise InputError("warploom.kernel of a UserKernel takes no arrays: it has its own")
        values = {one.name: getattr(made, one.name) for one in fields(UserKernel)}
        return TileKernel(**values, home=made.where)
    if isinstance(made, Program):
        return TileKernel(made)
    if not callable(made):
        raise InputError(
            f"warploom.kernel of {type(made).__name__}, expected a function that describes a tile "
            "program, a tile Program or a UserKernel"
        )
    body: Callable[..., object] = made
    home = _home(body)
    if not arrays:
        return TileKernel(cast("Callable[..., Program]", body), where=home, home=home)
    parameters = inspect.signature(body).parameters
    if unknown := [name for name in arrays if name not in parameters]:
        raise InputError(
            f"warploom.kernel: {body.__name__} has no parameter {unknown[0]!r}, it has "
            f"{', '.join(parameters)}"
        )
    for name, one in parameters.items():
        if name not in arrays and one.default is one.empty:
            raise InputError(
                f"warploom.kernel: {body.__name__} has a parameter {name} without a default: an "
                f'array needs its dimensions, kernel({name}="m n"), a setting needs a default'
            )
    program = described(body, _arrays(arrays, {}))
    made = TileKernel(program, where=home, body=body, declared=dict(arrays), home=home)
    made.__dict__["__doc__"] = body.__doc__
    return made


def described(body: Callable[..., object], arrays: Mapping[str, Array]) -> Callable[..., Program]:
    """The function of settings that gives the program which `body` describes of these arrays."""

    def program(**settings: Any) -> Program:
        return trace(body, arrays, name=body.__name__, **settings)

    own = inspect.signature(body).parameters.values()
    rest = [
        one.replace(kind=one.KEYWORD_ONLY, annotation=one.empty)
        for one in own
        if one.name not in arrays
    ]
    program.__dict__["__signature__"] = inspect.Signature(rest)
    program.__name__ = body.__name__
    return program


def _arrays(declared: Mapping[str, Array | str], types: Mapping[str, DType]) -> dict[str, Array]:
    """What `trace` takes: arrays declared by their dimensions get their type here."""
    return {
        name: array(types.get(name, BF16), what) if isinstance(what, str) else what
        for name, what in declared.items()
    }


def _home(function: Callable[..., object]) -> str:
    """FILE.py:NAME of a function of a module, else a name that no file has."""
    code = getattr(function, "__code__", None)
    name = getattr(function, "__qualname__", "kernel")
    if code is None or not code.co_filename.endswith(".py") or not name.isidentifier():
        return f"{PYTHON}{getattr(function, '__name__', 'kernel')}"
    return f"{code.co_filename}:{name}"


def _plain(tensor: Any, torch: Any) -> bool:
    """Whether a tensor is neither a wrapper of another one nor part of a graph of gradients: then
    nothing is lost where torch's dispatcher, which takes longer than a launch, is not asked."""
    return type(tensor) is torch.Tensor and tensor.is_cuda and not tensor.requires_grad


def _gpu(name: str, device: Any) -> str:
    """Whose code runs on a device; shapes on "meta" are those of any."""
    if device.type == "meta":
        return GPUS[9]
    major, minor = ops.torch_module().cuda.get_device_capability(device)
    if (major, minor) != (9, 0) and major != 8:
        raise InputError(
            f"{name}: {device} has compute capability {major}.{minor}; code is emitted for 8.x and "
            "9.0"
        )
    return GPUS[major]


def _numbers(value: Any) -> NDArray[Any]:
    """A tensor or an array as NumPy has it; it has no 16-bit types of torch's."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.float().numpy() if value.is_floating_point() else value.numpy()
    return np.asarray(value)
