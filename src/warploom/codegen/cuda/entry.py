"""How many threads launch bounds declare, where a block has too few registers when it begins.

A block of 512 threads has 128 registers a thread at entry; setmaxnreg then takes some from the
producers for the groups that compute. ptxas knows that, but refuses any single instruction that
needs more than a thread has at entry (C7602): a wgmma of 256 columns has 128 sums, and 26 registers
must be left beside them. So the launch bounds declare fewer threads, and the finished image is set
to all of them (`entry_image`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from warploom import machine

WARP_GROUP = 128
NAMED_BESIDE = 26  # registers that ptxas wants beside an instruction's sums: 154 for 128
_WGMMA = re.compile(r"wgmma_m64n(\d+)_")


def entry_registers(threads: int, arch: str = "sm_90a", resident: int = 1) -> int:
    """Registers of a thread when `resident` blocks of so many threads begin on an SM."""
    gpu = machine.architecture(arch)
    file = min(gpu.integer("registers.per_block_max"), gpu.integer("registers.per_sm") // resident)
    grain = gpu.integer("registers.warp_granularity") // gpu.integer("limits.warp_size")
    return min(file // threads, gpu.integer("registers.per_thread_max")) // grain * grain


def declared_threads(threads: int, helpers: Iterable[str]) -> int:
    """Threads to declare so that ptxas takes every wgmma among the names of device functions."""
    sums = [int(found[1]) // 2 for name in helpers if (found := _WGMMA.match(name))]
    needed = max(sums, default=0) + NAMED_BESIDE
    while entry_registers(threads) < needed and threads > WARP_GROUP:
        threads -= WARP_GROUP
    return threads


def declaration_lines(threads: int, declared: int) -> list[str]:
    """What the kernel's file says of it."""
    if declared == threads:
        return []
    granted = entry_registers(threads)
    return [
        f"// Blocks have {threads} threads. Its launch bounds declare {declared}: ptxas refuses a "
        "wgmma whose sums",
        f"// leave too few of the {granted} registers that a thread begins with. The image is then",
        f"// set to {threads} threads (warploom.codegen.compile.entry_image).",
    ]
