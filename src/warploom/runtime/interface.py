"""What a launch must know of a built kernel, read from its manifest, and the arguments it takes.

`kernel.Kernel` launches on a caller's tensors, with these arguments. `launch_spec` gives a launch
that stands alone: buffers with their shapes, tensor maps, the grid for one set of sizes. With it a
built kernel is measured, checked and searched like any other cubin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

from warploom.errors import InputError
from warploom.machine import Machine
from warploom.runtime.device import Shape
from warploom.runtime.launch import Argument, Buffer, LaunchSpec, Pointer, Scalar, TensorMap
from warploom.runtime.tensors import contiguous
from warploom.tile.dtypes import MEMORY, dtype
from warploom.tile.index import Index
from warploom.tile.ir import Array

COUNTER: Final = "task counter"
PITCH: Final = 16  # bytes: the unit of a tensor map's pitches and address
SECTOR: Final = 32  # bytes: of device memory and of the L2
# A tensor map cannot describe a dimension of length 0. One element of scratch memory stands in for
# such an array: a half that is read, and stays zero, and a half that is written.
SCRATCH_BYTES: Final = 512


@dataclass(frozen=True)
class Signature:
    """What a kernel takes, and the blocks that it runs in.

    parameters      in order: {"kind": map|dim|pointer|stride|counter|scalar, ...}
    shared_bytes    dynamic shared memory of a block of `threads`
    cluster         blocks of a cluster, along `cluster_axis` of the grid
    grid            (axis, how many tasks along it), of dimensions of the arrays
    persistent      blocks take tasks until there are none
    dependent       may start before the previous grid of its stream has ended
    """

    name: str
    parameters: tuple[Mapping[str, Any], ...]
    shared_bytes: int
    threads: int
    cluster: int
    cluster_axis: str
    grid: tuple[tuple[str, Index], ...]
    arrays: tuple[Array, ...]
    persistent: bool
    dependent: bool

    def to_json(self) -> dict[str, Any]:
        """The signature as a manifest has it."""
        return {one.name: getattr(self, one.name) for one in fields(Signature)} | {
            "parameters": list(self.parameters),
            "grid": [[name, extent.to_json()] for name, extent in self.grid],
            "arrays": [[a.name, a.dtype.name, list(a.dims)] for a in self.arrays],
        }

    @staticmethod
    def read(data: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a signature from a manifest."""
        return {one.name: data[one.name] for one in fields(Signature)} | {
            "parameters": tuple(data["parameters"]),
            "grid": tuple((axis, Index.from_json(extent)) for axis, extent in data["grid"]),
            "arrays": tuple(Array(n, dtype(kind), tuple(dims)) for n, kind, dims in data["arrays"]),
        }

    def tasks(self, sizes: Mapping[str, int]) -> int:
        """Tasks of a launch: grid points, counted in clusters along the clustered axis."""
        total = 1
        for name, extent in self.grid:
            count = max(0, extent.evaluate(sizes))
            total *= -(-count // self.cluster) if name == self.cluster_axis else count
        return total


@dataclass(frozen=True)
class Interface(Signature):
    """A built kernel without its code; `registers` are those of a thread at entry."""

    arch: str
    registers: int

    @property
    def kinds(self) -> set[str]:
        """The kinds of its parameters."""
        return {p["kind"] for p in self.parameters}

    @property
    def types(self) -> dict[str, str]:
        """The element type of every array."""
        return {array.name: array.dtype.name for array in self.arrays}

    def shape(self, blocks: int) -> Shape:
        """The shape of a launch; the code itself says what a cluster is."""
        sizes = (blocks, 1, 1), (self.threads, 1, 1)
        return Shape(*sizes, self.shared_bytes, dependent=self.dependent)

    def written(self, array: str) -> bool:
        """Whether the kernel writes to an array."""
        return any(p.get("written") and p["array"] == array for p in self.parameters)

    def arguments(
        self,
        shapes: Mapping[str, Sequence[int]],
        strides: Mapping[str, Sequence[int]],
        sizes: Mapping[str, int],
        scalars: Mapping[str, Scalar],
    ) -> list[Argument]:
        """The kernel's arguments for arrays of these shapes and strides, in elements."""
        found: list[Argument] = []
        for p in self.parameters:
            match p["kind"]:
                case "counter":
                    found.append(Pointer(COUNTER))
                case "dim":
                    found.append(Scalar("i32", sizes[p["name"]]))
                case "scalar":
                    found.append(scalars[p["name"]])
                case "stride":
                    found.append(Scalar("i64", strides[p["array"]][int(p["dim"])]))
                case "map":
                    found.append(_tensor_map(p, shapes[p["array"]], strides[p["array"]]))
                case _:
                    found.append(Pointer(p["array"]))
        return found

    def scalars(self, given: Mapping[str, float]) -> dict[str, Scalar]:
        """Every scalar of the kernel; raises `InputError` for one too many, missing or unfit."""
        wanted = {p["name"]: p["dtype"] for p in self.parameters if p["kind"] == "scalar"}
        if unknown := set(given) - set(wanted):
            raise InputError(
                f"kernel {self.name} has no scalar {min(map(str, unknown))!r}; it has "
                f"{sorted(wanted)}"
            )
        if missing := [name for name in wanted if name not in given]:
            raise InputError(f"kernel {self.name} needs scalar {missing[0]}")
        return {name: _scalar(name, kind, given[name]) for name, kind in wanted.items()}

    def launch_spec(
        self, sizes: Mapping[str, int], gpu: Machine, scalars: Mapping[str, float] | None = None
    ) -> LaunchSpec:
        """The launch for dimensions `sizes` {name: extent}, in elements.

        A persistent kernel gets as many blocks as `gpu` keeps resident, or one a task when there
        are fewer. Raises `InputError` for a dimension or scalar that is missing.
        """
        missing = {dim for array in self.arrays for dim in array.dims} - set(sizes)
        if missing:
            raise InputError(f"kernel {self.name} needs a size for {', '.join(sorted(missing))}")
        shapes = {one.name: tuple(int(sizes[dim]) for dim in one.dims) for one in self.arrays}
        buffers = [
            Buffer(one.name, shapes[one.name], one.dtype.name, self.role(one.name))
            for one in self.arrays
        ]
        for buffer in buffers:
            if buffer.role != "out" and not dtype(buffer.dtype).is_float:
                raise InputError(
                    f"kernel {self.name}: array {buffer.name} holds indices, and random numbers "
                    "are none; measure its cubin with a launch description of your own"
                )
        if "counter" in self.kinds:
            # The next task to take; the kernel leaves it at 0, as it found it.
            buffers.append(Buffer(COUNTER, (1,), "u32", "inout", zero=True))
        strides = {name: contiguous(shape) for name, shape in shapes.items()}
        arguments = self.arguments(shapes, strides, sizes, self.scalars(scalars or {}))
        blocks = self.tasks(sizes) * self.cluster
        if not blocks:
            raise InputError(f"kernel {self.name}: these sizes leave nothing to do")
        if self.persistent:
            blocks = min(blocks, self.resident_blocks(gpu))
        shape = self.shape(blocks)
        return LaunchSpec(
            self.name,
            shape.grid,
            shape.block,
            tuple(buffers),
            tuple(arguments),
            self.shared_bytes,
            notes={"sizes": ", ".join(f"{name}={size}" for name, size in sizes.items())},
        )

    def role(self, array: str) -> str:
        """How the kernel uses an array: `in`, `out`, or `inout` when it reads and writes it."""
        uses = [p for p in self.parameters if p.get("array") == array and "written" in p]
        used = {bool(p["written"]) for p in uses}
        return "inout" if len(used) == 2 else "out" if True in used else "in"

    def resident_blocks(self, gpu: Machine) -> int:
        """Blocks of the kernel that `gpu` holds at a time, in whole clusters."""
        warps = -(-self.threads // gpu.integer("limits.warp_size"))
        unit = gpu.integer("registers.warp_granularity")
        registers = -(-self.registers * gpu.integer("limits.warp_size") // unit) * unit * warps
        each = min(
            gpu.integer("smem.per_sm")
            // (self.shared_bytes + gpu.integer("smem.reserved_per_block")),
            gpu.integer("registers.per_sm") // registers,
            gpu.integer("limits.blocks_per_sm"),
        )
        if each < 1:
            raise self.misfit(gpu.title)
        return gpu.integer("sm.count") * each // self.cluster * self.cluster

    def misfit(self, gpu: str) -> InputError:
        """What to raise where not one block fits a GPU."""
        return InputError(
            f"kernel {self.name}: a block of {self.threads} threads with {self.registers} "
            f"registers each and {self.shared_bytes:,} B of shared memory does not fit {gpu}"
        )


def pitches_of(shape: Sequence[int], strides: Sequence[int], element: int) -> list[int]:
    """Bytes from one index to the next of every dimension but the innermost, innermost first.

    A dimension of one element may have any stride in the tensor; it gets a legal one here.
    """
    result: list[int] = []
    for stride, extent in zip(reversed(strides[:-1]), reversed(shape[:-1]), strict=True):
        pitch = stride * element
        result.append(pitch if extent > 1 else max(PITCH, -(-pitch // PITCH) * PITCH))
    return result


def _tensor_map(
    parameter: Mapping[str, Any], shape: Sequence[int], strides: Sequence[int]
) -> TensorMap:
    """Rows that straddle sectors are fetched as asked for, others with their neighbours.

    Measured on an H200 (GEMM 128x256, random bf16): 2 to 4 % at 5000^3, 4000x6008x3000 and
    12345x1544x3080, whose pitches are odd multiples of 16 B; 12 to 16 % on zeros.
    """
    offset = 0
    pitches = pitches_of(shape, strides, dtype(parameter["dtype"], MEMORY).bytes)
    if 0 in shape:
        offset = SCRATCH_BYTES // 2 if parameter.get("written") else 0
        shape, pitches = (1,) * len(shape), [PITCH] * (len(shape) - 1)
    return TensorMap(
        parameter["array"],
        tuple(reversed(shape)),
        tuple(pitches),
        tuple(int(extent) for extent in parameter["box"]),
        int(parameter["swizzle"]),
        offset=offset,
        promotion=0
        if any(pitch % SECTOR for pitch in pitches)
        else int(parameter.get("promotion", 256)),
    )


def _scalar(name: str, kind: str, given: Any) -> Scalar:
    what = "a 32-bit integer" if kind == "int32" else "a number that fp32 holds"
    try:
        if kind != "int32":
            return Scalar("fp32", float(given))
        if int(given) != given:
            raise ValueError
        return Scalar("i32", int(given))
    except (TypeError, ValueError, OverflowError, InputError):
        raise InputError(f"scalar {name}={given!r}: expected {what}") from None
