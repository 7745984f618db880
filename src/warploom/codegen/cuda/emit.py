"""Emission: block program -> one standalone CUDA C++ file and the list of its parameters.

Nothing is decided here: rings, roles, order, waits and joins are the block program's; tiles of
shared memory are laid out one after the other in its order.
"""

from __future__ import annotations

from typing import Any

from warploom.codegen.analysis.cluster_reduce import reduces_in_cluster
from warploom.codegen.analysis.entry import entry_registers
from warploom.codegen.analysis.grid import TASK_SLOTS
from warploom.codegen.analysis.kernel_facts import KernelFacts, kernel_facts
from warploom.codegen.analysis.role_code import RoleCode
from warploom.codegen.analysis.shared_layout import BARRIER_BYTES
from warploom.codegen.cuda.emit_cluster_reduce import reduction_barriers
from warploom.codegen.cuda.emit_overlap import Overlap, overlapped_lines
from warploom.codegen.cuda.emit_roles import StepCode
from warploom.codegen.cuda.emit_staged import kept_places
from warploom.codegen.cuda.emit_steps import raw_cursor
from warploom.codegen.cuda.lines import indent
from warploom.codegen.cuda.names import c_name, kernel_name
from warploom.codegen.cuda.prelude import (
    BOUNDED_WAIT,
    DEPENDENT,
    MACROS,
    SM80_PRELUDE,
    memory_type,
    needed,
    pointer_to,
)
from warploom.codegen.cuda.tasks import task_lines, waits_in_roles
from warploom.codegen.cuda.values import Values
from warploom.codegen.ir.block import BlockProgram, Ring
from warploom.codegen.ir.layout import CHUNK
from warploom.codegen.ir.plan import LOWER_ROWS
from warploom.codegen.ir.source import CudaSource
from warploom.codegen.ir.steps import Issue
from warploom.codegen.ir.text import block_text
from warploom.errors import InputError
from warploom.tile import Op, Var
from warploom.tile.dtypes import HALVES, dtype

# Device functions of sm_80 that read and write tiles in shared memory from registers.
SLOT_READS = (
    *("tile_offset", "load_matrix", "load_matrix_transposed"),
    *("read_left", "read_bytes", "turn_tile"),
)


def emit(block: BlockProgram, debug: bool = False) -> CudaSource:
    """The CUDA C++ of a block program; raises `InputError` when it does not fit the block.

    `debug` bounds every wait, so that a deadlock becomes a fault.
    """
    return Printer(block, kernel_facts(block), debug).source()


