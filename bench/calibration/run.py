"""Run compiled probes on a GPU: clock cycles of each, at one to several warps a scheduler."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from bench.calibration.images import ProbeImage
from warploom.runtime.device import CudaError, Shape
from warploom.runtime.driver import CudaDevice
from warploom.runtime.launch import Params

SCHEDULERS: Final = 4
WARP: Final = 32
ROUNDS: Final = 16
REPEATS: Final = 3
WARPS: Final = (1, 2, 3, 4, 6, 8)
SELF_BYTES: Final = 4 << 20  # words that hold their own address
CHASE_LINE: Final = 128
# Footprints of the pointer chases: inside L1, inside L2, far beyond L2.
FOOTPRINTS: Final = {"chase_l1": 64 << 10, "chase_l2": 8 << 20, "chase_dram": 256 << 20}
CHASE_STEPS: Final = 4096

CONSTANTS: Final = (
    0xBF900000,  # a: -1.125f
    0x3EBD70A4,  # b: 0.37f
    0x00025A31,  # c: low mantissa bits
    0x0003C5A7,  # d
    1,  # one
    0x3201,  # sel: swap the low two bytes
    0xBC80BC80,  # ha: -1.125 twice, fp16
    0x35EC35EC,  # hb: 0.37 twice, fp16
)


@dataclass(frozen=True)
class ProbeResult:
    """Cycles of one expected instruction of a warp, the fastest of some runs.

    `warps` a scheduler (0: one warp on the whole SM); `digest` of all results, to compare variants
    with the probe as compiled.
    """

    name: str
    opcode: str
    stall: int
    usual: int
    stay: bool
    warps: int
    cycles: float
    digest: int

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        return asdict(self)


def run_probes(device: CudaDevice, images: Iterable[ProbeImage]) -> Iterator[list[ProbeResult]]:
    """Run every probe, the results of one at a time; none for a probe the driver refuses.

    Raises `CudaError` when one faults.
    """
    own = device.allocate(SELF_BYTES)
    device.upload(own, struct.pack(f"<{SELF_BYTES // 8}Q", *_own_addresses(own)))
    out = device.allocate(2 * 8 * WARP * SCHEDULERS * max(WARPS))
    starts = {name: _chase(device, size) for name, size in FOOTPRINTS.items()}
    for image in images:
        try:
            module = device.load(image.cubin)
            function = device.function(module, image.kernel, image.shared)
        except CudaError as error:
            if error.fatal:
                raise
            yield []
            continue
        results: list[ProbeResult] = []
        for warps in _warp_counts(image):
            threads = WARP if warps == 0 else WARP * SCHEDULERS * warps
            params = _params(out, own, starts.get(image.name, own), _rounds(image))
            shape = Shape((1, 1, 1), (threads, 1, 1), image.shared)
            results.append(_measure(device, image, function, shape, params, out, warps))
        device.unload(module)
        yield results


def _own_addresses(base: int) -> list[int]:
    """Both words of every 16 bytes hold the address of the first."""
    return [base + place * 8 // 16 * 16 for place in range(SELF_BYTES // 8)]


def _chase(device: CudaDevice, size: int) -> int:
    """A random cycle of pointers, one a cache line; returns where it begins."""
    lines = size // CHASE_LINE
    order = np.random.default_rng(0).permutation(lines)
    base = device.allocate(size)
    data = np.zeros((lines, CHASE_LINE // 8), np.uint64)
    data[order, 0] = base + np.roll(order, -1).astype(np.uint64) * np.uint64(CHASE_LINE)
    device.upload(base, data.tobytes())
    return base


def _rounds(image: ProbeImage) -> int:
    if image.name.startswith("chase_"):
        return CHASE_STEPS // image.per_round
    # Values of the stall variants must stay finite, so that a wrong one shows.
    return 1 if image.name.startswith("pair_") or image.stall else ROUNDS


def _warp_counts(image: ProbeImage) -> tuple[int, ...]:
    if image.opcode == "HGMMA":
        return (1, 2)
    if image.name == "bar_chain":
        return (1, 2, 4)
    if image.name.endswith("_rate"):
        return (1, 2, 4) if not image.stay else WARPS
    return (0,)


def _params(out: int, mem: int, start: int, rounds: int) -> Params:
    values = [bytes(ctypes.c_uint64(out)), bytes(ctypes.c_uint64(mem)), bytes(ctypes.c_int(rounds))]
    values += [bytes(ctypes.c_uint32(value)) for value in CONSTANTS]
    return Params([*values, bytes(ctypes.c_uint64(start))])


def _measure(
    device: CudaDevice,
    image: ProbeImage,
    function: Any,
    shape: Shape,
    params: Params,
    out: int,
    warps: int,
) -> ProbeResult:
    threads = shape.block[0]
    best = float("inf")
    digest = 0
    for _ in range(REPEATS + 1):  # the first fills the instruction cache
        device.launch(function, shape, params)
        raw = struct.unpack(f"<{2 * threads}Q", device.download(out, 16 * threads))
        best = min(best, max(raw[0::2]))
        digest = hash(raw[1::2]) & 0xFFFFFFFFFFFF
    cycles = best / (image.per_round * _rounds(image))
    return ProbeResult(
        image.name, image.opcode, image.stall, image.usual, image.stay, warps, cycles, digest
    )
