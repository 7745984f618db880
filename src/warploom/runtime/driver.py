"""The CUDA driver API, mostly through cuda-bindings: the only file that calls it."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import re
import struct
import subprocess
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from warploom.errors import DeviceError, InputError, ToolMissing
from warploom.machine import largest
from warploom.runtime.bindings import import_binding, one_line
from warploom.runtime.device import ADVICE, CudaError, DeviceInfo, Shape
from warploom.runtime.launch import Params, TensorMap
from warploom.tile.dtypes import MEMORY, dtype

# What every launch asks: arguments of calls that are made without cuda-bindings' objects.
DIRECT = {
    "cuCtxGetCurrent": 1,
    "cuCtxPopCurrent": 1,
    "cuCtxPushCurrent": 1,
    "cuLaunchKernelEx": 4,
    "cuTensorMapReplaceAddress": 2,
}
DIRECT_VERSION = 13000  # of CUDA, whose form of a call is meant
ELF_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")  # Elf64_Ehdr


@dataclass(frozen=True)
class Module:
    """A loaded cubin; keeps the image alive as long as the module."""

    handle: Any
    image: Any


@dataclass(frozen=True)
class Graph:
    """A captured and instantiated graph."""

    graph: Any
    executable: Any


def device_count() -> int:
    """GPUs the driver offers; 0 with no driver or no GPU. `ToolMissing` without cuda-bindings."""
    driver = import_binding("driver")
    try:
        (status,) = driver.cuInit(0)
        if status != driver.CUresult.CUDA_SUCCESS:
            return 0
        status, count = driver.cuDeviceGetCount()
    except RuntimeError:  # no libcuda: cuda-pathfinder's DynamicLibNotFoundError
        return 0
    return int(count) if status == driver.CUresult.CUDA_SUCCESS else 0


def gpu_here() -> bool:
    """Whether there is a GPU here with all that it takes to run kernels."""
    try:
        return device_count() > 0
    except ToolMissing:
        return False


def kernel_driver_version() -> str:
    """The kernel driver's version, such as '580.159.04'; empty when nothing tells."""
    for path in ("/sys/module/nvidia/version", "/proc/driver/nvidia/version"):
        try:
            text = Path(path).read_text()
        except OSError:
            continue
        if match := re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", text):
            return match.group(1)
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.split("\n")[0].strip() if done.returncode == 0 else ""


def device_info(index: int = 0) -> DeviceInfo:
    """What the driver says about GPU `index`, without creating a context."""
    return _info(import_binding("driver"), index)


def _check(driver: Any, call: str, result: tuple[Any, ...], subject: str = "") -> Any:
    """The value of a driver call, or `CudaError` naming the call and the CUDA error."""
    status = result[0]
    if status == driver.CUresult.CUDA_SUCCESS:
        return result[1] if len(result) == 2 else result[1:]
    name = str(status.name)
    detail = ADVICE.get(name, "")
    if not detail:
        _, text = driver.cuGetErrorString(status)
        detail = text.decode() if isinstance(text, bytes) else str(text)
    if subject:
        detail = f"{subject}: {detail}"
    raise CudaError(call, name, detail)


@cache
def _direct(driver: Any, name: str) -> Callable[..., int]:
    found = driver.cuGetProcAddress(name.encode(), DIRECT_VERSION, 0)
    address, _ = _check(driver, "cuGetProcAddress", found, name)
    taken = [ctypes.c_void_p] * DIRECT[name]
    return ctypes.CFUNCTYPE(ctypes.c_int, *taken)(int(address))


def _open(driver: Any, index: int) -> Any:
    """Initialise the driver and return the device handle; one clear line when there is none."""
    needed = "an NVIDIA GPU and its driver, r580 or newer, are needed to run kernels"
    try:
        result = driver.cuInit(0)
    except RuntimeError as error:
        why = one_line(error).split(". ")[0]
        raise DeviceError(f"no GPU driver here: {needed} ({why})") from None
    if result[0] != driver.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"no usable GPU here (cuInit: {result[0].name}): {needed}")
    count = int(_check(driver, "cuDeviceGetCount", driver.cuDeviceGetCount()))
    if not 0 <= index < count:
        raise InputError(f"GPU {index} was asked for, {count} present: choose 0 to {count - 1}")
    return _check(driver, "cuDeviceGet", driver.cuDeviceGet(index))


def _attribute(driver: Any, handle: Any, name: str) -> int:
    key = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(_check(driver, "cuDeviceGetAttribute", driver.cuDeviceGetAttribute(key, handle)))