class Printer:
    """Writes a kernel from its block program and the facts; `emit_sm80` changes its verbs."""

    def __init__(self, block: BlockProgram, facts: KernelFacts, debug: bool = False) -> None:
        self.block, self.facts = block, facts
        self.plan = block.launch
        self.placement = block.placement
        self.program = block.placement.program
        self.layout = facts.layout
        self.stores = any(path.panels is not None for path in self.facts.stores.values())
        self.helpers: dict[str, str] = {"barrier_wait": BOUNDED_WAIT} if debug else {}
        self.helpers |= DEPENDENT if self.plan.dependent else {}
        for name in SLOT_READS:
            self.helpers[name] = SM80_PRELUDE[name]
        self.cluster = self.plan.cluster[1]
        self.parts = self.placement.parts
        self.reduces = reduces_in_cluster(self.program)
        self.turning = sum(role.warps for role in block.roles if role.transposes)
        self.steps = StepCode(block, self.facts, self.helpers)

    def source(self) -> CudaSource:
        """The whole file."""
        body, facts = self._body(), self.facts
        signature = ",\n    ".join(
            _declaration(p, self.plan.dependent) for p in facts.parameters.all
        )
        cluster = f" __cluster_dims__({self.cluster}, 1, 1)" if self.cluster > 1 else ""
        head = [
            f"// {self.program.name}: emitted by warploom from a tile program and the schedule "
            f'"{self.block.name}".',
            "//",
            *[f"//   {line}" for line in str(self.program).splitlines()],
            "//",
            *[f"//   {line}" for line in block_text(self.block).splitlines()[1:]],
            "",
            *MACROS,
        ]
        text = "\n".join(body)
        lines = [
            *head,
            *[f"{helper}\n" for helper in needed(text + signature, self.helpers)],
            *_declared_note(facts),
            f'extern "C" __global__ void __launch_bounds__({facts.declared}, {self.plan.resident})'
            f"{cluster} "
            f"{kernel_name(self.program.name)}(",
            f"    {signature}) {{",
            *body,
            "}",
            "",
        ]
        return CudaSource(
            name=kernel_name(self.program.name),
            text="\n".join(lines),
            parameters=facts.parameters.all,
            shared_bytes=facts.layout.total,
            threads=facts.threads,
            cluster=self.cluster,
            cluster_axis=self.plan.cluster[0] if self.cluster > 1 else "",
            grid=self.program.grid,
            arrays=self.program.arrays,
            persistent=self.plan.persistent,
            dependent=self.plan.dependent,
            declared_threads=facts.declared if facts.declared < facts.threads else 0,
            moves_registers=facts.moves_registers,
        )

    # ---- the kernel

    def _body(self) -> list[str]:
        loader = self._role(self.facts.loader)
        codes = [(code.role, self._role(code)) for code in self.facts.codes]
        lines = [*self._setup(), "if (warp_group == 0) {", *indent(loader)]
        for number, (role, body) in enumerate(codes):
            last = number == len(codes) - 1
            condition = "" if last else f" if (warp_group == {role.part + 1})"
            lines += [f"}} else{condition} {{", *indent(body)]
        lines.append("}")
        if self.cluster > 1:
            lines += ["// Peers may still signal barriers of this block.", "cluster_sync();"]
        return indent(lines)

    def _setup(self) -> list[str]:
        lines = ["extern __shared__ __align__(1024) unsigned char shared_raw[];"]
        if self.plan.resident == 1:
            lines.append("const unsigned shared = (smem_address(shared_raw) + 1023u) & ~1023u;")
        else:
            lines += [
                "const unsigned shared = smem_address(shared_raw);",
                "if (shared % 1024) __trap();  // swizzled tiles need it; drivers give it",
            ]
        if self.plan.lower_rows:
            lines += [f"if ({dim} > {LOWER_ROWS}) __trap();" for dim in self._rows()]
        if self.plan.dependent:
            lines.append("start_next_grid();")
        who = [
            "const int warp_group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);",
            "const unsigned lane = threadIdx.x % 32;",
        ]
        if self.plan.abreast > 1:
            own = "threadIdx.x < 128 ? threadIdx.x / 32 : threadIdx.x / 128 - 1"
            lines += [*who, f"const int part = __shfl_sync(0xffffffffu, {own}, 0);"]
            who = []
        lines += [*self._addresses(), *who]
        if self.cluster > 1:
            lines.append("const unsigned rank = cluster_rank();")
        lines += ["if (threadIdx.x == 0) {", *indent(self._barriers())]
        lines += [f"  prefetch_map(&{one.name});" for one in self.facts.parameters.maps]
        lines += ["  fence_barrier_init();", "}"]
        lines.append("cluster_sync();" if self.cluster > 1 else "__syncthreads();")
        if self.plan.dependent and not waits_in_roles(self.plan):
            lines.append("wait_previous_grid();")
        return lines

    def _rows(self) -> list[str]:
        """The dimensions of arrays that are stored along the rows of matmuls."""
        found = dict[str, None]()
        for op in self.program.ops():
            array = op.array if op.id in self.facts.stores else None
            for span, dim in zip(op.spans, array.dims, strict=True) if array else ():
                if span.size is not None and self.placement.lies(span.axis) == "rows":
                    found[c_name(dim)] = None
        return list(found)

    def _ring_addresses(self) -> list[str]:
        layout, lines = self.layout, list[str]()
        for ring in self.block.rings:
            for what, at, each in (
                ("base", layout.rings, ring.slot_bytes),
                ("full", layout.full, BARRIER_BYTES),
                ("empty", layout.empty, BARRIER_BYTES),
            ):
                own = f" + part * {ring.depth * each}" if self._abreast(ring) > 1 else ""
                lines.append(f"const unsigned {ring.name}_{what} = shared + {at[ring.name]}{own};")
        return lines

    def _abreast(self, ring: Ring) -> int:
        """How many of a ring the block has."""
        return 1 if ring.name in self.facts.kept else self.plan.abreast

    def _addresses(self) -> list[str]:
        """Where the parts of shared memory begin."""
        layout, lines = self.layout, self._ring_addresses()
        if self.stores:
            lines.append(f"const unsigned panels = shared + {layout.panels};")
        if self.reduces:
            lines += [
                f"const unsigned reduce_room = shared + {layout.parts};",
                f"const unsigned reduce_full = shared + {layout.parts_full};",
                f"const unsigned reduce_free = reduce_full + {BARRIER_BYTES * self.parts};",
            ]
        if self.plan.store_warps:
            lines += [
                f"const unsigned carried_full = shared + {layout.carried};",
                f"const unsigned carried_empty = carried_full + {BARRIER_BYTES * self.parts};",
            ]
        if self.plan.tile_scheduler == "dynamic":
            lines += [
                f"const unsigned task_full = shared + {layout.tasks};",
                f"const unsigned task_empty = task_full + {TASK_SLOTS * BARRIER_BYTES};",
                f"const unsigned task_ring = task_empty + {TASK_SLOTS * BARRIER_BYTES};",
            ]
        return lines

    def _barriers(self) -> list[str]:
        """What one thread does to the barriers before any is used: how many arrivals each wants."""
        lines: list[str] = []
        for ring in self.block.rings:
            # Each warp of the groups, or of those that turn what is in it, gives a slot back, in
            # all blocks that a copy serves.
            blocks = self.cluster if ring.name in self.facts.crossing else 1
            takers = self.turning * self.block.is_raw(ring) + 4 * self.block.takers(ring)
            fillers = self.turning if self.block.is_turned(ring) else 1
            lines += [
                f"for (int s = 0; s < {ring.depth * self._abreast(ring)}; ++s) {{",
                f"  barrier_init({ring.name}_full + s * 8, {fillers});",
                f"  barrier_init({ring.name}_empty + s * 8, {takers * blocks});",
                "}",
            ]
        if self.plan.store_warps:
            lines += [
                f"for (int s = 0; s < {self.parts}; ++s) {{",
                "  barrier_init(carried_full + s * 8, 4);",
                "  barrier_init(carried_empty + s * 8, 1);",
                "}",
            ]
        if self.plan.tile_scheduler == "dynamic":
            takers = 4 * self.parts + self._copying + self.turning
            lines += [
                f"for (int s = 0; s < {TASK_SLOTS}; ++s) {{",
                "  barrier_init(task_full + s * 8, 1);",
                f"  barrier_init(task_empty + s * 8, {takers});",
                "}",
            ]
        if self.reduces:
            lines += reduction_barriers(self.program, self.parts)
        return lines

    def _role(self, code: RoleCode) -> list[str]:
        role = code.role
        if role.loads:
            lines = [f"// {role.name}: one thread starts every copy into shared memory"]
            lines.append(f"registers_down<{role.registers}>();")
            each = self.plan.abreast
            one = f"threadIdx.x < {32 * each} && lane == 0" if each > 1 else "threadIdx.x == 0"
            lines.append(f"if ({one}) {{")
            inner = [f"Cursor {ring.name}_cursor;" for ring in self._moving_rings()]
            lines += indent([*self._kept_fills(), *inner, *self._tasks(code)])
            others = self._carriers() if self.plan.store_warps else self._transposer()
            return [*lines, *others, "}"]
        lines = [
            f"// {role.name}: matmuls and everything in registers",
            f"registers_up<{role.registers}>();",
            *(["const int part = warp_group - 1;"] if self.plan.abreast == 1 else []),
            *self._scratch(),
            "const int thread_row = threadIdx.x % 128 / 32 * 16 + lane / 4;",
            "const int thread_col = lane % 4 * 2;",
        ]
        for name in sorted(self.facts.kept):
            lines += [
                f"barrier_wait({name}_full, 0);",
                f"const unsigned {name}_at = in_block({name}_base);",
            ]
        lines += [
            f"Cursor {r.name}_cursor;"
            + (f" unsigned {r.name}_oldest = 0;" if r.name not in self.facts.cursors else "")
            for r in self._moving_rings()
            if self.facts.cursors.get(r.name, r.name) == r.name
        ]
        if self.reduces:
            lines.append("unsigned reduce_parity = 0;")
        if self.plan.store_warps:
            lines.append("unsigned carried_parity = 0;")
        if self.block.pingpong:
            # The first group to go finds its turn already given by the last one.
            lines.append(f"if (part == {self.parts - 1}) {{ {self.steps.turn_arrive(0)} }}")
        lines += self._tasks(code)
        if self.stores:
            lines.append("store_wait_read<0>();")
        return lines

    def _moving_rings(self) -> list[Ring]:
        return [ring for ring in self.block.rings if ring.name not in self.facts.kept]

    def _kept_fills(self) -> list[str]:
        """What one thread loads for all tasks of the block."""
        kept = [ring for ring in self.block.rings if ring.name in self.facts.kept]
        lines: list[str] = []
        for ring in kept:
            first = [buffer.loads[0] for buffer in ring.buffers]
            size = sum(self.placement.shared[op.dst.name][1].bytes for op in first if op.dst)
            lines += [f"Cursor {ring.name}_cursor;", f"barrier_expect({ring.name}_full, {size});"]
            lines += [line for op in first for line in self.steps.filled(op)]
        return ["if (part == 0) {", *indent(lines), "}"] if kept else []

    @property
    def _copying(self) -> int:
        """How many warps copy panels: one a group, or one the room that groups have in turn, unless
        copies have an order: then those of a group wait while the next one's begin."""
        ordered = any(op.turn is not None for op in self.program.ops())
        return self.plan.store_warps * (1 if self.plan.in_turn and not ordered else self.parts)

    def _carriers(self) -> list[str]:
        """The warps of the loading group that copy what the compute groups leave in panels."""
        head, tail = task_lines(self.program, self.plan, False)
        body = ["#pragma unroll 1", *self.steps.carriers()]
        return [
            f"}} else if (threadIdx.x / 32 - 1 < {self._copying}) {{  // copies a group's panels",
            "  const int part = __shfl_sync(0xffffffffu, threadIdx.x / 32 - 1, 0);",
            "  unsigned carried_parity = 0;",
            *indent([*head, *indent(body), *tail.split("\n")]),
        ]

    def _transposer(self) -> list[str]:
        """The warps of the loading group that turn operands."""
        code = self.facts.transposer
        if code is None:
            return []
        block, rings = self.block, self.block.rings
        names = [f"{ring.name}_cursor" for ring in rings if block.is_turned(ring)]
        names += [raw_cursor(block, ring) for ring in rings if block.is_raw(ring)]
        cursors = [f"Cursor {name};" for name in dict.fromkeys(names)]
        return [
            "} else if (threadIdx.x >= 32) {  // turn operands",
            *indent([*cursors, *self._tasks(code)]),
        ]

    def _scratch(self) -> list[str]:
        lines: list[str] = []
        layout = self.layout
        if layout.scratch_bytes:
            shift = f"(shared - smem_address(shared_raw)) + {layout.scratch}"
            lines.append(
                f"void* const scratch = shared_raw + {shift} + part * {layout.scratch_bytes};"
            )
        for op in self.program.ops():
            if op.dst is not None and op.dst.name in layout.vectors:
                name, word = op.dst.name, op.dst.type.dtype.kind
                shift = f"(shared - smem_address(shared_raw)) + {layout.vectors[name]}"
                # Known to be aligned, neighbouring columns are read together.
                lines.append(
                    f"{word}* const {name}_shared = reinterpret_cast<{word}*>("
                    f"__builtin_assume_aligned(shared_raw + {shift} + part * "
                    f"{layout.vector_bytes}, {CHUNK}));"
                )
        for name, at in layout.handed.items():
            shift = f"(shared - smem_address(shared_raw)) + {at}"
            lines += [
                f"float* const {name}_handed = reinterpret_cast<float*>(shared_raw + {shift});",
                f"int {name}_turn = 0;  // which of its two slots is the latest",
            ]
        for name, at in layout.staged.items():
            common = name in self.placement.common
            own = "" if common else f" + part * {layout.staged_bytes}"
            lines += [
                # Writes need the block's number in a cluster, descriptors must not have it.
                f"const unsigned {name}_room = shared + {at}{own};",
                f"const unsigned {name}_staged = in_block({name}_room);",
            ]
            if common and self.plan.staged_slots > 1:
                lines.append(f"unsigned {name}_turn = 0;  // bytes to the slot of the iteration")
                if self.plan.kept_places:
                    lines += kept_places(self.steps.values, name)
        return lines

    def _tasks(self, code: RoleCode) -> list[str]:
        role, values = code.role, self.steps.values
        body: list[str] = []
        if role.computes:
            carried = {step.op.dst for step in role.ahead if isinstance(step, Issue)}
            body += [self._declare(values, v) for v in self._registers() if v not in carried]
            body += [f"int {name}_live = 0;" for name in sorted(self.facts.overwritten)]
            body += [line for op in self._kept() for line in values.masks(op, {})]
        body += self.steps.role(code)
        if role.ahead:
            overlap = Overlap.of(self.block, role)
            return overlapped_lines(overlap, values, self.steps.ahead(role), body)
        early = self.steps.asked_early(role) if role.loads and self.plan.fetch_early else []
        head, tail = task_lines(self.program, self.plan, role.loads, early=early)
        return [*head, *indent(body), *tail.split("\n")]

    def _declare(self, values: Values, var: Var) -> str:
        try:
            return values.declare(var)
        except InputError as error:
            where = next(op.where for op in self.program.ops() if op.dst == var)
            raise InputError(f"{where}: {error}") from None

    def _kept(self) -> list[Op]:
        return [op for op in self.program.ops() if op.id in self.placement.fusion.kept]

    def _registers(self) -> list[Var]:
        made = (op.dst for op in self._kept() if op.dst is not None)
        found = {var.name: var for var in made if not self.placement.is_shared(var)}
        return list(found.values())


