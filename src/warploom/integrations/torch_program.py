"""Any tile program as a PyTorch operator: `torch.compile`, fake tensors and CUDA graphs included.

    rmsnorm = torch_program("mine::rmsnorm", program, schedule)
    y = rmsnorm(x, weight, 1e-6)

Arguments are the arrays the program only reads, in their order, then its scalars; results are the
arrays it writes. The sizes of results follow from the names of their dimensions.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, cast

from warploom import machine
from warploom.autosched.selected import Selected
from warploom.codegen.compile.build import Built, build
from warploom.codegen.ir.plan import KernelSchedule
from warploom.codegen.simt.schedule import SimtSchedule
from warploom.errors import InputError, ToolMissing
from warploom.integrations.exports.pack import installed
from warploom.integrations.torch_direct import Signature, direct
from warploom.kernels.select import select, written
from warploom.kernels.tuned.table import GPU, remember
from warploom.kernels.tuned.variant import Variant
from warploom.runtime.interface import Interface
from warploom.runtime.kernel import ALIGNED, Kernel
from warploom.runtime.tensors import element_type
from warploom.tile import Array, DType, Program, dtype

INSTALL = "pip install 'warploom[torch]'"
KERNELS: dict[tuple[Any, ...], Kernel] = {}
"""The kernels of operators that were called, by what they were built for and the device."""
PLANS: dict[tuple[Any, ...], Any] = {}
"""What was decided for calls of the same shapes; see `planned`."""
MOST_PLANS = 4096
RUNS: dict[str, Callable[..., Any]] = {}
"""What runs an operator, by its name, whatever its tensors are on."""
Chosen = tuple[tuple[Any, ...], Callable[[], Built]]  # a kernel's key, and what builds it
Collected = dict[tuple[Any, ...], Built]
_collected: list[Collected] = []
remember(installed)


@cache
def torch_module() -> Any:
    """The `torch` package; raises `ToolMissing` with the install line when absent.

    Untyped on purpose: the core does not depend on torch, and what it gives is checked here.
    """
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise ToolMissing(f"torch is needed for operators ({error}); {INSTALL}") from None


def current_stream(tensor: Any) -> int:
    """The handle of torch's current stream on a tensor's device; 0 of a tensor on "meta"."""
    return stream_of(tensor.device)


def stream_of(device: Any) -> int:
    """The same of a device."""
    if device.type == "meta":
        return 0
    return torch_module()._C._cuda_getCurrentRawStream(device.index)


def built_kernel(key: tuple[Any, ...], tensor: Any, make: Callable[[], Built]) -> Kernel:
    """The kernel of that key for a tensor's device: when first asked for it is taken from the pack
    that is installed, or built."""
    if _collected:
        if key not in _collected[0]:
            _collected[0][key] = make()
        return cast("Kernel", Unlaunched(_collected[0][key].interface))
    device = tensor.device.index
    kernel = KERNELS.get(whole := (*key, device))  # once: a key's hash takes microseconds
    if kernel is None:
        packed = installed().kernel(key)
        kernel = make().kernel(device) if packed is None else Kernel(*packed, device)
        KERNELS[whole] = kernel
    return kernel


def launch(
    key: tuple[Any, ...],
    make: Callable[[], Built],
    arrays: Mapping[str, Any],
    scalars: Mapping[str, float] | None = None,
) -> None:
    """Launch the kernel of that key on arrays by name, on torch's current stream of the device that
    they are on; `make` builds it where there is none yet."""
    like = next(iter(arrays.values()))
    built_kernel(key, like, make)(arrays, scalars or {}, current_stream(like))


def variant_kernel(kind: str, variant: Variant, base: Any) -> Chosen:
    """The key of a tuned table's variant for a configuration, and what builds it."""
    return (kind, variant.name, variant.config(base)), lambda: variant.selected(base).build()


