"""Compiling a `@triton.jit` function offline: the cubin and everything a launch of it needs.

What Triton's own launcher would do at the first call is done here from a description of the
arguments, with no GPU and no torch: the same specialisation (16-byte alignment of pointers,
divisibility by 16 and equality to 1 of integers), the same hidden trailing parameters. So the cubin
is the one that `function[grid](...)` would load, and can be searched and deployed by its content.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from warploom.errors import InputError
from warploom.integrations.deploy import content_key
from warploom.integrations.triton_access import jit_function, triton_module
from warploom.runtime.launch import Argument, Buffer, Dim3, LaunchSpec, Null, Pointer, Scalar
from warploom.tile.dtypes import MEMORY
from warploom.toolchain import version_of

# Pointers that Triton appends to every kernel's parameters (triton/backends/nvidia/driver.c).
HIDDEN_PARAMETERS = ("global_scratch", "profile_scratch")
INTEGER_TYPES = ("i1", "i8", "i16", "i32", "i64", "u1", "u8", "u16", "u32", "u64")
FLOAT_TYPES = ("fp16", "bf16", "fp32", "fp64")
ALIGNMENT = 16
# How Triton spells element types, where the runtime spells them otherwise.
ELEMENT_TYPES = {"fp8e4nv": "e4m3", "fp8e5": "e5m2", "i1": "u8", "u1": "u8"}
# torch's (and numpy's) spelling to Triton's.
TENSOR_TYPES = {kind.library: name for name, kind in MEMORY.items()} | {
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
    "bool": "i1",
}


@dataclass(frozen=True)
class TensorArgument:
    """A tensor: `dtype` as Triton spells it (`fp16`), `role` is `in`, `out` or `inout`.

    `aligned` says that the address is a multiple of 16, as every allocation of torch's is. `name`
    is what the buffer is called in the launch (default: the parameter's name).
    """

    dtype: str
    shape: tuple[int, ...]
    role: str = "in"
    aligned: bool = True
    name: str = ""


@dataclass(frozen=True)
class ScalarArgument:
    """A scalar. `specialise`: as Triton does for the values 1 and multiples of 16."""

    dtype: str
    value: int | float
    specialise: bool = True


KernelArgument = TensorArgument | ScalarArgument


@dataclass(frozen=True)
class CapturedKernel:
    """A kernel compiled offline, ready to be searched: `key` is what a store finds it by."""

    name: str
    arch: int
    cubin: bytes
    launch: LaunchSpec
    num_warps: int
    num_stages: int
    triton_version: str
    ptxas_version: str
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False)

    @property
    def key(self) -> str:
        """The deploy key of this cubin."""
        return content_key(self.cubin)

    @property
    def compiler(self) -> str:
        """The toolchain in one phrase, for evidence rows."""
        return f"triton {self.triton_version}, ptxas {self.ptxas_version}"


def capture(
    function: Any,
    arguments: Mapping[str, KernelArgument],
    *,
    grid: Dim3,
    constexprs: Mapping[str, Any] | None = None,
    num_warps: int = 4,
    num_stages: int = 3,
    arch: int = 90,
    options: Mapping[str, Any] | None = None,
) -> CapturedKernel:
    """Compile `function` for compute capability `arch` (90 = sm_90a) as its launcher would.

    `arguments` names the run-time parameters, `constexprs` the compile-time ones; together they
    must cover the signature (defaults count). `options` are further Triton options (`num_ctas`,
    `maxnreg` ...). Raises `InputError` naming a missing, unknown or unusable argument, and in one
    line what Triton says of a function that it does not compile.
    """
    triton = triton_module()
    compiler: Any = triton_module("triton.compiler")
    backends: Any = triton_module("triton.backends.compiler")
    jit = jit_function(function)
    if not isinstance(cast("object", arguments), Mapping):
        raise InputError(
            f"{jit.__name__}: arguments are {type(arguments).__name__}, expected a dictionary "
            "{parameter: TensorArgument or ScalarArgument}"
        )
    for name, argument in arguments.items():
        _check_argument(name, argument)
    _check_grid(jit.__name__, grid)
    _check_options(jit.__name__, options or {})
    signature, constants, attributes = specialise(jit, arguments, constexprs or {})
    try:
        kernel = triton.compile(
            compiler.ASTSource(jit, signature, constants, attributes),
            target=backends.GPUTarget("cuda", arch, 32),
            options={"num_warps": num_warps, "num_stages": num_stages, **(options or {})},
        )
    except Exception as error:
        # Triton and its passes raise what they like: CompilationError, AssertionError, ValueError.
        raise InputError(
            f"Triton does not compile {jit.__name__} for sm_{arch}: {_reason(error)}"
        ) from error
    metadata: dict[str, Any] = dict(kernel.metadata._asdict())
    run_time = {name: arguments[name] for name, kind in signature.items() if kind != "constexpr"}
    return CapturedKernel(
        name=str(metadata["name"]),
        arch=arch,
        cubin=bytes(kernel.asm["cubin"]),
        launch=launch_of(metadata, run_time, grid),
        num_warps=num_warps,
        num_stages=num_stages,
        triton_version=str(triton.__version__),
        ptxas_version=ptxas_version(arch),
        metadata=metadata,
    )


def _check_argument(name: str, argument: Any) -> None:
    """Refuse a description that is none, or that a launch could not be made of."""
    if isinstance(argument, TensorArgument):
        known = tuple(dict.fromkeys((*FLOAT_TYPES, *INTEGER_TYPES, *ELEMENT_TYPES)))
        if argument.dtype not in known:
            meant = TENSOR_TYPES.get(argument.dtype)
            expected = repr(meant) if meant else f"one of {', '.join(known)}"
            raise InputError(f"argument {name!r}: dtype {argument.dtype!r}, expected {expected}")
        shape: Any = argument.shape
        if not isinstance(shape, tuple | list) or not all(
            isinstance(extent, int) for extent in cast("Sequence[Any]", shape)
        ):
            raise InputError(f"argument {name!r}: shape {shape!r}, expected a tuple of integers")
        return
    if not isinstance(argument, ScalarArgument):
        raise InputError(
            f"argument {name!r} is {type(argument).__name__} {argument!r}, expected "
            "TensorArgument(dtype, shape) or ScalarArgument(dtype, value)"
        )
    value: Any = argument.value
    if not isinstance(value, int | float):
        raise InputError(f"argument {name!r}: value {value!r}, expected a number")


def _check_grid(kernel: str, grid: Any) -> None:
    sizes = cast("Sequence[Any]", grid) if isinstance(grid, tuple | list) else ()
    if len(sizes) != 3 or not all(isinstance(extent, int) and extent > 0 for extent in sizes):
        raise InputError(f"{kernel}: grid {grid!r}, expected three positive integers (x, y, z)")


def _check_options(kernel: str, options: Mapping[str, Any]) -> None:
    """Refuse what Triton would leave out without a word, such as a misspelt parameter."""
    backend: Any = triton_module("triton.backends.nvidia.compiler")
    known = backend.CUDAOptions.__dataclass_fields__
    if unknown := [name for name in options if name not in known]:
        raise InputError(f"{kernel}: {unknown[0]!r} is no parameter of it and no Triton option")


def _reason(error: Exception) -> str:
    """What Triton says, in one line: the place in the kernel, and the innermost message."""
    inner: BaseException = error
    while inner.__cause__ is not None:
        inner = inner.__cause__
    said = str(getattr(inner, "error_message", None) or inner).strip()
    text = said.splitlines()[-1] if said else type(inner).__name__
    node = getattr(error, "node", None)
    return text if node is None else f"line {node.lineno} of it: {text}"


@dataclass(frozen=True)
class Call:
    """A launch of a kernel, described: what `capture` takes."""

    function: Any
    arguments: Mapping[str, KernelArgument]
    constexprs: Mapping[str, Any]
    grid: Dim3
    options: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The function's name."""
        return str(self.function.__name__)

    @property
    def form(self) -> tuple[Any, ...]:
        """What two launches that are the same in all respects agree in."""
        other = {**self.constexprs, **self.options}
        return (tuple(self.arguments.items()), self.grid, repr(sorted(other.items(), key=str)))

    @property
    def words(self) -> str:
        """The arguments for a person."""
        told = [
            f"{name} {one.dtype}{list(one.shape)}"
            if isinstance(one, TensorArgument)
            else f"{name}={one.value}"
            for name, one in self.arguments.items()
        ]
        return ", ".join([*told, *(f"{name}={value}" for name, value in self.constexprs.items())])


def capture_call(
    function: Any,
    *args: Any,
    grid: Sequence[int] | Callable[[Mapping[str, Any]], Sequence[int]],
    arch: int = 90,
    outputs: Sequence[str] | None = None,
    **kwargs: Any,
) -> CapturedKernel:
    """Capture `function[grid](*args, **kwargs)` from its live arguments (torch tensors, numbers).

    Nothing is launched and the tensors may be on any device, "meta" too. `outputs` names the
    parameters that the kernel wholly writes; without it every tensor counts as read and written.
    """
    return captured(call_of(function, *args, grid=grid, outputs=outputs, **kwargs), arch)


def captured(call: Call, arch: int = 90) -> CapturedKernel:
    """`capture` of a described launch."""
    options = dict(call.options)
    return capture(
        call.function,
        call.arguments,
        grid=call.grid,
        constexprs=call.constexprs,
        num_warps=int(options.pop("num_warps", 4)),
        num_stages=int(options.pop("num_stages", 3)),
        arch=arch,
        options=options,
    )


def call_of(
    function: Any,
    *args: Any,
    grid: Sequence[int] | Callable[[Mapping[str, Any]], Sequence[int]],
    outputs: Sequence[str] | None = None,
    **kwargs: Any,
) -> Call:
    """The description of `function[grid](*args, **kwargs)`, as for `capture_call`."""
    jit = jit_function(function)
    names: list[str] = list(jit.arg_names)
    bound = {**dict(zip(names, args, strict=False)), **kwargs}
    options = {name: bound.pop(name) for name in list(bound) if name not in names}
    constant_names = {item.name for item in jit.params if item.is_constexpr}
    constants = {name: value for name, value in bound.items() if name in constant_names}
    arguments: dict[str, KernelArgument] = {}
    for name, value in bound.items():
        if value is None:
            constants[name] = None
        elif name not in constants:
            arguments[name] = described(name, value, outputs)
    size = tuple(grid({**defaults(jit), **bound}) if callable(grid) else grid)
    full = (size[0], size[1] if len(size) > 1 else 1, size[2] if len(size) > 2 else 1)
    return Call(jit, arguments, constants, full, options)


def described(name: str, value: Any, outputs: Sequence[str] | None) -> KernelArgument:
    """The description of one live argument."""
    if isinstance(value, bool):
        return ScalarArgument("i1", int(value), specialise=False)
    if isinstance(value, int):
        wide = not -(2**31) <= value < 2**31
        return ScalarArgument("i64" if wide else "i32", value)
    if isinstance(value, float):
        return ScalarArgument("fp32", value)
    dtype = TENSOR_TYPES.get(str(getattr(value, "dtype", "")).removeprefix("torch."))
    if dtype is None or not hasattr(value, "shape"):
        raise InputError(
            f"argument {name!r} is {type(value).__name__}, expected a tensor, an int, a float or a "
            "bool; describe it with TensorArgument and call capture"
        )
    role = "inout" if outputs is None else "out" if name in outputs else "in"
    return TensorArgument(dtype, tuple(map(int, value.shape)), role, _aligned(value))


def _aligned(tensor: Any) -> bool:
    """Whether its address is a multiple of 16 B; one that has none yet begins at such a one."""
    if not hasattr(tensor, "data_ptr"):
        return True
    try:
        return tensor.data_ptr() % ALIGNMENT == 0
    except RuntimeError:  # torch's fake tensors
        return tensor.storage_offset() * tensor.element_size() % ALIGNMENT == 0


def defaults(jit: Any) -> dict[str, Any]:
    """Default values of the function's parameters."""
    return {item.name: item.default for item in jit.params if item.has_default}


def specialise(
    jit: Any, arguments: Mapping[str, KernelArgument], constexprs: Mapping[str, Any]
) -> tuple[dict[str, str], dict[tuple[int, ...], Any], dict[tuple[int, ...], Any]]:
    """Triton's (signature, constants, attributes) for these arguments."""
    names: list[str] = list(jit.arg_names)
    if unknown := (set(arguments) | set(constexprs)) - set(names):
        raise InputError(
            f"{jit.__name__} has no parameter {sorted(unknown)[0]!r}, its parameters are {names}"
        )
    fixed = {**defaults(jit), **constexprs}
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for index, parameter in enumerate(jit.params):
        name: str = parameter.name
        signature[name] = "constexpr"
        if name in arguments and not parameter.is_constexpr:
            signature[name], divisible = specialised_type(name, arguments[name], parameter)
            if signature[name] == "constexpr":
                constants[(index,)] = 1
            elif divisible:
                attributes[(index,)] = [["tt.divisibility", ALIGNMENT]]
        elif name in fixed:
            constants[(index,)] = fixed[name]
        else:
            raise InputError(
                f"{jit.__name__}: parameter {name!r} is missing, give it in "
                f"{'constexprs' if parameter.is_constexpr else 'arguments'}"
            )
    return signature, constants, attributes


def specialised_type(name: str, argument: KernelArgument, parameter: Any) -> tuple[str, bool]:
    """Triton's type string of an argument, and whether it may assume divisibility by 16."""
    align = not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment)
    if isinstance(argument, TensorArgument):
        constness = "k" if parameter.is_const else ""
        return f"*{constness}{argument.dtype}", argument.aligned and align
    if argument.dtype in FLOAT_TYPES:
        return argument.dtype, False
    if argument.dtype not in INTEGER_TYPES:
        expected = ", ".join((*INTEGER_TYPES, *FLOAT_TYPES))
        raise InputError(f"argument {name!r}: type {argument.dtype!r}, expected one of {expected}")
    specialised = argument.specialise and not parameter.do_not_specialize
    if specialised and argument.value == 1:
        return "constexpr", False
    return argument.dtype, specialised and align and argument.value % ALIGNMENT == 0


