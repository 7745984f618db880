"""Launching a built kernel on the caller's tensors and stream: no copies, no host sync.

Tensors are anything with torch's `data_ptr`, `shape`, `stride` and `dtype`, or the
`__cuda_array_interface__` (CuPy, Numba, JAX on request). Tensor maps are cached by address, shape
and pitch, so a launch inside a captured graph encodes nothing.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from warploom.codegen.build import Built
from warploom.errors import DeviceError, InputError
from warploom.runtime.bindings import import_binding
from warploom.tile import Array

COUNTERS = 1024  # launches of one kernel with a dynamic walk that may be in flight at a time
PITCH = 16  # bytes: strides and addresses of a tensor map are multiples (cuTensorMapEncodeTiled)
MAP_TYPES = {
    "bf16": "BFLOAT16",
    "fp16": "FLOAT16",
    "fp32": "FLOAT32",
    "int32": "INT32",
    "e4m3": "UINT8",
    "e5m2": "UINT8",
}
# names tensor libraries give our element types
ALIASES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "int32": "int32",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
}


@dataclass(frozen=True)
class View:
    """A tensor in device memory: address, sizes and strides in elements, our element type."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


def view(tensor: Any, name: str) -> View:
    """What a launch needs of a tensor; raises `InputError` when it is not on a GPU."""
    if hasattr(tensor, "data_ptr"):
        if not bool(getattr(tensor, "is_cuda", False)):
            raise InputError(f"array {name} is not on a GPU; move it there first")
        kind = str(tensor.dtype).removeprefix("torch.")
        return View(
            int(tensor.data_ptr()),
            tuple(tensor.shape),
            tuple(tensor.stride()),
            ALIASES.get(kind, kind),
        )
    face: Any = getattr(tensor, "__cuda_array_interface__", None)
    if face is None:
        raise InputError(f"array {name} is a {type(tensor).__name__}, expected a GPU tensor")
    shape = tuple(face["shape"])
    import_kind = str(getattr(tensor, "dtype", face["typestr"]))
    size = int(face["typestr"][2:])
    strides = face.get("strides")
    if strides is None:
        steps = [1]
        for extent in reversed(shape[1:]):
            steps.append(steps[-1] * extent)
        return View(face["data"][0], shape, tuple(reversed(steps)), ALIASES.get(import_kind, ""))
    return View(
        face["data"][0], shape, tuple(s // size for s in strides), ALIASES.get(import_kind, "")
    )


class Kernel:
    """A built kernel on the current CUDA device (one instance a device)."""

    def __init__(self, built: Built, device: int = 0) -> None:
        self.built = built
        self._driver = import_binding("driver")
        self._maps: dict[tuple[Any, ...], bytes] = {}
        self._call("cuInit", 0)
        handle = self._call("cuDeviceGet", device)
        context = self._call("cuDevicePrimaryCtxRetain", handle)
        self._call("cuCtxSetCurrent", context)
        image = ctypes.create_string_buffer(built.cubin, len(built.cubin) + 1)
        module = self._call("cuModuleLoadData", ctypes.addressof(image))
        self._function = self._call("cuModuleGetFunction", module, built.source.name.encode())
        attribute = self._driver.CUfunction_attribute
        limit = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._call("cuFuncSetAttribute", self._function, limit, built.source.shared_bytes)
        self._blocks = self._resident_blocks(handle)
        # Each launch returns its counter to 0, so the next to use the slot finds it ready.
        self._counters, self._launches = 0, 0
        if any(p["kind"] == "counter" for p in self._parameters):
            self._counters = int(self._call("cuMemAlloc", 4 * COUNTERS))
            self._call("cuMemsetD32", self._counters, 0, COUNTERS)
            self._call("cuCtxSynchronize")

    def __call__(
        self,
        arrays: Mapping[str, Any],
        scalars: Mapping[str, float] | None = None,
        stream: int = 0,
    ) -> None:
        """Queue the kernel on `stream` (a CUstream as an integer; 0: the default stream)."""
        views = {spec.name: self._view(spec, arrays) for spec in self.built.source.arrays}
        sizes = self._sizes(views)
        tasks = self.tasks(sizes)
        if tasks == 0:
            return
        packed = [self._parameter(p, views, sizes, scalars or {}) for p in self._parameters]
        slots = [ctypes.create_string_buffer(data, len(data)) for data in packed]
        addresses = (ctypes.c_void_p * len(slots))(*[ctypes.addressof(slot) for slot in slots])
        src = self.built.source
        blocks = tasks * src.cluster
        if src.persistent:
            blocks = min(blocks, self._blocks)
        self._launches += 1
        self._launch(blocks, stream, ctypes.addressof(addresses))

    def _launch(self, blocks: int, stream: int, parameters: int) -> None:
        src, driver = self.built.source, self._driver
        if not src.dependent:
            shape = (blocks, 1, 1, src.threads, 1, 1)
            self._call(
                "cuLaunchKernel", self._function, *shape, src.shared_bytes, stream, parameters, 0
            )
            return
        overlap = driver.CUlaunchAttribute()
        overlap.id = (
            driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        )
        overlap.value.programmaticStreamSerializationAllowed = 1
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = src.threads, 1, 1
        config.sharedMemBytes, config.hStream = src.shared_bytes, stream
        config.attrs, config.numAttrs = [overlap], 1
        self._call("cuLaunchKernelEx", config, self._function, parameters, 0)

    @property
    def _parameters(self) -> tuple[dict[str, Any], ...]:
        return self.built.source.parameters

    def tasks(self, sizes: Mapping[str, int]) -> int:
        """Tasks of a launch: grid points, counted in clusters along the clustered axis."""
        src = self.built.source
        total = 1
        for name, extent in src.grid:
            count = max(0, extent.evaluate(sizes))
            total *= -(-count // src.cluster) if name == src.cluster_axis else count
        return total

    def _view(self, spec: Array, arrays: Mapping[str, Any]) -> View:
        if spec.name not in arrays:
            raise InputError(f"kernel {self.built.source.name} needs array {spec}")
        found = view(arrays[spec.name], spec.name)
        if found.dtype != spec.dtype.name:
            raise InputError(f"array {spec.name} is {found.dtype}, the kernel takes {spec.dtype}")
        if len(found.shape) != len(spec.dims):
            raise InputError(f"array {spec} was given with shape {list(found.shape)}")
        if found.shape[-1] > 1 and found.strides[-1] != 1:
            raise InputError(
                f"array {spec.name}: its last dimension {spec.dims[-1]!r} has stride "
                f"{found.strides[-1]}, expected 1; make it contiguous or build the transposed form"
            )
        return found

    def _sizes(self, views: Mapping[str, View]) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for spec in self.built.source.arrays:
            for dim, extent in zip(spec.dims, views[spec.name].shape, strict=True):
                if sizes.setdefault(dim, extent) != extent:
                    raise InputError(
                        f"dimension {dim!r} is {sizes[dim]} in one array, {extent} in {spec.name}"
                    )
        return sizes

    def _parameter(
        self,
        parameter: Mapping[str, Any],
        views: Mapping[str, View],
        sizes: Mapping[str, int],
        scalars: Mapping[str, float],
    ) -> bytes:
        kind = parameter["kind"]
        if kind == "map":
            return self._map(parameter, views[parameter["array"]])
        if kind == "pointer":
            return bytes(ctypes.c_void_p(views[parameter["array"]].address))
        if kind == "counter":
            return bytes(ctypes.c_void_p(self._counters + 4 * (self._launches % COUNTERS)))
        if kind == "stride":
            return struct.pack("<q", views[parameter["array"]].strides[int(parameter["dim"])])
        if kind == "dim":
            return bytes(ctypes.c_int(sizes[parameter["name"]]))
        if parameter["name"] not in scalars:
            raise InputError(f"kernel {self.built.source.name} needs scalar {parameter['name']}")
        number = float(scalars[parameter["name"]])
        is_int = parameter["dtype"] == "int32"
        return struct.pack("<i", int(number)) if is_int else struct.pack("<f", number)

    def _map(self, parameter: Mapping[str, Any], of: View) -> bytes:
        key = (parameter["name"], of)
        if key not in self._maps:
            self._maps[key] = self._encode(parameter, of)
        return self._maps[key]

    def _encode(self, parameter: Mapping[str, Any], of: View) -> bytes:
        driver = self._driver
        name, rank = parameter["array"], len(of.shape)
        element = {"fp32": 4, "int32": 4, "bf16": 2, "fp16": 2}.get(of.dtype, 1)
        pitches = [stride * element for stride in reversed(of.strides[:-1])]
        # A dimension of one element may have any stride; the encoder wants a legal one.
        for place, extent in enumerate(reversed(of.shape[:-1])):
            if extent == 1:
                pitches[place] = -(-pitches[place] // PITCH) * PITCH or PITCH
        if of.address % PITCH or any(pitch % PITCH for pitch in pitches):
            raise InputError(
                f"array {name}: address {of.address:#x} and pitches {pitches} B must be multiples "
                f"of {PITCH} B for TMA; pad its last dimension to a multiple of "
                f"{PITCH // element} elements"
            )
        encoded = self._call(
            "cuTensorMapEncodeTiled",
            getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{MAP_TYPES[of.dtype]}"),
            rank,
            of.address,
            [driver.cuuint64_t(extent) for extent in reversed(of.shape)],
            [driver.cuuint64_t(pitch) for pitch in pitches],
            [driver.cuuint32_t(extent) for extent in parameter["box"]],
            [driver.cuuint32_t(1)] * rank,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{parameter['swizzle']}B"),
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        return ctypes.string_at(int(encoded.getPtr()), 128)

    def _resident_blocks(self, device: Any) -> int:
        driver, src = self._driver, self.built.source
        if src.cluster == 1:
            count = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
            each = self._call(
                "cuOccupancyMaxActiveBlocksPerMultiprocessor",
                self._function,
                src.threads,
                src.shared_bytes,
            )
            return int(self._call("cuDeviceGetAttribute", count, device)) * int(each)
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        dims = attribute.value.clusterDim
        dims.x, dims.y, dims.z = src.cluster, 1, 1
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = src.cluster, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = src.threads, 1, 1
        config.sharedMemBytes = src.shared_bytes
        config.attrs = [attribute]
        config.numAttrs = 1
        clusters = int(self._call("cuOccupancyMaxActiveClusters", self._function, config))
        if clusters == 0:
            raise DeviceError(f"no cluster of {src.cluster} blocks of {src.name} fits this GPU")
        return clusters * src.cluster

    def _call(self, name: str, *args: Any) -> Any:
        result = getattr(self._driver, name)(*args)
        status = result[0]
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise DeviceError(f"{name}: {status.name}, kernel {self.built.source.name}")
        return result[1] if len(result) > 1 else None
