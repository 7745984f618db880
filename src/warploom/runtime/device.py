"""What is said of a GPU and of a launch on it, as data, and the error of a driver call."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from warploom.errors import DeviceError
from warploom.runtime.launch import Dim3


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
    """The shape of a launch: extents (x, y, z) and dynamic shared memory in bytes.

    `cluster` is the driver's to set, where the kernel's code does not; `dependent`: the launch may
    begin before the one queued before it has ended.
    """

    grid: Dim3
    block: Dim3
    shared_bytes: int = 0
    cluster: Dim3 = (1, 1, 1)
    dependent: bool = False
