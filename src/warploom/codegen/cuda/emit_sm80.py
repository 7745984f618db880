"""Emission for GPUs without TMA and wgmma (sm_80 and later): the same block program, other verbs.

    Fill      128 threads start copies of 16 bytes (cp.async) that zero what lies outside
    Publish   the slot's barrier gets an arrival of each thread once its copies are done
    Issue     ldmatrix and mma.sync, which wait by themselves
    Join      nothing

Rings, order, waits and releases are the block program's, so what the simulator checked holds here.
Register tiles have the same layout: the fragments of mma.sync are those of a warp in wgmma.
"""

from __future__ import annotations

from warploom.codegen.analysis.kernel_facts import KernelFacts, kernel_facts
from warploom.codegen.analysis.role_code import RoleCode
from warploom.codegen.cuda.emit import Printer
from warploom.codegen.cuda.emit_roles import StepCode
from warploom.codegen.cuda.emit_steps import Here
from warploom.codegen.cuda.lines import indent
from warploom.codegen.cuda.names import c_name
from warploom.codegen.cuda.prelude import SM80_PRELUDE
from warploom.codegen.cuda.values import Values, c_index
from warploom.codegen.ir.block import BlockProgram
from warploom.codegen.ir.place import ROWS_PER_GROUP, contracted
from warploom.codegen.ir.source import CudaSource
from warploom.codegen.ir.steps import Acquire, Fill, Issue, Join, Publish, Release
from warploom.errors import InputError
from warploom.tile import Op
from warploom.tile.ops import TAKEN_OFF

LOADER_THREADS = GROUP_THREADS = 128
SM80_ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90")

Names = dict[str, str]


def emit_sm80(block: BlockProgram, arch: str = "sm_80") -> CudaSource:
    """The CUDA C++ of a block program for `arch`; raises `InputError` for what it cannot have."""
    plan = block.launch
    if arch not in SM80_ARCHITECTURES:
        raise InputError(f"architecture {arch!r}: expected {', '.join(SM80_ARCHITECTURES)}")
    if plan.cluster[1] > 1 or plan.tile_scheduler == "dynamic" or plan.store != "direct":
        raise InputError(
            f"schedule {block.name}: cluster {plan.cluster[1]}, tile_scheduler "
            f"{plan.tile_scheduler!r}, "
            f"store {plan.store!r}: {arch} has no clusters and no TMA; use cluster 1, a static "
            "or serpentine tile_scheduler and store='direct'"
        )
    if plan.overlap_next_task:
        raise InputError(f"launch plan: overlap_next_task has code for sm_90a, not for {arch}")
    return _Sm80Printer(block, kernel_facts(block, arch)).source()


class _Sm80Steps(StepCode):
    """The actions that differ."""

    fences = False

    def _acquire(self, step: Acquire, here: Here) -> list[str]:
        del here
        name = step.ring
        return [f"barrier_wait({name}_empty + {name}_cursor.slot * 8, {name}_cursor.parity ^ 1);"]

    def _fill(self, step: Fill, here: Here) -> list[str]:
        return fill_lines(self.block, step.op, here.names(step))

    def _publish(self, step: Publish) -> list[str]:
        name = step.ring
        return [
            f"copies_arrive({name}_full + {name}_cursor.slot * 8);",
            f"advance<{self.block.ring(name).depth}>({name}_cursor);",
        ]

    def _release(self, step: Release, turns: bool = False) -> list[str]:
        # Every lane arrives for its own reads. One lane a warp would do after a __syncwarp, but
        # racecheck does not follow reads through that to the barrier.
        ring, name = self.block.ring(step.ring), step.ring
        return [
            f"barrier_arrive({name}_empty + {name}_oldest * 8);",
            f"if (++{name}_oldest == {ring.depth}) {name}_oldest = 0;",
        ]

    def _issue(self, step: Issue, here: Here) -> list[str]:
        return self._addressed(step, here, multiply_lines(self.block, here.values, step.op))

    def _join(self, step: Join) -> list[str]:
        return []


class _Sm80Printer(Printer):
    def __init__(self, block: BlockProgram, facts: KernelFacts) -> None:
        super().__init__(block, facts)
        self.helpers.update(SM80_PRELUDE)
        self.steps = _Sm80Steps(block, facts, self.helpers)

    def _setup(self) -> list[str]:
        lines = [
            "extern __shared__ __align__(1024) unsigned char shared_raw[];",
            "const unsigned shared = (smem_address(shared_raw) + 1023u) & ~1023u;",
            *self._ring_addresses(),
            "const int warp_group = __shfl_sync(0xffffffffu, int(threadIdx.x / 128), 0);",
            "const unsigned lane = threadIdx.x % 32;",
            "if (threadIdx.x == 0) {",
        ]
        for ring in self.block.rings:
            lines += [
                f"  for (int s = 0; s < {ring.depth}; ++s) {{",
                f"    barrier_init({ring.name}_full + s * 8, {LOADER_THREADS});",
                f"    barrier_init({ring.name}_empty + s * 8, {GROUP_THREADS * self.parts});",
                "  }",
            ]
        return [*lines, "}", "__syncthreads();"]

    def _role(self, code: RoleCode) -> list[str]:
        role = code.role
        if role.loads:
            lines = [f"// {role.name}: its threads start every copy into shared memory"]
            lines += [f"Cursor {ring.name}_cursor;" for ring in self.block.rings]
            return [*lines, *self._tasks(code)]
        lines = [
            f"// {role.name}: matmuls and everything in registers",
            "const int part = warp_group - 1;",
            *self._scratch(),
            "const int thread_row = int(threadIdx.x % 128 / 32 * 16 + lane / 4);",
            "const int thread_col = int(lane % 4 * 2);",
        ]
        lines += [
            f"Cursor {r.name}_cursor; unsigned {r.name}_oldest = 0;" for r in self.block.rings
        ]
        if self.block.pingpong:
            lines.append(f"if (part == {self.parts - 1}) {{ {self.steps.turn_arrive(0)} }}")
        return [*lines, *self._tasks(code)]


