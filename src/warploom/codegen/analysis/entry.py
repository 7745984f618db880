"""How many threads launch bounds declare, where a block has too few registers when it begins.

A block of 512 threads has 128 registers a thread at entry; setmaxnreg then takes some from the
producers for the groups that compute. ptxas knows that, but refuses any single instruction that
needs more than a thread has at entry (C7602): a wgmma of 256 columns has 128 sums, and 26 registers
must be left beside them. So the launch bounds declare fewer threads, and the finished image is set
to all of them (`compile.entry_image`).
"""

from __future__ import annotations

from warploom import machine
from warploom.codegen.analysis.matmuls import instruction_columns
from warploom.codegen.ir.block import BlockProgram

WARP_GROUP = 128
NAMED_BESIDE = 26  # registers that ptxas wants beside an instruction's sums: 154 for 128


def entry_registers(threads: int, arch: str = "sm_90a", resident: int = 1) -> int:
    """Registers of a thread when `resident` blocks of so many threads begin on an SM."""
    gpu = machine.architecture(arch)
    file = min(gpu.integer("registers.per_block_max"), gpu.integer("registers.per_sm") // resident)
    grain = gpu.integer("registers.warp_granularity") // gpu.integer("limits.warp_size")
    return min(file // threads, gpu.integer("registers.per_thread_max")) // grain * grain


def block_threads(block: BlockProgram) -> int:
    """Threads of a block."""
    each = block.placement.abreast
    return 32 * sum(role.warps * (each if role.computes else 1) for role in block.roles)


def declared_threads(block: BlockProgram) -> int:
    """Threads to declare so that ptxas takes every wgmma of a block program."""
    program = block.placement.program
    products = [op for op in program.ops() if op.kind == "mma"]
    widths = [n for op in products for _, n in instruction_columns(block.placement, op)]
    return threads_for(block_threads(block), max(widths, default=0))


def threads_for(threads: int, columns: int) -> int:
    """The most threads up to `threads` with which ptxas takes a wgmma of so many columns."""
    needed = columns // 2 + NAMED_BESIDE
    while entry_registers(threads) < needed and threads > WARP_GROUP:
        threads -= WARP_GROUP
    return threads
