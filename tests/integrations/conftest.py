"""A Triton that runs with no GPU: real compiler, real caches, a driver that records launches."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget

from warploom.integrations import triton_swap
from warploom.integrations.deploy import FolderStore, sections


@dataclass
class RecordingDriver:
    """Stands in for Triton's CUDA driver: keeps the cubins that it is asked to load and launch."""

    arch: int = 90
    loaded: list[bytes] = field(default_factory=list)
    launched: list[tuple[Any, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """The helper functions under the name that Triton looks for."""
        self.utils = SimpleNamespace(
            load_binary=self.load_binary,
            unload_module=lambda module: None,
            get_device_properties=lambda device: {"max_shared_mem": 232448},
        )

    def load_binary(self, name: str, cubin: bytes, shared: int, device: int) -> tuple[Any, ...]:
        """(module, function, registers, spills, threads)."""
        self.loaded.append(cubin)
        return len(self.loaded), f"{name}#{len(self.loaded)}", 32, 0, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        """What `CompiledKernel.run` calls for each launch."""
        return lambda *arguments: self.launched.append(arguments)

    def get_current_device(self) -> int:
        """The only device."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The default stream."""
        return 0

    def get_current_target(self) -> Any:
        """The target that kernels are compiled for."""
        return GPUTarget("cuda", self.arch, 32)


class FakeTensor:
    """What Triton's specialisation looks at in a tensor."""

    def __init__(self, dtype: str = "float32", address: int = 4096) -> None:
        """A tensor of that element type at that address."""
        self.dtype = dtype
        self.address = address

    def data_ptr(self) -> int:
        """The address."""
        return self.address


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[RecordingDriver]:
    """A recording driver, an empty Triton cache, and no policy left over."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    config = triton.runtime.driver
    recording = RecordingDriver()
    before = config._active
    config.set_active(recording)
    triton.compiler.compiler.max_shared_mem.cache_clear()
    yield recording
    for item in gc.get_objects():
        if type(item) is triton.compiler.CompiledKernel:
            item.module = None  # its __del__ would ask for a real driver
    config._active = before
    triton_swap.uninstall()


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    """An empty store."""
    (tmp_path / "store").mkdir()
    return FolderStore(tmp_path / "store")


def edited(cubin: bytes) -> bytes:
    """The cubin with one control bit of its last instruction changed: same size, other bytes."""
    _, _, _, size, body = next(item for item in sections(cubin) if item[0].startswith(".text."))
    at = cubin.index(body) + size - 3
    return cubin[:at] + bytes([cubin[at] ^ 0x20]) + cubin[at + 1 :]
