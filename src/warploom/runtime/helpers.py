"""Our small kernels (`helpers.cu`) on one device: fill with a pattern, compare bitwise, spin."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from warploom.runtime.device import Shape
from warploom.runtime.driver import CudaDevice
from warploom.runtime.launch import Buffer, Params
from warploom.runtime.nvrtc import compile_source
from warploom.runtime.patterns import PATTERNS, check_patterns, scales
from warploom.tile.dtypes import MEMORY, dtype

SOURCE = files("warploom.runtime").joinpath("helpers.cu").read_text()
FUNCTIONS = ("fill_elements", "compare_words", "advance", "spin")
THREADS = 256
NOWHERE = (1 << 64) - 1


@dataclass(frozen=True)
class Difference:
    """What a comparison found: 32-bit words that differ, the lowest one, the lowest sample."""

    words: int
    first_word: int
    first_sample: int


def _u32(value: int) -> bytes:
    return bytes(ctypes.c_uint32(value))


def _u64(value: int) -> bytes:
    return bytes(ctypes.c_uint64(value))


def pack_patterns(names: Sequence[str]) -> int:
    """Pattern codes as 4-bit digits: sample n takes digit n modulo the number of patterns."""
    return sum(PATTERNS[name].code << (4 * place) for place, name in enumerate(names))


class Helpers:
    """The helper kernels loaded on `device`, with the device words they share.

    `cubin` saves the compilation when it was made before (a restarted worker); `cubin` of an
    instance is what to pass. Raises `ToolMissing` when NVRTC is absent.
    """

    def __init__(self, device: CudaDevice, cubin: bytes = b"") -> None:
        self.device = device
        self.cubin = cubin or compile_source(SOURCE, device.info.arch)
        module = device.load(self.cubin)
        self._functions = {name: device.function(module, name) for name in FUNCTIONS}
        words = device.allocate(64)
        self.sample_address = words
        self.result_address = words + 8
        self.spent_address = words + 32
        self.reset()

    def reset(self, sample: int = 0) -> None:
        """Set the sample counter and clear the comparison result."""
        self.device.upload(self.sample_address, _u64(sample) + _u64(0) + 2 * _u64(NOWHERE))

    def result(self) -> Difference:
        """What the comparisons since the last `reset` found; waits for the stream."""
        raw = self.device.download(self.result_address, 24)
        words, first, sample = (int.from_bytes(raw[at : at + 8], "little") for at in (0, 8, 16))
        return Difference(words, first, sample)

    def fill(
        self, address: int, buffer: Buffer, seed: int, salt: int, patterns: Sequence[str]
    ) -> None:
        """Queue filling a buffer; the pattern and the seed advance with the sample counter."""
        check_patterns(tuple(patterns))
        kind = dtype(buffer.dtype, MEMORY)
        large, small = scales(kind)
        inner = buffer.shape[-1] if buffer.shape else 1
        params = Params(
            [
                _u64(address),
                _u64(buffer.count),
                _u32(kind.bytes),
                _u32(kind.exponent),
                _u32(kind.mantissa),
                _u32(int(kind.has_infinity)),
                bytes(ctypes.c_float(large)),
                bytes(ctypes.c_float(small)),
                _u64(inner),
                bytes(ctypes.c_int64(buffer.low)),
                _u64(buffer.high - buffer.low),
                _u64(seed),
                _u64(salt),
                _u64(pack_patterns(patterns)),
                _u32(len(patterns)),
                _u64(self.sample_address),
            ]
        )
        self.device.launch(self._functions["fill_elements"], self._spread(buffer.count), params)

    def compare(self, first: int, second: int, nbytes: int) -> None:
        """Queue comparing two 16-byte aligned regions; `nbytes` is a multiple of 16."""
        quads = nbytes // 16
        params = Params(
            [
                _u64(first),
                _u64(second),
                _u64(quads),
                _u64(self.result_address),
                _u64(self.sample_address),
            ]
        )
        self.device.launch(self._functions["compare_words"], self._spread(quads), params)

    def advance(self) -> None:
        """Queue moving the sample counter on by one."""
        one = Shape((1, 1, 1), (1, 1, 1))
        self.device.launch(self._functions["advance"], one, Params([_u64(self.sample_address)]))

    def spin(self, cycles: int) -> None:
        """Queue a kernel that keeps the stream busy for `cycles` SM clocks."""
        one = Shape((1, 1, 1), (1, 1, 1))
        params = Params([_u64(cycles), _u64(self.spent_address)])
        self.device.launch(self._functions["spin"], one, params)

    def clock_mhz(self, cycles: int = 400_000) -> float:
        """The SM clock right now: cycles spent spinning over the time it took."""
        start, stop = self.device.event(), self.device.event()
        self.spin(cycles // 4)
        self.device.record(start)
        self.spin(cycles)
        self.device.record(stop)
        raw = self.device.download(self.spent_address, 8)
        return int.from_bytes(raw, "little") / self.device.elapsed_us(start, stop)

    def _spread(self, items: int) -> Shape:
        """A grid that covers `items`, at most sixteen blocks for each SM."""
        blocks = max(1, min(-(-items // THREADS), 16 * self.device.info.sm_count))
        return Shape((blocks, 1, 1), (THREADS, 1, 1))
