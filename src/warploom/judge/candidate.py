"""The forms of a candidate, each made a function of tensors.

    FILE.py:FUNCTION   of the inputs, which gives the outputs; or of the inputs and the outputs by
                       their names, which it writes to
    FILE.toml          a kernel of CUDA C++ or of a cubin, and how it is launched
    FOLDER             what `warploom build` wrote

A kernel in CUDA C++ runs on the emulated Hopper where no GPU is used, and is compiled by nvcc for
one. A launch reads

    source = "scale.cu"             # or a cubin, for a GPU only
    kernel = "scale"
    grid = ["cdiv(n, 256)"]         # arithmetic on the problem's dimensions
    block = [256]
    shared = 0                      # bytes; cluster = [2] where blocks form clusters
    arguments = ["x", "y", {i32 = "n"}, {fp32 = 0.5},
                 {map = "x", box = [64, 128], swizzle = 128}]
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from warploom import machine, toolchain
from warploom.codegen.compile.build import Built
from warploom.emulate.launch import EmulatedKernel
from warploom.errors import InputError
from warploom.integrations.torch_program import current_stream
from warploom.judge.problem import Signature, Sizes, shape_of
from warploom.objects import load_object, names_object
from warploom.runtime.device import Shape
from warploom.runtime.driver import CudaDevice
from warploom.runtime.launch import (
    SCALARS,
    Argument,
    Buffer,
    Dim3,
    LaunchSpec,
    Pointer,
    Scalar,
    TensorMap,
    pack_arguments,
)
from warploom.runtime.tensors import contiguous
from warploom.tables import read_toml
from warploom.tile.index import FOLD
from warploom.tile.ir import Array

# Of the inputs; or, where the second says so, of inputs and outputs.
Function = Callable[..., Any]
OLDEST_NVCC = (12, 0)  # the first that knows sm_90a
FIELDS = ("source", "kernel", "grid", "block", "shared", "cluster", "arguments")
SYMBOLS: Mapping[type[ast.operator], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//", ast.Mod: "%",
}  # fmt: skip


def check_form(text: str) -> None:
    """Raise `InputError` for a candidate that is none of the forms, or is not there."""
    path = Path(text.rpartition(":")[0] if names_object(text) else text)
    if not path.exists():
        raise InputError(f"{path}: no such file or folder")
    if not (names_object(text) or path.is_dir() or path.suffix == ".toml"):
        raise InputError(f"{text}: expected FILE.py:FUNCTION, FILE.toml or a folder of a build")


def emulates(text: str) -> bool:
    """Whether a candidate is machine code or CUDA C++, which only the emulation runs on a CPU."""
    return not names_object(text)


def load_candidate(text: str, signature: Signature, gpu: bool) -> tuple[Function, bool]:
    """The function of a candidate, and whether it writes to outputs that it is given.

    Raises `InputError` for a file that does not run, compile or fit the signature.
    """
    if names_object(text):
        found: Any = load_object(text)
        if not callable(found):
            raise InputError(f"{text} is a {type(found).__name__}, expected a function")
        return found, _takes_outputs(found, signature)
    return _Launched(text, signature, gpu), True


def _takes_outputs(function: Function, signature: Signature) -> bool:
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return False
    return all(one.name in names for one in signature.outputs)


class _Launched:
    """A kernel of a launch description or a build folder, called with tensors."""

    def __init__(self, text: str, signature: Signature, gpu: bool) -> None:
        self._arrays = (*signature.inputs, *signature.outputs)
        self._outputs, self._calls = signature.outputs, 0
        path = Path(text)
        if path.is_dir():
            built = Built.read(path)
            file, self._made = f"{path / built.source.name}.cu", self._of_build(built)
            name, image = built.source.name, built.cubin
        else:
            data = _description(path)
            source, name = path.parent / str(data["source"]), str(data["kernel"])
            file, self._made = str(source), partial(self._described, path, data)
            image = source.read_bytes() if source.suffix == ".cubin" and gpu else b""
        self._device = CudaDevice() if gpu else None
        if self._device is None:
            self._emulated = _emulated(Path(file), name)
            return
        image = image or _compiled(Path(file), self._device.info.arch)
        self._module, self._name = self._device.load(image), name
        self._functions: dict[int, Any] = {}  # by dynamic shared memory, which they are told

    def __call__(self, *tensors: Any) -> None:
        """Launch it on the inputs and outputs, in their order."""
        sizes: dict[str, int] = {}
        for one, tensor in zip(self._arrays, tensors, strict=True):
            sizes.update(zip(one.dims, tensor.shape, strict=True))
        spec = self._made(sizes)
        addresses = {
            one.name: tensor.data_ptr() for one, tensor in zip(self._arrays, tensors, strict=True)
        }
        if self._device is None:
            self._calls += 1  # each call has its own order of events
            self._emulated.launch(spec, addresses, self._calls)
            return
        device, blocks = self._device, spec.cluster[0] * spec.cluster[1] * spec.cluster[2]
        if spec.shared_bytes not in self._functions:
            found = device.function(self._module, self._name, spec.shared_bytes, blocks)
            self._functions[spec.shared_bytes] = found
        params = pack_arguments(spec.arguments, addresses, spec.kinds, device)
        shape = Shape(spec.grid, spec.block, spec.shared_bytes, spec.cluster)
        function = self._functions[spec.shared_bytes]
        device.launch_on(current_stream(tensors[0]), function, shape, params)

    def _of_build(self, built: Built) -> Callable[[Sizes], LaunchSpec]:
        interface = built.interface
        if wrong := {a.name for a in interface.arrays} ^ {a.name for a in self._arrays}:
            raise InputError(f"array {min(wrong)} is not in both, the kernel and the problem")
        if "counter" in interface.kinds:
            raise InputError(
                f"kernel {built.source.name} takes its tasks from a counter; build it without"
            )
        gpu = machine.load("h200")  # how many blocks of a persistent kernel are resident

        def made(sizes: Sizes) -> LaunchSpec:
            own: dict[str, int] = {}
            shapes = {one.name: shape_of(one, sizes) for one in self._arrays}
            for one in interface.arrays:
                own.update(zip(one.dims, shapes[one.name], strict=True))
            return interface.launch_spec(own, gpu)

        return made

    def _described(self, path: Path, data: Mapping[str, Any], sizes: Sizes) -> LaunchSpec:
        def three(name: str) -> Dim3:
            given: list[Any] = list(data.get(name, [1]))
            found = [arithmetic(one, sizes) for one in given] + [1, 1]
            return (found[0], found[1], found[2])

        outputs = {one.name for one in self._outputs}
        buffers = tuple(
            Buffer(
                one.name, shape_of(one, sizes), one.dtype.name,
                "out" if one.name in outputs else "in",
            )
            for one in self._arrays
        )  # fmt: skip
        arguments = tuple(self._argument(path, one, sizes) for one in data["arguments"])
        shared = arithmetic(data.get("shared", 0), sizes)
        grid, block, cluster = three("grid"), three("block"), three("cluster")
        return LaunchSpec(str(data["kernel"]), grid, block, buffers, arguments, shared, cluster)

    def _argument(self, path: Path, given: Any, sizes: Sizes) -> Argument:
        arrays = {one.name: one for one in self._arrays}
        table: dict[str, Any] = dict(cast("Any", given)) if isinstance(given, dict) else {}
        if isinstance(given, str) and given in arrays:
            return Pointer(given)
        if len(table) == 1 and (kind := next(iter(table))) in SCALARS:
            value: Any = table[kind]
            return Scalar(kind, arithmetic(value, sizes) if isinstance(value, str) else value)
        if table.get("map") in arrays and set(table) <= {"map", "box", "swizzle"}:
            one = arrays[table["map"]]
            return _map(one, shape_of(one, sizes), table, sizes)
        raise InputError(
            f"{path}: argument {given!r}: expected one of {', '.join(arrays)}, a scalar as "
            '{i32 = "n"}, or {map = ARRAY, box = [...], swizzle = 128}'
        )


def _map(one: Array, shape: tuple[int, ...], table: Mapping[str, Any], sizes: Sizes) -> TensorMap:
    steps = contiguous(shape)[:-1]
    pitches = tuple(step * one.dtype.bytes for step in reversed(steps))
    box = tuple(arithmetic(extent, sizes) for extent in table["box"])
    return TensorMap(one.name, tuple(reversed(shape)), pitches, box, int(table.get("swizzle", 0)))


@cache
def _emulated(file: Path, kernel: str) -> EmulatedKernel:
    if file.suffix == ".cubin":
        raise InputError(f"{file} is machine code, which only a GPU runs: --on gpu")
    return EmulatedKernel(_read(file), kernel, file.name)


def _compiled(file: Path, arch: str) -> bytes:
    # The candidate is judged as its author's compiler makes it, so an older one will do here.
    tool = toolchain.find("nvcc", OLDEST_NVCC)
    with TemporaryDirectory() as folder:
        made = Path(folder) / "candidate.cubin"
        done = tool.run("-cubin", f"-arch={arch}", "-std=c++17", "-O3", "-o", str(made), str(file))
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line]
            raise InputError(f"nvcc refuses {file}: {(errors or ['no message'])[0]}")
        return made.read_bytes()


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from None


def _description(path: Path) -> dict[str, Any]:
    data = read_toml(path)
    missing = [name for name in FIELDS if name not in data and name not in ("shared", "cluster")]
    if unknown := [*(set(data) - set(FIELDS)), *missing]:
        state = "is missing" if missing else "is not known"
        raise InputError(f"{path}: {min(unknown)!r} {state}; a launch has {', '.join(FIELDS)}")
    return data


def arithmetic(text: Any, sizes: Sizes) -> int:
    """A whole number, or an expression of + - * // %, cdiv, min and max on dimensions."""
    if isinstance(text, int) and not isinstance(text, bool):
        return text

    def value(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int(number)) if not isinstance(number, bool):
                return number
            case ast.Name(id=name) if name in sizes:
                return sizes[name]
            case ast.BinOp(left=left, op=op, right=right) if type(op) in SYMBOLS:
                return FOLD[SYMBOLS[type(op)]](value(left), value(right))
            case ast.Call(func=ast.Name(id="cdiv"), args=[left, right]):
                return -(-value(left) // value(right))
            case ast.Call(func=ast.Name(id="min" | "max" as name), args=[left, right]):
                return FOLD[name](value(left), value(right))
            case _:
                raise ValueError

    try:
        return value(ast.parse(str(text), mode="eval").body)
    except (SyntaxError, ValueError, TypeError, ZeroDivisionError):
        raise InputError(
            f"{text!r}: expected whole numbers, + - * // %, cdiv(a, b), min, max and the "
            f"dimensions {', '.join(sizes)}"
        ) from None