def _info(driver: Any, index: int) -> DeviceInfo:
    handle = _open(driver, index)

    def attribute(name: str) -> int:
        return _attribute(driver, handle, name)

    name = _check(driver, "cuDeviceGetName", driver.cuDeviceGetName(256, handle))
    version = int(_check(driver, "cuDriverGetVersion", driver.cuDriverGetVersion()))
    return DeviceInfo(
        index=index,
        name=name.split(b"\0")[0].decode(),
        compute_capability=(
            attribute("COMPUTE_CAPABILITY_MAJOR"),
            attribute("COMPUTE_CAPABILITY_MINOR"),
        ),
        sm_count=attribute("MULTIPROCESSOR_COUNT"),
        clock_mhz=attribute("CLOCK_RATE") / 1000,
        l2_bytes=attribute("L2_CACHE_SIZE"),
        memory_bytes=int(_check(driver, "cuDeviceTotalMem", driver.cuDeviceTotalMem(handle))),
        shared_optin_bytes=attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        cuda_version=f"{version // 1000}.{version % 1000 // 10}",
        driver_version=kernel_driver_version(),
    )


def _elf_trouble(image: bytes) -> str:
    """Why the driver must not see this image; empty when its ELF tables lie inside it."""
    if len(image) < ELF_HEADER.size or image[:5] != b"\x7fELF\x02":
        return f"{len(image)} bytes that are not a 64-bit ELF file, expected a cubin"
    fields = ELF_HEADER.unpack_from(image)
    program_at, section_at = fields[5], fields[6]
    program_size, programs, section_size, sections = fields[9:13]
    end = max(program_at + program_size * programs, section_at + section_size * sections)
    if end > len(image):
        return f"a truncated cubin: {len(image)} bytes, its ELF tables end at {end}"
    return ""


