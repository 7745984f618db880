"""Emission: block program -> one standalone CUDA C++ file and the list of its parameters.

Nothing is decided here: rings, roles, order, waits and joins are the block program's; tiles of
shared memory are laid out one after the other in its order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from warploom.codegen.cuda.emit_cluster_reduce import (
    BARRIERS,
    check_cluster_reductions,
    exchange_bytes,
    reduction_barriers,
)
from warploom.codegen.cuda.emit_overlap import OverlapCode
from warploom.codegen.cuda.emit_staged import staged_offsets
from warploom.codegen.cuda.emit_steps import StepCode, indent
from warploom.codegen.cuda.emit_tma import Maps
from warploom.codegen.cuda.entry import declaration_lines, declared_threads
from warploom.codegen.cuda.names import c_name, kernel_name
from warploom.codegen.cuda.prelude import BOUNDED_WAIT, needed
from warploom.codegen.cuda.prelude_sm80 import SM80_PRELUDE
from warploom.codegen.cuda.scratch import region_bytes
from warploom.codegen.cuda.tasks import TASK_SLOTS, task_lines
from warploom.codegen.cuda.values import Values
from warploom.codegen.ir.block import BlockProgram, Pipeline, Role
from warploom.codegen.ir.layout import ALIGNMENT
from warploom.codegen.ir.steps import Issue
from warploom.codegen.ir.targets import check_threads, check_types, shared_limit
from warploom.codegen.passes.copies import extra_tiles
from warploom.errors import DoesNotFit, InputError
from warploom.tile import Array, Index, Var
from warploom.tile.interpret import cluster_reductions

BARRIER_BYTES = 8


@dataclass(frozen=True)
class CudaSource:
    """A kernel's text and what a launch must know.

    parameters      in order: {"kind": map|dim|pointer|stride|counter|scalar, ...}
    dependent       may start before the previous grid of its stream has ended
    shared_bytes    dynamic shared memory; threads and cluster are blocks' shapes
    declared_threads  threads in the kernel's launch bounds, where they are fewer (`cuda.entry`)
    """

    name: str
    text: str
    parameters: tuple[dict[str, Any], ...]
    shared_bytes: int
    threads: int
    cluster: int
    grid: tuple[tuple[str, Index], ...]
    cluster_axis: str
    persistent: bool
    arrays: tuple[Array, ...]
    dependent: bool = False
    declared_threads: int = 0

    def __str__(self) -> str:
        return self.text

    @property
    def file(self) -> str:
        """The name of the file it is written to."""
        return f"{self.name}.cu"


def emit(block: BlockProgram, debug: bool = False) -> CudaSource:
    """The CUDA C++ of a block program; raises `InputError` when it does not fit the block.

    `debug` bounds every wait, so that a deadlock becomes a fault.
    """
    return Emitter(block, debug).source()


class Emitter:
    """Writes a kernel; `emit_sm80` changes its verbs."""

    arch = "sm_90a"

    def __init__(self, block: BlockProgram, debug: bool) -> None:
        self.block = block
        self.plan = block.schedule.launch
        self.placement = block.placement
        self.program = block.placement.program
        if self.plan.overlap_next_task and self.arch != "sm_90a":
            raise InputError(
                f"launch plan: overlap_next_task has code for sm_90a, not for {self.arch}"
            )
        for op in self.program.ops():
            check_types(op, self.arch)
        self.helpers: dict[str, str] = {"barrier_wait": BOUNDED_WAIT} if debug else {}
        self.maps = Maps(block, self.helpers)
        self.scratch = region_bytes(self.placement)  # of each group
        self.staged, self.staged_bytes = staged_offsets(self.placement)
        self.helpers["tile_offset"] = SM80_PRELUDE["tile_offset"]
        self.cluster = self.plan.cluster[1]
        self.parts = self.placement.parts
        check_cluster_reductions(block.placement, self.plan)
        self.reduces = bool(cluster_reductions(self.program))
        self.steps = StepCode(block, self.maps)

    def source(self) -> CudaSource:
        body = self._body()
        parameters = self._parameters()
        signature = ",\n    ".join(_declaration(p) for p in parameters)
        threads = 32 * sum(role.warps for role in self.block.roles)
        check_threads(self.program.name, threads, self.plan.resident, self.arch)
        cluster = f" __cluster_dims__({self.cluster}, 1, 1)" if self.cluster > 1 else ""
        declared = declared_threads(threads, self.helpers)
        head = [
            f"// {self.program.name}: emitted by warploom from a tile program and the schedule "
            f'"{self.block.schedule.name}".',
            "//",
            *[f"//   {line}" for line in str(self.program).splitlines()],
            "//",
            *[f"//   {line}" for line in str(self.block).splitlines()[1:]],
            "",
            "#define DEVICE __device__ __forceinline__",
            "#ifndef INFINITY",
            "#define INFINITY __int_as_float(0x7f800000)",
            "#define NAN __int_as_float(0x7fffffff)",
            "#endif",
            "",
        ]
        text = "\n".join(body)
        lines = [
            *head,
            *[f"{helper}\n" for helper in needed(text + signature, self.helpers)],
            *declaration_lines(threads, declared),
            f'extern "C" __global__ void __launch_bounds__({declared}, {self.plan.resident})'
            f"{cluster} "
            f"{kernel_name(self.program.name)}(",
            f"    {signature}) {{",
            *body,
            "}",
            "",
        ]
        return CudaSource(
            kernel_name(self.program.name),
            "\n".join(lines),
            tuple(parameters),
            self.shared_bytes,
            threads,
            self.cluster,
            self.program.grid,
            self.plan.cluster[0] if self.cluster > 1 else "",
            self.plan.persistent,
            self.program.arrays,
            self.plan.dependent,
            declared if declared < threads else 0,
        )

    # ---- shared memory

    def _layout(self) -> dict[str, int]:
        """Byte offset of every ring, the store panels and the barriers."""
        at: dict[str, int] = {}
        used = 0
        for ring in self.block.rings:
            at[ring.name] = used
            used += ring.depth * ring.slot_bytes
        at["panels"] = used if self.maps.over is None else at[self.maps.over[0]]
        used += self.maps.panel_bytes() * self.parts
        at["scratch"] = used
        used += self.scratch * self.parts
        at["meet_room"] = used
        used += exchange_bytes(self.placement, self.program) * self.parts
        used = -(-used // ALIGNMENT) * ALIGNMENT if self.staged else used
        at["staged"] = used
        used += self.staged_bytes * self.parts
        at["barriers"] = used
        for ring in self.block.rings:
            at[f"{ring.name}.full"] = used
            at[f"{ring.name}.empty"] = used + ring.depth * BARRIER_BYTES
            used += 2 * ring.depth * BARRIER_BYTES
        at["reduce_barriers"] = used
        used += BARRIERS * BARRIER_BYTES * self.parts * self.reduces
        at["tasks"] = used
        if self.plan.tile_scheduler == "dynamic":
            used += TASK_SLOTS * (2 * BARRIER_BYTES + 4)
        resident = self.plan.resident
        # The base is rounded up to 1024, except where blocks share an SM and every KiB counts.
        self.shared_bytes = used + (1024 if resident == 1 else 0)
        if self.shared_bytes > (limit := shared_limit(resident, self.arch)):
            rings = ", ".join(f"{r.name} {r.depth} x {r.slot_bytes:,}" for r in self.block.rings)
            others = {
                "store panels": self.maps.panel_bytes(),
                "exchanges": self.scratch,
                "operands": self.staged_bytes,
            }
            rest = "".join(f", {what} {n * self.parts:,}" for what, n in others.items() if n)
            many = f" a block for {resident} on an SM" if resident > 1 else ""
            raise DoesNotFit(
                f"kernel {self.program.name} needs {self.shared_bytes:,} B of shared memory "
                f"({rings}{rest}), {self.arch} has {limit:,}{many}; make a ring shallower or the "
                "tile smaller"
            )
        return at

    # ---- parameters

    def _parameters(self) -> list[dict[str, Any]]:
        result: list[dict[str, Any]] = [*self.maps.parameters]
        for name in self.maps.direct:
            array = self.program.array(name)
            written = any(
                op.array == array and op.kind.startswith("store") for op in self.program.ops()
            )
            result.append(
                {"kind": "pointer", "array": name, "dtype": array.dtype.name, "written": written}
            )
            result += [
                {"kind": "stride", "array": name, "dim": dim} for dim in range(len(array.dims) - 1)
            ]
        result += [{"kind": "dim", "name": dim} for dim in self.program.dims]
        if self.plan.tile_scheduler == "dynamic":
            result.append({"kind": "counter"})
        result += [
            {"kind": "scalar", "name": var.name, "dtype": var.type.dtype.name}
            for var in self.program.scalars
        ]
        return result

    # ---- the kernel

    def _body(self) -> list[str]:
        roles = self.block.roles
        at = self.offsets = self._layout()
        code = [self._role(role) for role in roles if role.loads]
        computes = [role for role in roles if not role.loads]
        same = all(role.sections == computes[0].sections for role in computes)
        merged = [(computes[0], True)] if same else [(role, False) for role in computes]
        compute_code = [(role, self._role(role)) for role, _ in merged]
        lines = self._setup(at)
        lines.append("if (warp_group == 0) {")
        lines += indent(code[0])
        for number, (role, body) in enumerate(compute_code):
            condition = (
                "" if number == len(compute_code) - 1 else f" if (warp_group == {role.part + 1})"
            )
            lines.append(f"}} else{condition} {{")
            lines += indent(body)
        lines.append("}")
        if self.cluster > 1:
            lines += ["// Peers may still signal barriers of this block.", "cluster_sync();"]
        return indent(lines)

    def _setup(self, at: dict[str, int]) -> list[str]:
        lines = ["extern __shared__ __align__(1024) unsigned char shared_raw[];"]
        if self.plan.resident == 1:
            lines.append("const unsigned shared = (smem_address(shared_raw) + 1023u) & ~1023u;")
        else:
            lines += [
                "const unsigned shared = smem_address(shared_raw);",
                "if (shared % 1024) __trap();  // swizzled tiles need it; drivers give it",
            ]
        if self.plan.dependent:
            lines.append("start_next_grid();")
        for ring in self.block.rings:
            lines += [
                f"const unsigned {ring.name}_base = shared + {at[ring.name]};",
                f"const unsigned {ring.name}_full = shared + {at[f'{ring.name}.full']};",
                f"const unsigned {ring.name}_empty = shared + {at[f'{ring.name}.empty']};",
            ]
        if self.maps.stores:
            lines.append(f"const unsigned panels = shared + {at['panels']};")
        if self.reduces:
            lines += [
                f"const unsigned meet_room = shared + {at['meet_room']};",
                f"const unsigned meet_full = shared + {at['reduce_barriers']};",
                f"const unsigned meet_free = meet_full + {BARRIER_BYTES * self.parts};",
            ]
        if self.plan.tile_scheduler == "dynamic":
            lines += [
                f"const unsigned task_full = shared + {at['tasks']};",
                f"const unsigned task_empty = task_full + {TASK_SLOTS * BARRIER_BYTES};",
                f"const unsigned task_ring = task_empty + {TASK_SLOTS * BARRIER_BYTES};",
            ]
        lines += [
            "const int warp_group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);",
            "const unsigned lane = threadIdx.x % 32;",
        ]
        if self.cluster > 1:
            lines.append("const unsigned rank = cluster_rank();")
        lines.append("if (threadIdx.x == 0) {")
        for ring in self.block.rings:
            arrivals = 4 * self.parts * (self.cluster if self.steps.shared_across(ring) else 1)
            lines += [
                f"  for (int s = 0; s < {ring.depth}; ++s) {{",
                f"    barrier_init({ring.name}_full + s * 8, 1);",
                f"    barrier_init({ring.name}_empty + s * 8, {arrivals});",
                "  }",
            ]
        if self.plan.tile_scheduler == "dynamic":
            lines += [
                f"  for (int s = 0; s < {TASK_SLOTS}; ++s) {{",
                "    barrier_init(task_full + s * 8, 1);",
                f"    barrier_init(task_empty + s * 8, {4 * self.parts});",
                "  }",
            ]
        if self.reduces:
            lines += [f"  {line}" for line in reduction_barriers(self.program, self.parts)]
        lines += [f"  prefetch_map(&{p['name']});" for p in self.maps.parameters]
        lines += ["  fence_barrier_init();", "}"]
        lines.append("cluster_sync();" if self.cluster > 1 else "__syncthreads();")
        if self.plan.dependent:
            lines.append("wait_previous_grid();")
        return lines

    def _role(self, role: Role) -> list[str]:
        if role.loads:
            lines = [f"// {role.name}: one thread starts every copy into shared memory"]
            lines.append(f"registers_down<{role.registers}>();")
            lines.append("if (threadIdx.x == 0) {")
            inner = [f"Cursor {ring.name}_cursor;" for ring in self.block.rings]
            lines += indent(inner + self._tasks(role))
            return [*lines, "}"]
        lines = [
            f"// {role.name}: matmuls and everything in registers",
            f"registers_up<{role.registers}>();",
            "const int part = warp_group - 1;",
            *self._scratch(),
            "const int thread_row = threadIdx.x % 128 / 32 * 16 + lane / 4;",
            "const int thread_col = lane % 4 * 2;",
        ]
        lines += [
            f"Cursor {r.name}_cursor; unsigned {r.name}_oldest = 0;" for r in self.block.rings
        ]
        if self.reduces:
            lines.append("unsigned meet_parity = 0;")
        if self.block.schedule.pingpong:
            # The first group to go finds its turn already given by the last one.
            lines.append(f"if (part == {self.parts - 1}) {{ {self.steps.turn_arrive(0)} }}")
        lines += self._tasks(role)
        if self.maps.stores:
            lines.append("store_wait_read<0>();")
        return lines

    def _scratch(self) -> list[str]:
        lines: list[str] = []
        if self.scratch:
            shift = f"(shared - smem_address(shared_raw)) + {self.offsets['scratch']}"
            lines.append(f"void* const scratch = shared_raw + {shift} + part * {self.scratch};")
        for name, inside in self.staged.items():
            base = f"shared + {self.offsets['staged'] + inside}"
            lines += [
                # Writes need the block's number in a cluster, descriptors must not have it.
                f"const unsigned {name}_room = {base} + part * {self.staged_bytes};",
                f"const unsigned {name}_staged = in_block({name}_room);",
            ]
        return lines

    def _tasks(self, role: Role) -> list[str]:
        values = Values(self.placement, role.part, self.plan.skip_unit, self.plan.skip_voted)
        body: list[str] = []
        if not role.loads:
            carried = {step.op.dst for step in role.ahead if isinstance(step, Issue)}
            body += [self._declare(values, v) for v in self._registers() if v not in carried]
            body += [f"int {name}_live = 0;" for name in sorted(self.steps.lazy)]
        overlap = OverlapCode(self.block, role, values, self.steps) if role.ahead else None
        if overlap is not None:
            self.steps.ahead = overlap.ahead
        for section in role.sections:
            body += self.steps.section(role, values, section)
        if overlap is not None:
            return overlap.lines(body)
        head, tail = task_lines(self.program, self.plan, role.loads)
        return [*head, *indent(body), *tail.split("\n")]

    def _declare(self, values: Values, var: Var) -> str:
        try:
            return values.declare(var)
        except InputError as error:
            where = next(op.where for op in self.program.ops() if op.dst == var)
            raise InputError(f"{where}: {error}") from None

    def _registers(self) -> list[Var]:
        found: dict[str, Var] = {}
        for op in self.program.ops():
            if op.dst is None or op.id not in self.placement.fusion.kept:
                continue
            if not self.placement.is_shared(op.dst):
                found[op.dst.name] = op.dst
        copies = [
            extra_tiles(self.program, section.copies)
            for role in self.block.roles
            for section in role.sections
            if isinstance(section, Pipeline)
        ]
        found.update({var.name: var for one in copies for var in one})
        return list(found.values())


_POINTEE = {
    "fp32": "float",
    "int32": "int",
    "bf16": "unsigned short",
    "fp16": "unsigned short",
    "e4m3": "E4m3",
    "e5m2": "E5m2",
    "bool": "unsigned char",
}


def _declaration(parameter: dict[str, Any]) -> str:
    kind = parameter["kind"]
    if kind == "map":
        return f"const __grid_constant__ TensorMap {parameter['name']}"
    if kind == "pointer":
        const = "" if parameter["written"] else "const "
        return f"{const}{_POINTEE[parameter['dtype']]}* __restrict__ {parameter['array']}_data"
    if kind == "stride":
        return f"long long {parameter['array']}_stride{parameter['dim']}"
    if kind == "counter":
        return "unsigned* __restrict__ task_counter"
    if kind == "dim":
        return f"int {c_name(parameter['name'])}"
    return f"{'int' if parameter['dtype'] == 'int32' else 'float'} {c_name(parameter['name'])}"
