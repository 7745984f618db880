"""Launching a built kernel on the caller's tensors and stream: no copies, no host sync.

Everything that can be wrong with a call (type, shape, strides, alignment, device, architecture,
shared memory) is refused with its numbers before the launch. What a call hands to the driver is
kept by address, shape and strides: a repeated call encodes nothing, and a call inside a captured
graph does nothing but the launch.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from warploom.codegen.compile.build import Built
from warploom.codegen.launching import tensor_maps
from warploom.codegen.launching.images import image_of
from warploom.errors import DeviceError, InputError
from warploom.runtime.bindings import import_binding, one_line
from warploom.runtime.tensors import View, view
from warploom.tile import Array

COUNTERS = 1024  # launches of one kernel with a dynamic walk that may be in flight at a time
KEPT = 1024  # calls whose parameters are kept
# Kernels count in 32-bit integers, and round up to tiles and grids.
LONGEST = 2**31 - 2**16
ELEMENT = {**{name: size for name, (_, size) in tensor_maps.MAP_TYPES.items()}, "bool": 1}  # bytes


@dataclass
class _Call:
    """What one set of tensors and scalars hands to the driver; `counter` is where one is drawn."""

    blocks: int
    slots: list[Any]
    addresses: Any
    counter: int


class Kernel:
    """A built kernel on one CUDA device; raises `InputError` when that device cannot run it."""

    def __init__(self, built: Built, device: int = 0) -> None:
        self.built, self.device = built, device
        self._driver = import_binding("driver")
        self._calls: dict[tuple[Any, ...], _Call] = {}
        self._maps: dict[tuple[Any, ...], bytes] = {}
        self._initialise()
        handle = self._call("cuDeviceGet", device)
        self._check_device(handle)
        self._context = self._call("cuDevicePrimaryCtxRetain", handle)
        self._call("cuCtxSetCurrent", self._context)
        cubin = image_of(built.source.name, built.cubin)
        image = ctypes.create_string_buffer(cubin, len(cubin) + 1)
        self._module = self._call("cuModuleLoadData", ctypes.addressof(image))
        name = built.source.name.encode()
        self._function = self._call("cuModuleGetFunction", self._module, name)
        attribute = self._driver.CUfunction_attribute
        limit = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._call("cuFuncSetAttribute", self._function, limit, built.source.shared_bytes)
        self._blocks = self._resident_blocks(handle)
        # Each launch returns its counter to 0, so the next to use the slot finds it ready.
        kinds = {p["kind"] for p in self._parameters}
        self._counters = self._zeros(4 * COUNTERS) if "counter" in kinds else 0
        self._scratch = self._zeros(tensor_maps.SCRATCH_BYTES) if "map" in kinds else 0
        self._launches = 0

    def __call__(
        self,
        arrays: Mapping[str, Any],
        scalars: Mapping[str, float] | None = None,
        stream: int = 0,
    ) -> None:
        """Queue the kernel on `stream` (a CUstream as an integer; 0: the default stream)."""
        specs = self.built.source.arrays
        given: Any = arrays
        if not isinstance(given, Mapping):
            raise InputError(
                f"kernel {self.built.source.name} takes a table of arrays by name, not "
                f"{type(given).__name__}"
            )
        queue: Any = stream
        if not isinstance(queue, int):
            raise InputError(
                f"stream is a {type(queue).__name__}, expected its handle, an integer: "
                "stream.cuda_stream of torch's, stream.ptr of CuPy's"
            )
        if unknown := set(arrays) - {spec.name for spec in specs}:
            raise InputError(
                f"kernel {self.built.source.name} has no array {min(map(str, unknown))!r}; "
                f"it takes {', '.join(spec.name for spec in specs)}"
            )
        views = {spec.name: self._view(spec, arrays, stream) for spec in specs}
        # A thread that has not used the GPU yet has no context, and tensor maps need one too.
        if int(self._call("cuCtxGetCurrent")) == int(self._context):
            self._queue(views, scalars or {}, stream)
            return
        self._call("cuCtxPushCurrent", self._context)
        try:
            self._queue(views, scalars or {}, stream)
        finally:
            self._call("cuCtxPopCurrent")

    def _queue(self, views: Mapping[str, View], scalars: Mapping[str, float], stream: int) -> None:
        packed = self._scalars(scalars)
        key = (*views.values(), *packed.values())
        call = self._calls.get(key)
        if call is None:
            if len(self._calls) >= KEPT:
                self._calls.clear()
                self._maps.clear()
            call = self._calls[key] = self._prepare(views, packed)
        if call.blocks == 0:
            return
        for one in {v.stream for v in views.values()} - {None, stream}:
            self._wait_for(one, stream)
        if call.counter >= 0:
            place = self._counters + 4 * (self._launches % COUNTERS)
            ctypes.memmove(call.slots[call.counter], bytes(ctypes.c_void_p(place)), 8)
        self._launches += 1
        self._launch(call.blocks, stream, ctypes.addressof(call.addresses))

    def global_memory(self, name: str) -> tuple[int, int]:
        """Address and bytes of a `__device__` variable of the kernel's file."""
        address, size = self._call("cuModuleGetGlobal", self._module, name.encode())
        return int(address), int(size)

    def tasks(self, sizes: Mapping[str, int]) -> int:
        """Tasks of a launch: grid points, counted in clusters along the clustered axis."""
        src = self.built.source
        total = 1
        for name, extent in src.grid:
            count = max(0, extent.evaluate(sizes))
            total *= -(-count // src.cluster) if name == src.cluster_axis else count
        return total

    def _prepare(self, views: Mapping[str, View], scalars: Mapping[str, bytes]) -> _Call:
        src = self.built.source
        sizes = self._sizes(views)
        for name, of in views.items():
            self._check_memory(name, of)
        tasks = self.tasks(sizes)
        if tasks > LONGEST:
            raise InputError(f"kernel {src.name}: {tasks:,} tasks, at most {LONGEST:,}")
        blocks = tasks * src.cluster
        if src.persistent:
            blocks = min(blocks, self._blocks)
        if blocks > LONGEST:
            raise InputError(
                f"kernel {src.name}: {blocks:,} blocks, a grid has at most {LONGEST:,}"
            )
        if blocks == 0:
            return _Call(0, [], None, -1)
        packed = [self._parameter(p, views, sizes, scalars) for p in self._parameters]
        slots = [ctypes.create_string_buffer(data, len(data)) for data in packed]
        addresses = (ctypes.c_void_p * len(slots))(*[ctypes.addressof(slot) for slot in slots])
        kinds = [p["kind"] for p in self._parameters]
        counter = kinds.index("counter") if "counter" in kinds else -1
        return _Call(blocks, slots, addresses, counter)

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

    def _view(self, spec: Array, arrays: Mapping[str, Any], stream: int) -> View:
        if spec.name not in arrays:
            raise InputError(f"kernel {self.built.source.name} needs array {spec}")
        found = view(arrays[spec.name], spec.name, stream)
        if found.dtype != spec.dtype.name:
            raise InputError(f"array {spec.name} is {found.dtype}, the kernel takes {spec.dtype}")
        if len(found.shape) != len(spec.dims):
            raise InputError(f"array {spec} was given with shape {list(found.shape)}")
        if found.shape[-1] > 1 and found.strides[-1] != 1:
            raise InputError(
                f"array {spec.name}: its last dimension {spec.dims[-1]!r} has stride "
                f"{found.strides[-1]}, expected 1; make it contiguous or build the transposed form"
            )
        if found.device not in (None, self.device):
            raise InputError(
                f"array {spec.name} is on device {found.device}, the kernel was loaded on device "
                f"{self.device}"
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
                if extent > LONGEST:
                    raise InputError(
                        f"dimension {dim!r} of {spec.name} is {extent:,} long, at most {LONGEST:,}"
                    )
        return sizes

    def _parameter(
        self,
        parameter: Mapping[str, Any],
        views: Mapping[str, View],
        sizes: Mapping[str, int],
        scalars: Mapping[str, bytes],
    ) -> bytes:
        kind = parameter["kind"]
        if kind == "counter":
            return bytes(ctypes.c_void_p(self._counters))
        if kind == "dim":
            return bytes(ctypes.c_int(sizes[parameter["name"]]))
        if kind == "scalar":
            return scalars[parameter["name"]]
        of, name = views[parameter["array"]], parameter["array"]
        if parameter.get("written") and not of.writable:
            raise InputError(f"array {name} is read-only, the kernel writes to it")
        if kind == "map":
            return self._map(parameter, of)
        if parameter.get("aligned"):
            tensor_maps.check(of, name, "copies of 16 B")
        if kind == "stride":
            return struct.pack("<q", of.strides[int(parameter["dim"])])
        return bytes(ctypes.c_void_p(of.address))

    def _check_memory(self, name: str, of: View) -> None:
        """Raise for elements across their own size, and for outputs that overlap themselves."""
        element = ELEMENT[of.dtype]
        if of.address % element:
            raise InputError(
                f"array {name}: address {of.address:#x} is no multiple of its {element} B elements"
            )
        if not any(p.get("written") and p["array"] == name for p in self._parameters):
            return
        reach = 0
        for step, extent in sorted(
            (abs(s), n) for s, n in zip(of.strides, of.shape, strict=True) if n > 1
        ):
            if step <= reach:
                raise InputError(
                    f"array {name} is written to, but strides {list(of.strides)} of shape "
                    f"{list(of.shape)} let its elements overlap; give it memory of its own"
                )
            reach += step * (extent - 1)

    def _scalars(self, scalars: Mapping[str, float]) -> dict[str, bytes]:
        """Every scalar of the kernel as its parameter."""
        wanted = {p["name"]: p["dtype"] for p in self._parameters if p["kind"] == "scalar"}
        if unknown := set(scalars) - set(wanted):
            raise InputError(
                f"kernel {self.built.source.name} has no scalar {min(map(str, unknown))!r}; it has "
                f"{sorted(wanted)}"
            )
        if missing := [name for name in wanted if name not in scalars]:
            raise InputError(f"kernel {self.built.source.name} needs scalar {missing[0]}")
        return {name: _scalar(name, kind, scalars[name]) for name, kind in wanted.items()}

    def _map(self, parameter: Mapping[str, Any], of: View) -> bytes:
        key = (parameter["name"], of)
        if key not in self._maps:
            tensor_maps.check(of, parameter["array"])
            self._maps[key] = tensor_maps.encode(
                self._driver, self._call, parameter, of, self._scratch
            )
        return self._maps[key]

    def _wait_for(self, producer: Any, stream: int) -> None:
        # Orders our stream after the producer's on the device; the host goes on.
        event = self._call("cuEventCreate", self._driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        self._call("cuEventRecord", event, int(producer))
        self._call("cuStreamWaitEvent", stream, event, 0)
        self._call("cuEventDestroy", event)

    def _initialise(self) -> None:
        try:
            self._call("cuInit", 0)
        except RuntimeError as error:  # cuda-bindings found no driver library
            raise DeviceError(f"no NVIDIA driver here ({one_line(error)})") from None

    def _zeros(self, count: int) -> int:
        memory = int(self._call("cuMemAlloc", count))
        self._call("cuMemsetD32", memory, 0, count // 4)
        self._call("cuCtxSynchronize")
        return memory

    def _attribute(self, handle: Any, name: str) -> int:
        attribute = getattr(self._driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self._call("cuDeviceGetAttribute", attribute, handle))

    def _check_device(self, handle: Any) -> None:
        src = self.built.source
        major = self._attribute(handle, "COMPUTE_CAPABILITY_MAJOR")
        minor = self._attribute(handle, "COMPUTE_CAPABILITY_MINOR")
        number = self.built.arch.removeprefix("sm_")
        built = int(number.rstrip("abcdef"))
        present = 10 * major + minor
        # Machine code runs on its own generation from its own minor version on; "a" only there.
        exact = not number.isdigit()
        if present != built if exact else (present // 10 != built // 10 or present < built):
            raise InputError(
                f"kernel {src.name} was built for {self.built.arch}, device {self.device} is "
                f"sm_{present}; build it for that architecture"
            )
        limit = self._attribute(handle, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
        if src.shared_bytes > limit:
            raise InputError(
                f"kernel {src.name} needs {src.shared_bytes:,} B of shared memory, the GPU has "
                f"{limit:,}"
            )

    def _resident_blocks(self, device: Any) -> int:
        driver, src = self._driver, self.built.source
        if src.cluster == 1:
            each = self._call(
                "cuOccupancyMaxActiveBlocksPerMultiprocessor",
                self._function,
                src.threads,
                src.shared_bytes,
            )
            if int(each) == 0:
                raise InputError(
                    f"kernel {src.name}: a block of {src.threads} threads with "
                    f"{self.built.resources.registers} registers each and {src.shared_bytes:,} B "
                    "of shared memory does not fit this GPU"
                )
            return self._attribute(device, "MULTIPROCESSOR_COUNT") * int(each)
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
        return result[1] if len(result) == 2 else result[1:] or None


def _scalar(name: str, kind: str, given: Any) -> bytes:
    what = "a 32-bit integer" if kind == "int32" else "a number that fp32 holds"
    try:
        if kind != "int32":
            return struct.pack("<f", float(given))
        if int(given) != given:
            raise ValueError
        return struct.pack("<i", int(given))
    except (TypeError, ValueError, OverflowError, struct.error):
        raise InputError(f"scalar {name}={given!r}: expected {what}") from None
