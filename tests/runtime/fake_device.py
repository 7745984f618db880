"""A GPU made of numpy: same protocol, memory in bytearrays, a virtual clock, planted behaviour.

Its "cubins" are JSON: {"behave": ..., "us": ...}; "cold_us" is the time when so much was written
since the last kernel that the L2 cache holds none of its data. The right kernel writes y = x ^ 0x3C
byte by byte; the other behaviours are the faults the runtime must survive or find. Helper kernels
are the real ones' meaning, from the same parameters.
"""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from warploom.errors import DeviceError
from warploom.runtime.device import CudaError, DeviceInfo, Shape
from warploom.runtime.launch import Buffer, LaunchSpec, Params, Pointer, Scalar, TensorMap
from warploom.runtime.patterns import PATTERNS, generate, scales
from warploom.runtime.workbench import Workload
from warploom.tile.dtypes import MEMORY

KERNEL = "flip"
INFO = DeviceInfo(
    index=0,
    name="Fake",
    compute_capability=(9, 0),
    sm_count=4,
    clock_mhz=1000.0,
    l2_bytes=1 << 16,
    memory_bytes=1 << 30,
    shared_optin_bytes=232448,
    cuda_version="13.0",
    driver_version="580.0",
)


def image(behave: str = "right", us: float = 20.0, **more: Any) -> bytes:
    """A fake cubin."""
    return json.dumps({"behave": behave, "us": us, **more}).encode()


