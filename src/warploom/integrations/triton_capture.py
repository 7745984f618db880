"""Compiling a `@triton.jit` function offline: the cubin and everything a launch of it needs.

What Triton's own launcher would do at the first call is done here from a description of the
arguments, with no GPU and no torch: the same specialisation (16-byte alignment of pointers,
divisibility by 16 and equality to 1 of integers), the same hidden trailing parameters. So the cubin
is the one that `function[grid](...)` would load, and can be searched and deployed by its content.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from warploom.errors import InputError, ToolMissing
from warploom.toolchain import version_of

OLDEST_TRITON = (3, 6)
# Pointers that Triton appends to every kernel's parameters (triton/backends/nvidia/driver.c).
HIDDEN_PARAMETERS = ("global_scratch", "profile_scratch")
INTEGER_TYPES = ("i1", "i8", "i16", "i32", "i64", "u1", "u8", "u16", "u32", "u64")
FLOAT_TYPES = ("fp16", "bf16", "fp32", "fp64")
ALIGNMENT = 16


@dataclass(frozen=True)
class Pointer:
    """A tensor argument: `dtype` as Triton spells it (`fp16`), `role` is `in`, `out` or `inout`.

    `aligned` says that the address is a multiple of 16, as every allocation of torch's is.
    """

    dtype: str
    shape: tuple[int, ...]
    role: str = "in"
    aligned: bool = True


@dataclass(frozen=True)
class Value:
    """A scalar argument. `specialise`: as Triton does for the values 1 and multiples of 16."""

    dtype: str
    value: int | float
    specialise: bool = True


@dataclass(frozen=True)
class Parameter:
    """One parameter of the compiled kernel, in order. `hidden` ones come from Triton itself.

    `scratch_bytes` is what one block of the grid needs behind a hidden pointer (0: pass null).
    """

    name: str
    argument: Pointer | Value
    hidden: bool = False
    scratch_bytes: int = 0
    scratch_align: int = 1


@dataclass(frozen=True)
class CapturedKernel:
    """A kernel compiled offline. `block` is in threads, `shared_bytes` is dynamic shared memory."""

    name: str
    arch: int
    cubin: bytes
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int
    num_warps: int
    parameters: tuple[Parameter, ...]
    triton_version: str
    ptxas_version: str
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False)


def triton_module(name: str = "triton") -> Any:
    """A module of the installed Triton; raises `ToolMissing` when absent or older than 3.6."""
    try:
        triton: Any = importlib.import_module("triton")
    except ImportError as error:
        raise ToolMissing(
            f"triton >= 3.6 is needed ({error}); install it with: pip install 'warploom[triton]'"
        ) from None
    version = tuple(int(part) for part in str(triton.__version__).split(".")[:2])
    if version < OLDEST_TRITON:
        raise ToolMissing(
            f"triton {triton.__version__} is too old, 3.6 or newer is needed; "
            "install it with: pip install 'warploom[triton]'"
        )
    return triton if name == "triton" else importlib.import_module(name)


def capture(
    function: Any,
    arguments: Mapping[str, Pointer | Value],
    *,
    constexprs: Mapping[str, Any] | None = None,
    grid: tuple[int, int, int],
    num_warps: int = 4,
    num_stages: int = 3,
    arch: int = 90,
    options: Mapping[str, Any] | None = None,
) -> CapturedKernel:
    """Compile `function` for compute capability `arch` (90 = sm_90a) as its launcher would.

    `arguments` names the run-time parameters, `constexprs` the compile-time ones; together they
    must cover the signature (defaults count). `options` are further Triton options (`num_ctas`,
    `maxnreg` ...). Raises `InputError` naming a missing, unknown or unusable argument.
    """
    triton = triton_module()
    compiler: Any = triton_module("triton.compiler")
    backends: Any = triton_module("triton.backends.compiler")
    jit = jit_function(function)
    constants = dict(constexprs or {})
    signature, constant_paths, attributes = specialise(jit, arguments, constants)
    source = compiler.ASTSource(jit, signature, constant_paths, attributes)
    kernel = triton.compile(
        source,
        target=backends.GPUTarget("cuda", arch, 32),
        options={"num_warps": num_warps, "num_stages": num_stages, **(options or {})},
    )
    metadata: dict[str, Any] = dict(kernel.metadata._asdict())
    run_time = {name: arguments[name] for name, kind in signature.items() if kind != "constexpr"}
    ctas = int(metadata.get("num_ctas", 1))
    warps = int(metadata["num_warps"])  # warp specialisation has already added its own
    return CapturedKernel(
        name=str(metadata["name"]),
        arch=arch,
        cubin=bytes(kernel.asm["cubin"]),
        grid=(grid[0] * ctas, grid[1], grid[2]),
        block=(32 * warps, 1, 1),
        cluster=(ctas, 1, 1),
        shared_bytes=int(metadata["shared"]),
        num_warps=warps,
        parameters=(
            *(Parameter(name, argument) for name, argument in run_time.items()),
            *hidden_parameters(metadata),
        ),
        triton_version=str(triton.__version__),
        ptxas_version=ptxas_version(arch),
        metadata=metadata,
    )


def jit_function(function: Any) -> Any:
    """The `JITFunction` under decorators such as `autotune` and `heuristics`."""
    jit: Any = importlib.import_module("triton.runtime.jit")
    inner = function
    while not isinstance(inner, jit.JITFunction):
        if not hasattr(inner, "fn"):
            raise InputError(
                f"{function!r} is not a Triton kernel, expected a function under @triton.jit"
            )
        inner = inner.fn
    return inner


def specialise(
    jit: Any, arguments: Mapping[str, Pointer | Value], constants: Mapping[str, Any]
) -> tuple[dict[str, str], dict[tuple[int, ...], Any], dict[tuple[int, ...], Any]]:
    """Triton's (signature, constants, attributes) for these arguments."""
    names: list[str] = list(jit.arg_names)
    if unknown := (set(arguments) | set(constants)) - set(names):
        raise InputError(
            f"{jit.__name__} has no parameter {sorted(unknown)[0]!r}, its parameters are {names}"
        )
    signature: dict[str, str] = {}
    constant_paths: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for index, parameter in enumerate(jit.params):
        name: str = parameter.name
        if name in arguments and not parameter.is_constexpr:
            kind, divisible = specialised_type(name, arguments[name], parameter)
            signature[name] = kind
            if kind == "constexpr":
                constant_paths[(index,)] = 1
            elif divisible:
                attributes[(index,)] = [["tt.divisibility", ALIGNMENT]]
            continue
        if name in constants:
            constant_paths[(index,)] = constants[name]
        elif parameter.has_default:
            constant_paths[(index,)] = parameter.default
        else:
            raise InputError(
                f"{jit.__name__}: parameter {name!r} is missing, give it in "
                f"{'constexprs' if parameter.is_constexpr else 'arguments'}"
            )
        signature[name] = "constexpr"
    return signature, constant_paths, attributes


def specialised_type(name: str, argument: Pointer | Value, parameter: Any) -> tuple[str, bool]:
    """Triton's type string of an argument, and whether it may assume divisibility by 16."""
    align = not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment)
    if isinstance(argument, Pointer):
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


def hidden_parameters(metadata: Mapping[str, Any]) -> tuple[Parameter, ...]:
    """The trailing pointers that Triton's launcher passes after the visible arguments."""
    return tuple(
        Parameter(
            name,
            Pointer("i8", (), "inout"),
            hidden=True,
            scratch_bytes=int(metadata.get(f"{name}_size") or 0),
            scratch_align=int(metadata.get(f"{name}_align") or 1),
        )
        for name in HIDDEN_PARAMETERS
    )


def ptxas_version(arch: int) -> str:
    """The version of the ptxas that Triton uses for `arch`, such as '12.9.86'."""
    backend: Any = triton_module("triton.backends.nvidia.compiler")
    tool: Any = backend.get_ptxas(arch)
    return version_of(Path(str(tool.path))) or str(tool.version)