def fill_lines(block: BlockProgram, op: Op, names: Names) -> list[str]:
    """Start the copies of one load into the loader's current slot."""
    assert op.dst is not None and op.array is not None
    start = op.spans[-1].start
    spanned = [d for d, span in enumerate(op.spans) if span.size is not None]
    ring, buffer = block.home(op.dst.name)
    tile = block.placement.shared[op.dst.name][1]
    name = op.array.name
    fixed = [
        f"static_cast<long long>({c_index(span.start, names)}) * {name}_stride{d}"
        for d, span in enumerate(op.spans)
        if span.size is None
    ]
    rows, cols = (c_name(op.array.dims[d]) for d in spanned)
    outside = [
        f"unsigned({c_index(span.start, names)}) >= unsigned({c_name(dim)})"
        for span, dim in zip(op.spans, op.array.dims, strict=True)
        if span.size is None
    ]
    if outside:
        rows = f"({' || '.join(outside)} ? 0 : {rows})"
    slot = f"{ring.name}_base + {ring.name}_cursor.slot * {ring.slot_bytes} + {buffer.offset}"
    return [
        f"fill_tile<{tile.width}, {tile.rows}, {tile.cols}>({slot}, "
        f"{' + '.join([f'{name}_data', *fixed])}, {name}_stride{spanned[0]}, "
        f"{c_index(op.spans[spanned[0]].start, names)}, {rows}, {c_index(start, names)}, {cols});"
    ]


def multiply_lines(block: BlockProgram, values: Values, op: Op) -> list[str]:
    """One matmul: operands to fragments by ldmatrix, a step of 16 of the depth at a time."""
    placement = block.placement
    assert op.dst is not None
    into, n = c_name(op.dst.name), op.dst.type.shape[1]
    if n % 8:
        raise InputError(f"{op.where}: matmul with {n} columns, expected a multiple of 8")
    blocks = values.blocks(op.dst.type)
    a_var, b_var = op.srcs[:2]
    right = placement.operand(op, 1)
    b_tile = right.tile
    deep = str(right.k_major).lower()
    loops = ["#pragma unroll", f"for (int t = 0; t < {blocks}; ++t)"]
    lines: list[str] = []
    if len(op.srcs) == 2:
        lines += [
            *loops,
            "#pragma unroll",
            f"  for (int i = 0; i < {n // 2}; ++i) {into}[t][i] = 0.0f;",
        ]
    body: list[str] = []
    if not placement.from_registers(op):
        body.append(f"unsigned left_at[{blocks}][4];")
        body += [*loops, f"  {_left(block, op, a_var.name)}"]
        left = "left_at[t]"
    else:
        left = f"&{c_name(a_var.name)}[t][4 * step]"
    mma, off = f"mma_{a_var.type.dtype}", op.value == TAKEN_OFF
    inner = [
        "unsigned right_at[4];",
        f"read_right<{b_tile.width}, {b_tile.rows}, {b_tile.cols}, {deep}>(right_at, "
        f"{_slot(block, b_var.name)}, j * 8, step * 16);",
        *(["for (int i = 0; i < 4; ++i) right_at[i] ^= 0x80008000u;"] if off else []),
        *loops,
        f"  {mma}(&{into}[t][4 * j], {left}, right_at);",
        *(
            [
                f"if (j + 1 < {n // 8}) {{",
                *indent([*loops, f"  {mma}(&{into}[t][4 * j + 4], {left}, right_at + 2);"]),
                "}",
            ]
        ),
    ]
    body += ["#pragma unroll", f"for (int j = 0; j < {n // 8}; j += 2) {{", *indent(inner), "}"]
    return [
        *lines,
        "#pragma unroll",
        f"for (int step = 0; step < {right.steps}; ++step) {{",
        *indent(body),
        "}",
    ]


def _slot(block: BlockProgram, name: str) -> str:
    if name in block.placement.staged:
        return f"{name}_staged"
    ring, buffer = block.home(name)
    return f"{ring.name}_at + {buffer.offset}"


def _left(block: BlockProgram, op: Op, name: str) -> str:
    placement = block.placement
    operand = placement.operand(op, 0)
    kind = op.srcs[0].type
    axis = next(n for n in kind.names if n != contracted(op))
    row = f"t * {ROWS_PER_GROUP} + int(threadIdx.x % 128 / 32) * 16"
    if op.dst is not None and placement.is_split(op.dst.type):
        row = f"part * {kind.size(axis) // placement.parts} + {row}"
    deep = str(operand.k_major).lower()
    return (
        f"read_left<{operand.tile.width}, {operand.tile.rows}, {deep}>(left_at[t], "
        f"{_slot(block, name)}, {row}, step * 16);"
    )
