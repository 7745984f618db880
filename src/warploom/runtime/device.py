"""What the runtime needs of a GPU, as a protocol: the driver implements it, tests fake it.

Work is queued on one stream in order; only `download`, `synchronize` and `elapsed_us` wait for it.
Handles (modules, functions, events, graphs) are opaque. Any method may raise `CudaError`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from warploom.errors import DeviceError
from warploom.runtime.launch import Dim3, Params, TensorMap


class CudaError(DeviceError):
    """A driver call failed: which `call`, and the `name` of the CUDA error, for programs.

    `fatal` means the context is lost: the process must be replaced.
    """

    def __init__(self, call: str, name: str, detail: str, *, fatal: bool) -> None:
        super().__init__(f"{call} failed: {name} ({detail})")
        self.call = call
        self.name = name
        self.detail = detail
        self.fatal = fatal

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.call, self.name, self.detail, self.fatal)


def _rebuild(call: str, name: str, detail: str, fatal: bool) -> CudaError:
    return CudaError(call, name, detail, fatal=fatal)


@dataclass(frozen=True)
class DeviceInfo:
    """One GPU as the driver reports it. Sizes in bytes, clock in MHz."""

    index: int
    name: str
    compute_capability: tuple[int, int]
    sm_count: int
    clock_mhz: float
    l2_bytes: int
    memory_bytes: int
    shared_optin_bytes: int
    cuda_version: str
    driver_version: str

    @property
    def arch(self) -> str:
        """The plain architecture of the device, such as 'sm_90'."""
        major, minor = self.compute_capability
        return f"sm_{major}{minor}"

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        return asdict(self)


@dataclass(frozen=True)
class Shape:
    """The shape of a launch: extents (x, y, z) and dynamic shared memory in bytes."""

    grid: Dim3
    block: Dim3
    shared_bytes: int = 0
    cluster: Dim3 = (1, 1, 1)


class Device(Protocol):
    """One GPU with one stream."""

    @property
    def info(self) -> DeviceInfo:
        """What the driver says about the GPU."""
        ...

    def load(self, image: bytes) -> Any:
        """Load a cubin; returns a module."""
        ...

    def unload(self, module: Any) -> None:
        """Unload a module; its functions become invalid."""
        ...

    def function(
        self, module: Any, name: str, shared_bytes: int = 0, cluster_blocks: int = 1
    ) -> Any:
        """A kernel of a module, allowed this much dynamic shared memory and this large clusters."""
        ...

    def allocate(self, nbytes: int) -> int:
        """Device memory, at least 256-byte aligned; returns its address."""
        ...

    def free(self, address: int) -> None:
        """Give memory back."""
        ...

    def upload(self, address: int, data: bytes) -> None:
        """Copy host bytes to the device, in stream order; the bytes may be reused on return."""
        ...

    def download(self, address: int, nbytes: int) -> bytes:
        """Wait for the stream and copy device bytes to the host."""
        ...

    def memset(self, address: int, byte: int, nbytes: int) -> None:
        """Queue setting `nbytes` to `byte`."""
        ...

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Queue a device-to-device copy."""
        ...

    def launch(self, function: Any, shape: Shape, params: Params) -> None:
        """Queue a kernel."""
        ...

    def event(self) -> Any:
        """A new timing event."""
        ...

    def record(self, event: Any) -> None:
        """Queue recording the time."""
        ...

    def is_done(self, event: Any) -> bool:
        """Whether a recorded event has been reached; does not wait."""
        ...

    def elapsed_us(self, start: Any, stop: Any) -> float:
        """Microseconds between two recorded events, both complete."""
        ...

    def synchronize(self) -> None:
        """Wait for everything queued; kernel faults surface here."""
        ...

    def capture(self, work: Callable[[], None]) -> Any:
        """Record what `work` queues into a graph instead of running it."""
        ...

    def replay(self, graph: Any) -> None:
        """Queue a captured graph."""
        ...

    def release_graph(self, graph: Any) -> None:
        """Give a graph back."""
        ...

    def tensor_map(self, spec: TensorMap, dtype: str, address: int) -> bytes:
        """Encode a TMA descriptor."""
        ...

    def close(self) -> None:
        """Release the context."""
        ...