def launch_of(
    metadata: Mapping[str, Any], run_time: Mapping[str, KernelArgument], grid: Dim3
) -> LaunchSpec:
    """The launch of a compiled kernel: visible arguments, then Triton's hidden pointers."""
    buffers: list[Buffer] = []
    arguments: list[Argument] = []
    for parameter, argument in run_time.items():
        if isinstance(argument, ScalarArgument):
            kind = "i1" if argument.dtype == "u1" else argument.dtype
            arguments.append(Scalar(kind, argument.value))
            continue
        dtype = ELEMENT_TYPES.get(argument.dtype, argument.dtype)
        name = argument.name or parameter
        buffers.append(Buffer(name, argument.shape, dtype, argument.role))
        arguments.append(Pointer(name))
    clusters = int(metadata.get("num_ctas") or 1)
    for name in HIDDEN_PARAMETERS:
        size = int(metadata.get(f"{name}_size") or 0)
        if not size:
            arguments.append(Null())
            continue
        shape = (size * clusters * math.prod(grid),)
        buffers.append(Buffer(name, shape, "u8", "inout", zero=True))
        arguments.append(Pointer(name))
    return LaunchSpec(
        kernel=str(metadata["name"]),
        grid=(grid[0] * clusters, grid[1], grid[2]),
        block=(32 * int(metadata["num_warps"]), 1, 1),  # with warps that specialisation added
        buffers=tuple(buffers),
        arguments=tuple(arguments),
        shared_bytes=int(metadata["shared"]),
        cluster=(clusters, 1, 1),
    )


def ptxas_version(arch: int) -> str:
    """The version of the ptxas that Triton uses for `arch`, such as '12.9.86'."""
    backend: Any = triton_module("triton.backends.nvidia.compiler")
    tool: Any = backend.get_ptxas(arch)
    return version_of(Path(str(tool.path))) or str(tool.version)
