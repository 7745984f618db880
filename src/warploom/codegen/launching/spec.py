"""A built kernel's launch as data: what `runtime` needs to run its cubin on fresh inputs.

`Kernel` (launch.py) launches on a caller's tensors. A `LaunchSpec` stands alone: buffers with their
shapes, TMA descriptors, the grid for one set of sizes. With it a built kernel is measured, checked
and searched like any other cubin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from warploom.codegen.compile.build import Built
from warploom.codegen.launching.tensor_maps import SECTOR
from warploom.errors import InputError
from warploom.machine import Machine
from warploom.runtime.launch import Argument, Buffer, LaunchSpec, Pointer, Scalar, TensorMap
from warploom.tile import Array, dtype

COUNTER: Final = "task counter"
_WARP: Final = 32
_RUNTIME_NAMES: Final = {"int32": "i32"}  # what `runtime.dtypes` calls the others is the same


def launch_spec(
    built: Built,
    sizes: Mapping[str, int],
    gpu: Machine,
    scalars: Mapping[str, float] | None = None,
) -> LaunchSpec:
    """The launch of `built` for dimensions `sizes` {name: extent}, in elements.

    A persistent kernel gets as many blocks as `gpu` keeps resident, or one a task when there are
    fewer. Raises `InputError` for a dimension or scalar that is missing.
    """
    source = built.source
    missing = {dim for array in source.arrays for dim in array.dims} - set(sizes)
    if missing:
        raise InputError(f"kernel {source.name} needs a size for {', '.join(sorted(missing))}")
    buffers = [
        Buffer(
            array.name,
            tuple(int(sizes[dim]) for dim in array.dims),
            _RUNTIME_NAMES.get(array.dtype.name, array.dtype.name),
            _role(array.name, source.parameters),
        )
        for array in source.arrays
    ]
    for buffer in buffers:
        if buffer.role != "out" and buffer.dtype == "i32":
            raise InputError(
                f"kernel {source.name}: array {buffer.name} holds indices, and random numbers are "
                "none; measure its cubin with a launch description of your own"
            )
    if any(p["kind"] == "counter" for p in source.parameters):
        # The next task to take; the kernel leaves it at 0, as it found it.
        buffers.append(Buffer(COUNTER, (1,), "u32", "inout", zero=True))
    arrays = {array.name: array for array in source.arrays}
    arguments = [_argument(p, arrays, sizes, scalars or {}) for p in source.parameters]
    tasks = _tasks(built, sizes)
    blocks = tasks * source.cluster
    if source.persistent:
        blocks = min(blocks, resident_blocks(built, gpu))
    return LaunchSpec(
        source.name,
        (blocks, 1, 1),
        (source.threads, 1, 1),
        tuple(buffers),
        tuple(arguments),
        source.shared_bytes,
        notes={"sizes": ", ".join(f"{name}={size}" for name, size in sizes.items())},
    )


def _role(name: str, parameters: Sequence[Mapping[str, Any]]) -> str:
    """How the kernel uses an array: `in`, `out`, or `inout` when it reads and writes it."""
    used = {bool(p.get("written")) for p in parameters if p.get("array") == name and "written" in p}
    return "inout" if len(used) == 2 else "out" if True in used else "in"


def resident_blocks(built: Built, gpu: Machine) -> int:
    """Blocks of the kernel that `gpu` holds at a time, in whole clusters."""
    source = built.source

    def number(key: str) -> int:
        return int(gpu[key])

    shared = source.shared_bytes + number("smem.reserved_per_block")
    warps = -(-source.threads // _WARP)
    unit = number("registers.warp_granularity")
    registers = -(-built.resources.registers * _WARP // unit) * unit * warps
    each = min(
        number("smem.per_sm") // shared,
        number("registers.per_sm") // registers,
        number("limits.blocks_per_sm"),
    )
    if each < 1:
        raise InputError(
            f"kernel {source.name}: a block of {source.threads} threads with "
            f"{built.resources.registers} registers each and {source.shared_bytes:,} B of shared "
            f"memory does not fit {gpu.title}"
        )
    return number("sm.count") * each // source.cluster * source.cluster


def _tasks(built: Built, sizes: Mapping[str, int]) -> int:
    source = built.source
    total = 1
    for name, extent in source.grid:
        count = max(0, extent.evaluate(sizes))
        total *= -(-count // source.cluster) if name == source.cluster_axis else count
    if not total:
        raise InputError(f"kernel {source.name}: these sizes leave nothing to do")
    return total


def _argument(
    parameter: Mapping[str, Any],
    arrays: Mapping[str, Array],
    sizes: Mapping[str, int],
    scalars: Mapping[str, float],
) -> Argument:
    kind = parameter["kind"]
    if kind == "counter":
        return Pointer(COUNTER)
    if kind == "dim":
        return Scalar("i32", int(sizes[parameter["name"]]))
    if kind == "scalar":
        name = parameter["name"]
        if name not in scalars:
            raise InputError(f"scalar {name} has no value")
        return Scalar("i32" if parameter["dtype"] == "int32" else "fp32", scalars[name])
    array = arrays[parameter["array"]]
    shape = [int(sizes[dim]) for dim in array.dims]
    if kind == "map":
        return _map(parameter, array, shape)
    if kind == "stride":
        return Scalar("i64", _strides(shape)[int(parameter["dim"])])
    return Pointer(array.name)


def _strides(shape: list[int]) -> list[int]:
    """Elements from one index to the next, of a contiguous array."""
    result = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        result[axis] = result[axis + 1] * shape[axis + 1]
    return result


def _map(parameter: Mapping[str, Any], array: Array, shape: list[int]) -> TensorMap:
    element = dtype(parameter["dtype"]).bytes
    pitches = [stride * element for stride in reversed(_strides(shape)[:-1])]
    straddles = any(pitch % SECTOR for pitch in pitches)
    return TensorMap(
        array.name,
        tuple(reversed(shape)),
        tuple(pitches),
        tuple(int(extent) for extent in parameter["box"]),
        int(parameter["swizzle"]),
        promotion=0 if straddles else 256,
    )