class Steps(NamedTuple):
    """What a call of an operator does, from its arguments.

    plan      checks the arguments and decides what is launched; raises `InputError`
    results   fresh tensors, one or a tuple, from the plan and the arguments
    fill      launches, from the plan, the results and the arguments; not called where all results
              are empty, unless arguments are written in place
    form      all that plans and launches depend on: calls of one form share a plan (`planned`),
              which then keeps no tensor of the first
    """

    plan: Callable[..., Any]
    results: Callable[..., Any]
    fill: Callable[..., None]
    form: Callable[..., tuple[Any, ...]] | None = None

    def decided(self, *args: Any) -> Any:
        """The plan of a call."""
        if self.form is None:
            return self.plan(*args)
        return planned(self.form(*args), lambda: self.plan(*args))

    def done(self, decided: Any, *args: Any, in_place: bool = False) -> Any:
        """The results of a call whose plan is known."""
        made = self.results(decided, *args)
        if in_place or _some(made):
            self.fill(decided, made, *args)
        return made


def steps(
    plan: Callable[..., Any],
    results: Callable[..., Any],
    fill: Callable[..., None],
    form: Callable[..., tuple[Any, ...]] | None = None,
    in_place: bool = False,
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What runs an operator, and what it gives of fake tensors, from its `Steps`; `in_place`:
    arguments are written."""
    own = Steps(plan, results, fill, form)

    def run(*args: Any) -> Any:
        return own.done(own.decided(*args), *args, in_place=in_place)

    def fake(*args: Any) -> Any:
        return results(plan(*args), *args)

    return run, fake


def _some(results: Any) -> bool:
    """Whether results have an element; most operators give one tensor, and no tuple is made."""
    one = hasattr(results, "numel")
    return results.numel() > 0 if one else any(each.numel() for each in results)


def several(results: Any) -> tuple[Any, ...]:
    """The results of an operator as a tuple, which those that give one tensor give without."""
    return cast("tuple[Any, ...]", results if isinstance(results, tuple) else (results,))


def planned(key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    """What `make` decides for shapes, types and devices that are in the key, which is asked once.

    Checks and the choice of a kernel take longer than a launch.
    """
    if _collected:
        return make()
    found = PLANS.get(key)
    if found is None:
        if len(PLANS) >= MOST_PLANS:
            PLANS.clear()
        found = PLANS[key] = make()
    return found


def form_of(*tensors: Any) -> tuple[Any, ...]:
    """What a launch depends on that is bound to tensors, beside where they are."""
    form: list[Any] = []
    for one in tensors:
        form += (one.dtype, one.shape, one.stride(), one.device, one.data_ptr() % ALIGNED)
    return tuple(form)


@dataclass(frozen=True)
class Unlaunched:
    """A kernel that was built and is not run: on tensors that have shapes alone."""

    interface: Interface

    def __call__(self, *arrays: Any, **more: Any) -> None:
        """Nothing: the shapes of results do not depend on it."""

    def resident_tasks(self, tasks: int) -> int:
        """All of them."""
        return tasks


def only_collected() -> bool:
    """Whether kernels are built and not launched."""
    return bool(_collected)


@contextlib.contextmanager
def collecting() -> Generator[Collected]:
    """While this lasts, operators that are run (`RUNS`) build their kernels into the table that it
    gives, by key, and launch none."""
    _collected.append({})
    try:
        yield _collected[0]
    finally:
        _collected.clear()


def operator(
    name: str,
    schema: str,
    run: Any,
    fake: Any,
    backward: Any = None,
    context: Any = None,
    *,
    mutates: tuple[str, ...] = (),
) -> Any:
    """Register the operator `name` ("library::name") with what runs it, what it gives of fake
    tensors, and its gradient.

    `run` and `fake` are called with every argument of the schema: torch's dispatcher leaves out
    trailing ones that equal their defaults. `mutates` names the arguments written in place. What
    this gives calls `run` without the dispatcher where it may (`torch_direct`); the operator itself
    is `torch.ops.LIBRARY.NAME`.
    """
    signature = Signature.of(schema)

    def filled(call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: call(*signature.filled(*args))

    RUNS[name] = filled(run)
    library = torch_module().library
    made = library.custom_op(name, filled(run), mutates_args=mutates, schema=schema)
    made.register_fake(filled(fake))
    if backward is not None:
        made.register_autograd(backward, setup_context=context)
    return direct(name, made, signature, run, backward, context, mutates)


@cache
def multiprocessors(device: int | None) -> int:
    """SMs of a device; where tensors are on "meta", of the GPU that kernels are tuned for."""
    if device is None:
        return machine.load(GPU).integer("sm.count")
    return int(torch_module().cuda.get_device_properties(device).multi_processor_count)


def allowed_type(tensor: Any, name: str, allowed: tuple[str, ...]) -> DType:
    """The element type of a tensor; raises `InputError` for one that is not allowed."""
    ours = element_type(tensor.dtype)
    if ours not in allowed:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise InputError(f"{name} is {kind}, expected one of {', '.join(allowed)}")
    return dtype(ours)


def refuse_backward(name: str, hint: str) -> Callable[..., Any]:
    """A backward that says in one line that there is none."""

    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(
            f"{name} has no backward kernel; call it under torch.no_grad() or {hint}"
        )

    return backward


def empty_like(tensor: Any) -> Any:
    """Room for a result of a tensor's size, its dimensions in the same order in memory where the
    last is together: heads that lie behind one another in a row stay there."""
    together = tensor.stride(-1) == 1 and tensor.numel() > 0
    return torch_module().empty_like(tensor) if together else tensor.new_empty(tensor.shape)


def copyable(tensor: Any) -> bool:
    """Whether the copy engine takes a tensor: its last dimension is together, and every other is a
    multiple of 16 bytes apart. Gradients may be expanded views."""
    size = tensor.element_size()
    apart = [s for s, n in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if n > 1]
    whole = all(s > 0 and s * size % 16 == 0 for s in apart) and tensor.data_ptr() % 16 == 0
    return whole and tensor.stride(-1) == 1


def check_devices(operator: str, tensors: Mapping[str, Any]) -> None:
    """Raise `InputError` for a tensor that is on no GPU, or not on that of the first.

    Tensors on "meta" have shapes alone, for which the operators have an answer.
    """
    (first, device), *_ = [(name, tensor.device) for name, tensor in tensors.items()]
    for name, tensor in tensors.items():
        if tensor.device.type not in ("cuda", "meta"):
            raise InputError(
                f"{operator} {name} is on {tensor.device}, expected a CUDA device; move it with "
                f"{name}.cuda()"
            )
        if tensor.device != device:
            raise InputError(
                f"{operator} {name} is on {tensor.device}, {first} on {device}: expected one device"
            )


def refuse_call(operator: str, given: Mapping[str, Any], problem: str, more: str = "") -> None:
    """Raise `InputError` with the tensors of a call and what is wrong with it; "": nothing is."""
    if problem:
        listed = ", ".join(f"{n} {str(x.dtype)[6:]} {list(x.shape)}" for n, x in given.items())
        raise InputError(f"{operator} of {listed}{more}: {problem}")


def written_arrays(program: Program) -> tuple[Array, ...]:
    """The arrays a program stores to, in order; raises when one of them is also read."""
    stored = {op.array.name for op in program.ops() if op.array and op.kind.startswith("store")}
    for op in program.ops():
        adds = op.kind == "store_add"
        if op.array and op.array.name in stored and (adds or op.kind == "load"):
            raise InputError(
                f"{op.where}: array {op.array.name} is read and written; an operator gives new "
                "tensors, so store to an array of its own"
            )
    return tuple(array for array in program.arrays if array.name in stored)


def result_shapes(
    inputs: Sequence[Array], outputs: Sequence[Array], shapes: Sequence[Sequence[Any]]
) -> list[tuple[Any, ...]]:
    """The sizes of the outputs, given those of the inputs; raises when they do not agree."""
    sizes = sizes_of(inputs, shapes)
    missing = [dim for array in outputs for dim in array.dims if dim not in sizes]
    if missing:
        raise InputError(f"no input has dimension {missing[0]!r}, so the result's size is unknown")
    return [tuple(sizes[dim] for dim in array.dims) for array in outputs]


def sizes_of(inputs: Sequence[Array], shapes: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """The sizes of the inputs' dimensions, by name; raises when they do not agree."""
    sizes: dict[str, Any] = {}
    for array, shape in zip(inputs, shapes, strict=True):
        if len(shape) != len(array.dims):
            raise InputError(f"array {array} was given with shape {list(shape)}")
        for dim, extent in zip(array.dims, shape, strict=True):
            if dim not in sizes:
                sizes[dim] = extent
            elif sizes[dim] != extent:
                raise InputError(
                    f"dimension {dim!r} is {sizes[dim]} in one array, {extent} in {array.name}"
                )
    return sizes


def torch_program(
    name: str,
    program: Program,
    schedule: KernelSchedule | SimtSchedule,
    arch: str = "sm_90a",
    allow: tuple[str, ...] = (),
) -> Any:
    """Register `program` as the operator `name` ("library::name") and give it.

    The kernel is compiled at the first call with tensors on a GPU. Raises `InputError` for a name
    without a library or a program that reads what it writes.
    """

    def only(sizes: Mapping[str, int]) -> Chosen:
        del sizes
        return (name,), lambda: build(program, schedule, arch, allow)

    return _registered(name, program, only)


def torch_kernel(name: str, where: str, settings: Mapping[str, str] | None = None) -> Any:
    """Register `FILE.py:OBJECT` under these settings as the operator `name` and give it.

    Each call runs the kernel that `build` takes for the sizes of its tensors: from the tuned table
    beside the file, once `optimize --record` has written one. It is compiled when first asked for.
    Raises what `torch_program` and `select` raise.
    """
    given = dict(settings or {})

    @cache
    def chosen(sizes: tuple[tuple[str, int], ...]) -> Selected:
        return select(where, {**given, **{dim: str(size) for dim, size in sizes}})

    def of_sizes(sizes: Mapping[str, int]) -> Chosen:
        found = chosen(tuple(sizes.items()))
        return (name, found.name), found.build

    return _registered(name, written(where, given)[0], of_sizes)


def _registered(name: str, program: Program, chosen: Callable[[Mapping[str, int]], Chosen]) -> Any:
    """An operator that runs what is chosen for the sizes of the program's arrays."""
    torch = torch_module()
    if name.count("::") != 1:
        raise InputError(f"operator {name!r}: expected 'library::name'")
    outputs = written_arrays(program)
    inputs = tuple(array for array in program.arrays if array not in outputs)
    result_shapes(inputs, outputs, [array.dims for array in inputs])
    scalars = program.scalars
    words = [f"Tensor {array.name}" for array in inputs]
    words += [f"{'int' if s.type.dtype.name == 'int32' else 'float'} {s.name}" for s in scalars]
    result = "Tensor" if len(outputs) == 1 else f"({', '.join(['Tensor'] * len(outputs))})"

    def shapes_of(*args: Any) -> list[tuple[Any, ...]]:
        given = args[: len(inputs)]
        check_devices(name, {a.name: tensor for a, tensor in zip(inputs, given, strict=True)})
        return result_shapes(inputs, outputs, [tensor.shape for tensor in given])

    def results(shapes: list[tuple[Any, ...]], like: Any, *_: Any) -> Any:
        kinds = [getattr(torch, array.dtype.library) for array in outputs]
        made = [like.new_empty(n, dtype=kind) for n, kind in zip(shapes, kinds, strict=True)]
        return made[0] if len(made) == 1 else tuple(made)

    def fill(_: Any, made: Any, *args: Any) -> None:
        given, numbers = args[: len(inputs)], args[len(inputs) :]
        tensors = zip((*inputs, *outputs), (*given, *several(made)), strict=True)
        values = {s.name: float(n) for s, n in zip(scalars, numbers, strict=True)}
        kernel = chosen(sizes_of(inputs, [tensor.shape for tensor in given]))
        launch(*kernel, {array.name: tensor for array, tensor in tensors}, values)

    # For every device, so that a tensor on another one is refused in our words, not in torch's 47
    # lines.
    refused = refuse_backward(name, "write its gradient as a program of its own")
    made = steps(shapes_of, results, fill)
    return operator(name, f"({', '.join(words)}) -> {result}", *made, refused)