def _declared_note(facts: KernelFacts) -> list[str]:
    """What the kernel's file says of its launch bounds."""
    if facts.declared == facts.threads:
        return []
    granted = entry_registers(facts.threads)
    return [
        f"// Blocks have {facts.threads} threads. Its launch bounds declare {facts.declared}: "
        "ptxas refuses a wgmma whose sums",
        f"// leave too few of the {granted} registers that a thread begins with. The image is then",
        f"// set to {facts.threads} threads (warploom.codegen.compile.entry_image).",
    ]


def _declaration(parameter: dict[str, Any], dependent: bool) -> str:
    kind = parameter["kind"]
    if kind == "map":
        return f"const __grid_constant__ TensorMap {parameter['name']}"
    if kind == "pointer":
        element = dtype(parameter["dtype"])
        pointee = "unsigned short" if element.name in HALVES else memory_type(element)
        return f"{pointer_to(pointee, parameter['written'], dependent)} {parameter['array']}_data"
    if kind == "stride":
        return f"long long {parameter['array']}_stride{parameter['dim']}"
    if kind == "counter":
        return "unsigned* __restrict__ task_counter"
    if kind == "dim":
        return f"int {c_name(parameter['name'])}"
    return f"{'int' if parameter['dtype'] == 'int32' else 'float'} {c_name(parameter['name'])}"