def spec(count: int = 1000, dtype: str = "bf16", role: str = "out") -> LaunchSpec:
    """A launch of the fake kernel on `count` elements."""
    buffers = (Buffer("x", (10, count // 10), dtype, "in"), Buffer("y", (count,), dtype, role))
    nbytes = buffers[0].nbytes
    arguments = (Pointer("x"), Pointer("y"), Scalar("i32", nbytes))
    return LaunchSpec(KERNEL, (4, 1, 1), (128, 1, 1), buffers, arguments)


def workload(**kwargs: Any) -> Workload:
    """The right fake cubin and its launch."""
    return Workload(image(), spec(**kwargs))


def refused(call: str, name: str) -> CudaError:
    """A call the driver refuses, which leaves the context usable."""
    return CudaError(call, name, "planted")


class FakeDevice:
    """Implements `warploom.runtime.device.Device`."""

    def __init__(self, index: int = 0, *, noise: float = 0.0, late_spins: int = 0) -> None:
        self.info = INFO
        self.noise = noise
        self.late_spins = late_spins
        self.now_us = 0.0
        self.spins: list[int] = []
        self.launched: list[str] = []
        self._rng = np.random.default_rng(index)
        self._memory: dict[int, bytearray] = {}
        self._next = 1 << 20
        self._recording: list[Callable[[], None]] | None = None
        self._written = 0  # bytes set since the last kernel

    def load(self, image: bytes) -> Any:
        if image[:4] == b"\x7fELF":
            return {"behave": "helper"}
        try:
            module = json.loads(image)
        except ValueError:
            raise CudaError("cuModuleLoadData", "CUDA_ERROR_INVALID_IMAGE", "no") from None
        return {**module, "launches": 0}

    def unload(self, module: Any) -> None:
        module["behave"] = "unloaded"

    def function(
        self, module: Any, name: str, shared_bytes: int = 0, cluster_blocks: int = 1
    ) -> Any:
        if module["behave"] != "helper" and name != KERNEL:
            raise refused("cuModuleGetFunction", "CUDA_ERROR_NOT_FOUND")
        return (module, name)

    def allocate(self, nbytes: int) -> int:
        address, self._next = self._next, self._next + -(-nbytes // 4096) * 4096 + 4096
        self._memory[address] = bytearray(nbytes)
        return address

    def free(self, address: int) -> None:
        del self._memory[address]

    def upload(self, address: int, data: bytes) -> None:
        self._view(address, len(data))[:] = data

    def download(self, address: int, nbytes: int) -> bytes:
        return bytes(self._view(address, nbytes))

    def memset(self, address: int, byte: int, nbytes: int) -> None:
        def work() -> None:
            self._view(address, nbytes)[:] = bytes([byte]) * nbytes
            self._written += nbytes

        self._queue(work)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        def work() -> None:
            self._view(target, nbytes)[:] = self._view(source, nbytes)

        self._queue(work)

    def launch(self, function: Any, shape: Shape, params: Params) -> None:
        module, name = function
        slots = params.slots
        if module["behave"] == "helper":
            self._queue(lambda: getattr(self, f"_{name}")(slots))
        else:
            self._queue(lambda: self._kernel(module, slots))

    def event(self) -> Any:
        return [0.0]

    def record(self, event: Any) -> None:
        event[0] = self.now_us

    def is_done(self, event: Any) -> bool:
        self.late_spins -= 1
        return self.late_spins >= 0

    def elapsed_us(self, start: Any, stop: Any) -> float:
        return stop[0] - start[0]

    def synchronize(self) -> None:
        pass

    def capture(self, work: Callable[[], None]) -> Any:
        self._recording = []
        work()
        recorded, self._recording = self._recording, None
        return recorded

    def replay(self, graph: Any) -> None:
        for work in graph:
            work()

    def release_graph(self, graph: Any) -> None:
        graph.clear()

    def tensor_map(self, spec: TensorMap, dtype: str, address: int) -> bytes:
        return address.to_bytes(8, "little") * 16

    def close(self) -> None:
        self._memory.clear()

    def _queue(self, work: Callable[[], None]) -> None:
        if self._recording is None:
            work()
        else:
            self._recording.append(work)

    def _view(self, address: int, nbytes: int) -> memoryview:
        for base, block in self._memory.items():
            if base <= address and address + nbytes <= base + len(block):
                return memoryview(block)[address - base : address - base + nbytes]
        raise CudaError("cuStreamSynchronize", "CUDA_ERROR_ILLEGAL_ADDRESS", hex(address))

    def _kernel(self, module: dict[str, Any], slots: tuple[bytes, ...]) -> None:
        x, y = (int.from_bytes(slot, "little") for slot in slots[:2])
        nbytes = int.from_bytes(slots[2], "little")
        module["launches"] += 1
        self.launched.append(module["behave"])
        cold, self._written = self._written >= 2 * self.info.l2_bytes, 0
        micros = module.get("cold_us", module["us"]) if cold else module["us"]
        self.now_us += micros * (1 + self.noise * self._rng.standard_normal())
        right = np.frombuffer(self._view(x, nbytes), np.uint8) ^ 0x3C
        target = self._view(y, nbytes)
        match module["behave"]:
            case "hang":
                time.sleep(3600)
            case "crash":
                os._exit(9)
            case "fault":
                self._view(0, 4)
            case "zero":
                target[:] = bytes(nbytes)
            case "unwritten":
                target[: nbytes // 2] = right[: nbytes // 2].tobytes()
            case "wrong":
                target[:] = right.tobytes()
                target[module.get("at", 10)] ^= 1
            case "wrong later":
                target[:] = right.tobytes()
                target[0] ^= int(module["launches"] > module["after"])
            case "wrong cold":
                target[:] = right.tobytes()
                target[0] ^= int(module["launches"] == 1)
            case "wrong from memory":
                target[:] = right.tobytes()
                target[0] ^= int(cold)
            case "wild":
                target[:] = right.tobytes()
                self._view(y + nbytes, 1)[0] = 7
            case "input":
                target[:] = right.tobytes()
                self._view(x, 1)[0] ^= 1
            case "random":
                target[:] = self._rng.bytes(nbytes)
            case "constant zero":
                target[:] = bytes(nbytes)
            case "adds":
                target[:] = (np.frombuffer(target, np.uint8) + right).tobytes()
            case _:
                target[:] = right.tobytes()

    def _fill_elements(self, slots: tuple[bytes, ...]) -> None:
        form = "<QQIIIIffQqQQQQIQ"
        parts = [
            struct.unpack("<" + kind, slot)[0] for kind, slot in zip(form[1:], slots, strict=True)
        ]
        to, count, size, exponent, mantissa, has_inf, large, small = parts[:8]
        inner, low, span, seed, salt, packed, patterns, sample_at = parts[8:]
        (sample,) = struct.unpack("<Q", self.download(sample_at, 8))
        code = (packed >> (4 * (sample % patterns))) & 15
        pattern = next(name for name, entry in PATTERNS.items() if entry.code == code)
        dtype = next(
            entry
            for entry in MEMORY.values()
            if (entry.bytes, entry.exponent, entry.mantissa) == (size, exponent, mantissa)
        )
        assert (has_inf, large, small) == (dtype.has_infinity, *scales(dtype))
        bits = generate(dtype, count, pattern, seed + sample, salt, inner, (low, low + span))
        self.upload(to, bits.tobytes())

    def _compare_words(self, slots: tuple[bytes, ...]) -> None:
        first, second, quads, result, sample_at = (int.from_bytes(s, "little") for s in slots)
        a = np.frombuffer(self._view(first, 16 * quads), np.uint32)
        b = np.frombuffer(self._view(second, 16 * quads), np.uint32)
        different = np.flatnonzero(a != b)
        if different.size:
            words, lowest, at = struct.unpack("<QQQ", self.download(result, 24))
            (sample,) = struct.unpack("<Q", self.download(sample_at, 8))
            new = (words + different.size, min(lowest, int(different[0])), min(at, sample))
            self.upload(result, struct.pack("<QQQ", *new))

    def _advance(self, slots: tuple[bytes, ...]) -> None:
        at = int.from_bytes(slots[0], "little")
        (sample,) = struct.unpack("<Q", self.download(at, 8))
        self.upload(at, struct.pack("<Q", sample + 1))

    def _spin(self, slots: tuple[bytes, ...]) -> None:
        cycles, spent = (int.from_bytes(slot, "little") for slot in slots)
        self.spins.append(cycles)
        self.now_us += cycles / self.info.clock_mhz
        self.upload(spent, struct.pack("<Q", cycles))


def open_fake(index: int) -> FakeDevice:
    """A device factory a worker process can import."""
    return FakeDevice(index, noise=0.005)


def open_broken(index: int) -> FakeDevice:
    """A device that cannot be opened."""
    raise DeviceError(f"no GPU {index} here")


def open_and_die(index: int) -> FakeDevice:
    """A device whose process dies while opening it."""
    os._exit(7)
