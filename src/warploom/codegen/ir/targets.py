"""What a target lacks or has too little of is refused here, before the compiler sees it."""

from __future__ import annotations

from warploom import machine
from warploom.errors import DoesNotFit, InputError
from warploom.tile import Op
from warploom.tile.dtypes import FP8

FP8_FROM = 89  # sm_89 is the first with conversions of fp8 (PTX ISA 9.7.9.21)
BF16_ADD_FROM = 90  # red.add.noftz.bf16 (PTX ISA 9.7.13.6)
ADDED = ("fp32", "fp16", "bf16", "int32")  # element types the GPU adds in memory


def shared_limit(resident: int = 1, arch: str = "sm_90a") -> int:
    """Bytes of shared memory a block may have when so many share an SM of the architecture."""
    gpu = machine.architecture(arch)
    share = gpu.integer("smem.per_sm") // resident - gpu.integer("smem.reserved_per_block")
    return min(share, gpu.integer("smem.per_block_max"))


def check_threads(name: str, threads: int, resident: int, arch: str) -> None:
    """Raise `InputError` when an SM cannot hold so many blocks of so many threads."""
    gpu = machine.architecture(arch)
    block, every = (gpu.integer(f"limits.threads_per_{what}") for what in ("block", "sm"))
    if threads > block or threads * resident > every:
        raise DoesNotFit(
            f"kernel {name}: {resident} blocks of {threads} threads on an SM, {arch} takes "
            f"{block} a block and {every} in all; make the tile smaller or share with fewer"
        )


def check_types(op: Op, arch: str) -> None:
    """Raise `InputError` at the user's line for element types that the target cannot handle."""
    number = int("".join(filter(str.isdigit, arch)))
    kinds = {v.type.dtype.name for v in (*op.srcs, *((op.dst,) if op.dst else ()))}
    converts = op.kind not in ("load", "mma")
    if number < FP8_FROM and converts and kinds & set(FP8):
        raise InputError(
            f"{op.where}: {op.kind} of {'/'.join(sorted(kinds & set(FP8)))}: fp8 "
            f"conversions need sm_{FP8_FROM}, the target is {arch}"
        )
    if op.kind != "store_add" or op.array is None:
        return
    if op.array.dtype.name not in ADDED:
        raise InputError(
            f"{op.where}: store add=True of {op.array.dtype}: the GPU adds fp32, fp16, bf16 and "
            "int32 in memory"
        )
    if number < BF16_ADD_FROM and op.array.dtype.name == "bf16":
        raise InputError(
            f"{op.where}: store add=True of bf16 needs sm_{BF16_ADD_FROM}, the target is "
            f"{arch}; add in fp32"
        )
