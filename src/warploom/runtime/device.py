"""What is said of a GPU and of a launch on it, as data, and the error of a driver call."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from warploom.errors import DeviceError
from warploom.runtime.launch import Dim3

# Calls whose refusal leaves the context usable: nothing ran.
HARMLESS = {
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuFuncSetAttribute",
    "cuMemAlloc",
    "cuTensorMapEncodeTiled",
    "cuLaunchKernel",
    "cuLaunchKernelEx",
}
# Errors that stick to the context whichever call reports them (CUDA driver API, CUresult).
LOST = {
    "CUDA_ERROR_ILLEGAL_ADDRESS",
    "CUDA_ERROR_ILLEGAL_INSTRUCTION",
    "CUDA_ERROR_INVALID_ADDRESS_SPACE",
    "CUDA_ERROR_INVALID_PC",
    "CUDA_ERROR_MISALIGNED_ADDRESS",
    "CUDA_ERROR_HARDWARE_STACK_ERROR",
    "CUDA_ERROR_LAUNCH_FAILED",
    "CUDA_ERROR_LAUNCH_TIMEOUT",
    "CUDA_ERROR_ASSERT",
    "CUDA_ERROR_ECC_UNCORRECTABLE",
    "CUDA_ERROR_CONTEXT_IS_DESTROYED",
    "CUDA_ERROR_UNKNOWN",
}
ADVICE = {
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "the cubin is for another architecture",
    "CUDA_ERROR_INVALID_IMAGE": "not a cubin this driver can load",
    "CUDA_ERROR_INVALID_SOURCE": "not a cubin this driver can load",
    "CUDA_ERROR_NOT_FOUND": "no kernel of that name in the cubin",
    "CUDA_ERROR_OUT_OF_MEMORY": "device memory is exhausted",
    "CUDA_ERROR_INVALID_VALUE": "a size or address is out of range for this device",
}


class CudaError(DeviceError):
    """A driver call failed: which `call`, and the `name` of the CUDA error, for programs.

    `fatal` means the context is lost: the process must be replaced.
    """

    def __init__(self, call: str, name: str, detail: str) -> None:
        super().__init__(f"{call} failed: {name} ({detail})")
        self.call, self.name, self.detail = call, name, detail
        self.fatal = name in LOST or call not in HARMLESS

    def __reduce__(self) -> tuple[Any, ...]:
        return CudaError, (self.call, self.name, self.detail)


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
