"""The vocabulary of a machine: every dotted key, its unit and its meaning, in one table.

A machine file may only use these keys, each in the unit named here, so that a misspelt key or a
bandwidth given in GB/s is refused by name instead of being carried along.

Rates are per SM and per clock and count *dense* work: one fused multiply-add is two FLOP on the
tensor core (`FLOP/clk/SM`) and one operation elsewhere (`op/clk/SM`). Bytes are bytes (not KiB),
times are clocks (`clk`), frequencies MHz, bandwidths B/s.
"""

from __future__ import annotations

from dataclasses import dataclass

TEXT_UNIT = "name"


@dataclass(frozen=True)
class Key:
    """One quantity a machine can have: `unit` is the only unit accepted for it."""

    name: str
    unit: str
    meaning: str

    @property
    def is_text(self) -> bool:
        """True when the value is a word (`sm_90a`), false when it is a number."""
        return self.unit == TEXT_UNIT


_TABLE: tuple[tuple[str, str, str], ...] = (
    # identity
    ("arch.name", TEXT_UNIT, "target to compile for, with its feature suffix (sm_90a)"),
    ("arch.family", TEXT_UNIT, "architecture family (Hopper)"),
    ("arch.compute_capability", TEXT_UNIT, "compute capability as major.minor"),
    # clocks and counts
    ("sm.count", "SM", "streaming multiprocessors enabled"),
    ("clock.boost", "MHz", "highest SM clock"),
    ("clock.base", "MHz", "guaranteed SM clock"),
    ("clock.tensor", "MHz", "SM clock at which the datasheet states its tensor-core peaks"),
    ("launch.gap", "us", "one launch to the next in a graph, of kernels that do nothing"),
    ("power.limit", "W", "board power limit"),
    ("power.burst", "W", "power at which the clock is held in the first milliseconds of a load"),
    ("power.static", "W", "board power while every SM sleeps"),
    # tensor core, dense
    ("tensor.fp64", "FLOP/clk/SM", "tensor core, fp64 operands"),
    ("tensor.tf32", "FLOP/clk/SM", "tensor core, tf32 operands, fp32 accumulation"),
    ("tensor.fp16", "FLOP/clk/SM", "tensor core, fp16 operands"),
    ("tensor.bf16", "FLOP/clk/SM", "tensor core, bf16 operands, fp32 accumulation"),
    ("tensor.fp8", "FLOP/clk/SM", "tensor core, e4m3 or e5m2 operands"),
    ("tensor.int8", "FLOP/clk/SM", "tensor core, int8 operands, int32 accumulation"),
    ("tensor.fp4", "FLOP/clk/SM", "tensor core, block-scaled fp4 operands"),
    # ordinary lanes
    ("lanes.fp32", "op/clk/SM", "fp32 add, multiply or fused multiply-add"),
    ("lanes.fp16", "op/clk/SM", "fp16 arithmetic, each half of a half2 counted"),
    ("lanes.bf16", "op/clk/SM", "bf16 arithmetic, each half of a bf162 counted"),
    ("lanes.int32", "op/clk/SM", "32-bit integer add, compare, shift, logic"),
    ("lanes.fp64", "op/clk/SM", "fp64 add, multiply or fused multiply-add, not tensor core"),
    ("mufu.rate", "op/clk/SM", "special functions: ex2, lg2, rcp, rsq, sin, cos, tanh"),
    ("convert.xu", "op/clk/SM", "conversions on the special-function pipe (F2F, F2I, I2F)"),
    ("convert.pack16", "op/clk/SM", "fp32 values narrowed to fp16 or bf16 by packing (F2FP)"),
    ("shuffle.rate", "op/clk/SM", "warp shuffles, lanes served"),
    # issue
    ("issue.schedulers", "1/SM", "sub-partitions, each with its own warp scheduler"),
    ("issue.rate", "warp-instruction/clk/SM", "warp instructions issued by all schedulers"),
    # registers and residency
    ("registers.per_sm", "register", "32-bit registers of one SM"),
    ("registers.per_block_max", "register", "32-bit registers one block may own"),
    ("registers.per_thread_max", "register", "registers one thread may name"),
    ("registers.warp_granularity", "register", "a warp's allocation is rounded up to this"),
    ("setmaxnreg.granularity", "register", "setmaxnreg takes multiples of this"),
    ("setmaxnreg.min", "register", "smallest setmaxnreg value"),
    ("setmaxnreg.max", "register", "largest setmaxnreg value"),
    ("limits.warp_size", "thread", "threads in a warp"),
    ("limits.warps_per_sm", "warp", "resident warps"),
    ("limits.threads_per_sm", "thread", "resident threads"),
    ("limits.blocks_per_sm", "block", "resident blocks"),
    ("limits.threads_per_block", "thread", "threads in a block"),
    ("barrier.named_per_block", "1/block", "hardware barriers bar.sync can name, 0 included"),
    ("barrier.named_latency", "clk", "named barrier, last arrival to release"),
    ("mbarrier.count_max", "1", "largest arrival count of an mbarrier"),
    ("mbarrier.latency", "clk", "mbarrier arrival to a waiter's release, one way"),
    ("cluster.size_portable", "block", "largest cluster every part of the family accepts"),
    ("cluster.size_max", "block", "largest cluster with the non-portable attribute"),
    *(
        (f"cluster.resident_{size}", "cluster", f"clusters of {size} that run, a block an SM")
        for size in range(2, 9)
    ),
    # memory levels, nearest first
    ("smem.per_sm", "B", "shared memory of one SM, reserved part included"),
    ("smem.per_block_max", "B", "shared memory one block may ask for (opt-in)"),
    ("smem.per_block_default", "B", "shared memory one block gets with no opt-in"),
    ("smem.reserved_per_block", "B", "taken by the system for each resident block"),
    ("smem.banks", "1/SM", "banks, each 4 bytes wide"),
    ("smem.bytes_per_clk", "B/clk/SM", "shared-memory read or write width"),
    ("smem.latency", "clk", "32-bit shared-memory load to use"),
    ("l1.size", "B", "combined L1 cache and shared memory of one SM"),
    ("l1.latency", "clk", "global load that hits L1, load to use"),
    ("tmem.columns", "column", "tensor-memory columns of one SM, 32 bits by 128 lanes each"),
    ("tmem.lanes", "lane", "tensor-memory lanes"),
    ("tmem.size", "B", "tensor memory of one SM"),
    ("tmem.allocation_min", "column", "smallest tensor-memory allocation; powers of two from it"),
    ("l2.size", "B", "L2 cache, whole device"),
    ("l2.latency", "clk", "global load that hits L2, load to use"),
    ("l2.bytes_per_clk", "B/clk", "L2 read width, whole device"),
    ("l2.bandwidth", "B/s", "L2 to SM bandwidth, whole device"),
    ("l2.partitions", "1", "parts of L2; data all SMs read is kept in each"),
    ("l2.dirty_max", "B", "written data that waits in L2 before it goes to device memory"),
    ("dram.size", "B", "device memory"),
    ("dram.latency", "clk", "global load that misses L2, load to use"),
    ("dram.bandwidth", "B/s", "device-memory bandwidth by the datasheet"),
    ("dram.copy_bandwidth", "B/s", "measured large copy, bytes read plus bytes written"),
    # energy to move data and to compute, at the highest clock
    ("energy.dram", "pJ/B", "device memory to the chip"),
    ("energy.l2", "pJ/B", "L2 to an SM"),
    ("energy.smem", "pJ/B", "shared memory to registers"),
    ("energy.copy", "pJ/B", "L2 to an SM, of bytes that several SMs ask for at a time"),
    ("energy.store", "pJ/B", "bulk store from an SM to L2"),
    ("energy.operands", "pJ/B", "shared memory to the tensor cores"),
    ("energy.matmul", "pJ/clk", "tensor cores of one SM at full rate, operands not counted"),
    ("energy.instruction", "pJ/warp-instruction", "arithmetic of 32 lanes"),
    ("energy.exponent", "1", "energy on the chip goes with (clock / boost) to this power"),
    # bulk copies
    ("tma.rank_max", "1", "dimensions of a tensor map"),
    ("tma.box_dim_max", "element", "largest box extent in each dimension"),
    ("tma.box_row_alignment", "B", "the box's innermost row is a multiple of this"),
    ("tma.address_alignment", "B", "alignment of the global address"),
    ("tma.stride_alignment", "B", "alignment of the global strides"),
    ("tma.smem_alignment", "B", "alignment of the shared-memory destination"),
    ("tma.swizzle_repeat", "B", "span of the 128-byte swizzle; align tile bases to it"),
    ("tma.descriptor_size", "B", "size of a tensor map"),
    ("tma.descriptor_alignment", "B", "alignment of a tensor map"),
    ("tma.load_latency", "clk", "bulk tensor load of a small box, issue to data visible"),
    ("tma.load_clk_per_kib", "clk/KiB", "engine time a bulk load takes per KiB"),
    ("tma.store_latency", "clk", "bulk tensor store of a small box"),
    ("tma.store_clk_per_kib", "clk/KiB", "engine time a bulk store takes per KiB"),
    # what the vendor prints, dense; the tests hold these against rate * SMs * clock
    ("peak.tensor_fp64", "TFLOP/s", "datasheet peak, tensor core fp64"),
    ("peak.tensor_tf32", "TFLOP/s", "datasheet peak, tensor core tf32, dense"),
    ("peak.tensor_fp16", "TFLOP/s", "datasheet peak, tensor core fp16, dense"),
    ("peak.tensor_bf16", "TFLOP/s", "datasheet peak, tensor core bf16, dense"),
    ("peak.tensor_fp8", "TFLOP/s", "datasheet peak, tensor core fp8, dense"),
    ("peak.tensor_int8", "TFLOP/s", "datasheet peak, tensor core int8, dense (TOP/s)"),
    ("peak.tensor_fp4", "TFLOP/s", "datasheet peak, tensor core fp4, dense"),
    ("peak.fp32", "TFLOP/s", "datasheet peak, fp32 lanes"),
    ("peak.fp64", "TFLOP/s", "datasheet peak, fp64 lanes"),
)

KEYS: dict[str, Key] = {name: Key(name, unit, meaning) for name, unit, meaning in _TABLE}

KINDS: dict[str, str] = {
    "datasheet": "printed by the vendor for this product",
    "whitepaper": "the vendor's architecture paper",
    "documentation": "the vendor's programming guide or instruction-set manual",
    "measured": "measured by this project on the device the source names",
    "microbenchmark": "measured by others; the source names them",
    "derived": "arithmetic from sourced numbers; the source shows it",
    "model": "used in a published cost model, no measurement behind it: replace by an overlay",
}