class Context:
    """A GPU's primary context, which is current once this is made.

    `subject` is named in errors. Handles (modules, functions, events, graphs) are opaque, a stream
    is a CUstream or its integer. Raises `ToolMissing` without cuda-bindings, `DeviceError` without
    a GPU, `InputError` on a wrong index; any method may raise `CudaError`.
    """

    def __init__(self, index: int = 0, subject: str = "") -> None:
        self._driver = import_binding("driver")
        self._subject = subject
        self.index = index
        self._handle = _open(self._driver, index)
        self._context = self._call("cuDevicePrimaryCtxRetain", self._handle)
        self._call("cuCtxSetCurrent", self._context)
        self._number = int(self._context)

    def _call(self, name: str, *args: Any) -> Any:
        return _check(self._driver, name, getattr(self._driver, name)(*args), self._subject)

    @cached_property
    def _changes(self) -> tuple[Callable[..., None], ...]:
        """What asks for the context of a thread, exchanges it and gives back what was there."""
        return tuple(self.direct(f"cuCtx{what}Current") for what in ("Get", "Push", "Pop"))

    @property
    def current(self) -> bool:
        """Whether this is the context of the calling thread."""
        here = ctypes.c_uint64()
        self._changes[0](ctypes.addressof(here))
        return here.value == self._number

    def enter(self) -> bool:
        """Make this the context of the calling thread; whether it was not, for `leave` to undo."""
        if self.current:
            return False
        self._changes[1](self._number)
        return True

    def leave(self) -> None:
        """Give a thread back the context that it had, or none."""
        here = ctypes.c_uint64()
        self._changes[2](ctypes.addressof(here))

    @contextlib.contextmanager
    def entered(self) -> Generator[None]:
        """This context in a thread that has none or another, which it gets back."""
        self._changes[1](self._number)
        try:
            yield
        finally:
            self.leave()

    def attribute(self, name: str) -> int:
        """A device attribute by its name in the driver's API, without the prefix."""
        return _attribute(self._driver, self._handle, name)

    def load(self, image: bytes) -> Module:
        """Load a cubin into the context.

        The driver takes no length and would read past a truncated file, so the ELF header is
        checked against it first; a bad one is refused as the driver refuses a bad image.
        """
        if trouble := _elf_trouble(image):
            raise CudaError("cuModuleLoadData", "CUDA_ERROR_INVALID_IMAGE", trouble)
        buffer = ctypes.create_string_buffer(image, len(image) + 1)
        return Module(self._call("cuModuleLoadData", ctypes.addressof(buffer)), buffer)

    def unload(self, module: Module) -> None:
        """Unload a cubin; its functions become invalid."""
        self._call("cuModuleUnload", module.handle)

    def function(
        self, module: Module, name: str, shared_bytes: int = 0, cluster_blocks: int = 1
    ) -> Any:
        """A kernel by name, its limits raised to the shared memory and cluster asked for.

        What needs no permit is the same on every architecture that has it.
        """
        found = self._call("cuModuleGetFunction", module.handle, name.encode())
        attributes = self._driver.CUfunction_attribute
        if shared_bytes > largest("smem.per_block_default"):
            limit = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._call("cuFuncSetAttribute", found, limit, shared_bytes)
        if cluster_blocks > largest("cluster.size_portable"):
            permit = attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            self._call("cuFuncSetAttribute", found, permit, 1)
        return found

    def global_memory(self, module: Module, name: str) -> tuple[int, int]:
        """Address and bytes of a `__device__` variable of a cubin."""
        address, size = self._call("cuModuleGetGlobal", module.handle, name.encode())
        return int(address), int(size)

    def resident_blocks(self, function: Any, shape: Shape) -> int:
        """Blocks of a kernel that the GPU holds at a time; of a cluster, those of whole ones."""
        blocks = math.prod(shape.cluster)
        if blocks > 1:
            config = self.config(replace(shape, grid=shape.cluster), 0)
            return blocks * int(self._call("cuOccupancyMaxActiveClusters", function, config))
        threads, shared = math.prod(shape.block), shape.shared_bytes
        count = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
        return self.attribute("MULTIPROCESSOR_COUNT") * int(
            self._call(count, function, threads, shared)
        )

    def allocate(self, nbytes: int) -> int:
        """Device memory from `cuMemAlloc` (512-byte aligned or better)."""
        return int(self._call("cuMemAlloc", nbytes))

    def zeros(self, nbytes: int) -> int:
        """Device memory that is all 0, in 32-bit words, once this returns."""
        address = self.allocate(nbytes)
        self._call("cuMemsetD32", address, 0, nbytes // 4)
        self._call("cuCtxSynchronize")
        return address

    def free(self, address: int) -> None:
        """Give memory back."""
        self._call("cuMemFree", address)

    def launch_on(self, stream: Any, function: Any, shape: Shape, params: Params) -> None:
        """Queue a kernel on a stream; clusters and dependent launches go by `cuLaunchKernelEx`."""
        if shape.cluster == (1, 1, 1) and not shape.dependent:
            self._call(
                "cuLaunchKernel", function, *shape.grid, *shape.block, shape.shared_bytes,
                stream, params.address, 0,
            )  # fmt: skip
            return
        self._call("cuLaunchKernelEx", self.config(shape, stream), function, params.address, 0)

    def direct(self, name: str) -> Callable[..., None]:
        """A call of `DIRECT` on integers, by its address in the driver: cuda-bindings makes an
        object of every handle and result, which takes longer than such a call."""
        driver, subject = self._driver, self._subject
        function = _direct(driver, name)

        def call(*args: int) -> None:
            if status := function(*args):
                _check(driver, name, (driver.CUresult(status),), subject)

        return call

    def config(self, shape: Shape, stream: Any) -> Any:
        """The driver's description of a launch of that shape on a stream."""
        driver = self._driver
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = shape.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = shape.block
        config.sharedMemBytes = shape.shared_bytes
        config.hStream = stream
        attributes: list[Any] = []
        known = driver.CUlaunchAttributeID
        if shape.cluster != (1, 1, 1):
            cluster = driver.CUlaunchAttribute()
            cluster.id = known.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            dims = cluster.value.clusterDim
            dims.x, dims.y, dims.z = shape.cluster
            attributes.append(cluster)
        if shape.dependent:
            overlap = driver.CUlaunchAttribute()
            overlap.id = known.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            overlap.value.programmaticStreamSerializationAllowed = 1
            attributes.append(overlap)
        config.attrs = attributes
        config.numAttrs = len(attributes)
        return config

    def wait_for(self, producer: Any, stream: Any) -> None:
        """Order `stream` after what is queued on the producer's, on the device: no host waits."""
        event = self._call("cuEventCreate", self._driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        self._call("cuEventRecord", event, producer)
        self._call("cuStreamWaitEvent", stream, event, 0)
        self._call("cuEventDestroy", event)

    def tensor_map(self, spec: TensorMap, kind: str, address: int) -> bytes:
        """The 128 bytes of a tiled TMA descriptor of elements of that type."""
        driver = self._driver
        rank = len(spec.dims)
        element = dtype(kind, MEMORY)
        types = driver.CUtensorMapDataType
        plain = f"CU_TENSOR_MAP_DATA_TYPE_UINT{element.bits}"  # for what the hardware only copies
        named = f"CU_TENSOR_MAP_DATA_TYPE_{element.library.upper()}"
        swizzle = "NONE" if spec.swizzle == 0 else f"{spec.swizzle}B"
        fill = "NONE" if spec.fill == "zero" else "NAN_REQUEST_ZERO_FMA"
        promotion = f"L2_{spec.promotion}B" if spec.promotion else "NONE"
        encoded = self._call(
            "cuTensorMapEncodeTiled",
            getattr(types, named if hasattr(types, named) else plain),
            rank,
            address,
            [driver.cuuint64_t(extent) for extent in spec.dims],
            [driver.cuuint64_t(stride) for stride in spec.strides],
            [driver.cuuint32_t(extent) for extent in spec.box],
            [driver.cuuint32_t(1)] * rank,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{swizzle}"),
            getattr(driver.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_{promotion}"),
            getattr(driver.CUtensorMapFloatOOBfill, f"CU_TENSOR_MAP_FLOAT_OOB_FILL_{fill}"),
        )
        return ctypes.string_at(int(encoded.getPtr()), 128)


class CudaDevice(Context):
    """A GPU with one stream: copies, events and launches are queued on it in order.

    Only `upload`, `download`, `synchronize` and `elapsed_us` wait for it.
    """

    def __init__(self, index: int = 0) -> None:
        # A bad image must fail when it is loaded, not inside a later launch.
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
        super().__init__(index)
        self.info = _info(self._driver, index)
        flags = self._driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        self._stream = self._call("cuStreamCreate", int(flags))

    @property
    def stream(self) -> int:
        """The stream that copies, events and captures of this device are on, as a CUstream."""
        return int(self._stream)

    def upload(self, address: int, data: bytes) -> None:
        """Copy host bytes to the device and wait for the copy."""
        buffer = ctypes.create_string_buffer(data, len(data))
        source = ctypes.addressof(buffer)
        self._call("cuMemcpyHtoDAsync", address, source, len(data), self._stream)
        self.synchronize()

    def download(self, address: int, nbytes: int) -> bytes:
        """Wait for the stream and copy device bytes to the host."""
        buffer = ctypes.create_string_buffer(nbytes)
        target = ctypes.addressof(buffer)
        self._call("cuMemcpyDtoHAsync", target, address, nbytes, self._stream)
        self.synchronize()
        return buffer.raw

    def memset(self, address: int, byte: int, nbytes: int) -> None:
        """Queue a fill; by 32-bit words where the size allows."""
        if nbytes % 4 or address % 4:
            self._call("cuMemsetD8Async", address, byte, nbytes, self._stream)
        else:
            word = byte * 0x01010101
            self._call("cuMemsetD32Async", address, word, nbytes // 4, self._stream)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Queue a device-to-device copy."""
        self._call("cuMemcpyDtoDAsync", target, source, nbytes, self._stream)

    def launch(self, function: Any, shape: Shape, params: Params) -> None:
        """Queue a kernel."""
        self.launch_on(self._stream, function, shape, params)

    def event(self) -> Any:
        """A timing event."""
        return self._call("cuEventCreate", int(self._driver.CUevent_flags.CU_EVENT_DEFAULT))

    def record(self, event: Any) -> None:
        """Queue recording the time."""
        self._call("cuEventRecord", event, self._stream)

    def is_done(self, event: Any) -> bool:
        """Whether an event has been reached. Anything but 'done' and 'not yet' raises."""
        status = self._driver.cuEventQuery(event)
        if status[0] == self._driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        _check(self._driver, "cuEventQuery", status)
        return True

    def elapsed_us(self, start: Any, stop: Any) -> float:
        """Microseconds between two completed events."""
        return float(self._call("cuEventElapsedTime", start, stop)) * 1000

    def synchronize(self) -> None:
        """Wait for the stream; a kernel's fault is reported here."""
        self._call("cuStreamSynchronize", self._stream)

    def capture(self, work: Callable[[], None]) -> Graph:
        """Capture what `work` queues and instantiate it."""
        driver = self._driver
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._call("cuStreamBeginCapture", self._stream, mode)
        try:
            work()
        finally:
            graph = self._call("cuStreamEndCapture", self._stream)
        return Graph(graph, self._call("cuGraphInstantiate", graph, 0))

    def replay(self, graph: Graph) -> None:
        """Queue a captured graph."""
        self._call("cuGraphLaunch", graph.executable, self._stream)

    def release_graph(self, graph: Graph) -> None:
        """Destroy a captured graph."""
        self._call("cuGraphExecDestroy", graph.executable)
        self._call("cuGraphDestroy", graph.graph)

    def close(self) -> None:
        """Destroy the stream and release the primary context."""
        self._call("cuStreamDestroy", self._stream)
        self._call("cuDevicePrimaryCtxRelease", self._handle)
