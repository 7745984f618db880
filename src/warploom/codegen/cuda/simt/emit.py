"""Emission of SIMT kernels: program and schedule to one standalone CUDA C++ file.

Meaning and order are the program's own: every op is one block of code, run by all threads, with
the threads' exchanges through one piece of shared memory that the ops use in turn.
"""

from __future__ import annotations

from collections.abc import Sequence

from warploom.codegen.cuda.lines import indent
from warploom.codegen.cuda.names import c_name
from warploom.codegen.cuda.simt import emit_axis, emit_exchange
from warploom.codegen.cuda.simt.emit_ahead import (
    STAGE,
    Early,
    Ring,
    Walk,
    carried_lines,
    ring_lines,
)
from warploom.codegen.cuda.simt.emit_map import NAMES, expression, philox_lines
from warploom.codegen.cuda.simt.emit_memory import Access, PairAccess, unroll
from warploom.codegen.cuda.simt.frame import framed
from warploom.codegen.cuda.tasks import (
    count_lines,
    first_and_stride,
    position_lines,
    read_line,
    task_lines,
    waits_in_roles,
)
from warploom.codegen.cuda.values import c_index
from warploom.codegen.ir.source import CudaSource
from warploom.codegen.simt.exchanges import EXCHANGES, converts
from warploom.codegen.simt.facts import SimtFacts, simt_facts
from warploom.codegen.simt.forms import COL, ROW, SCALAR, TILE, axis_form, wanted_form
from warploom.codegen.simt.schedule import WARP, SimtSchedule
from warploom.codegen.simt.staged import Pass, passes, staged_tiles
from warploom.tile import Loop, Op, Program, TileType, Var
from warploom.tile.ops import OPS

BETWEEN_GRIDS = ("start_next_grid();", "wait_previous_grid();")


def emit_simt(program: Program, schedule: SimtSchedule, arch: str) -> CudaSource:
    """The CUDA C++ of a program without a matmul; raises `InputError` when it does not fit."""
    return _Printer(program, schedule, simt_facts(program, schedule, arch)).source()


class _Printer:
    def __init__(self, program: Program, schedule: SimtSchedule, facts: SimtFacts) -> None:
        self.program, self.schedule, self.facts = program, schedule, facts
        self.layout = facts.layout
        self.temporaries = 0
        self.staged = staged_tiles(program, facts.ahead) if schedule.staged else {}

    def source(self) -> CudaSource:
        head, early, tail = self._tasks()
        declared = [self._declare(var) for var in self._variables() if var.name not in self.staged]
        for one in self.facts.weighted.sums.values():
            extent = self.layout.extents(one.total.type, ROW)[0]
            declared.append(f"float {emit_axis.share_name(one)}[{extent}];")
        body = self._body(self.program.body)
        launch = self.schedule.launch
        grids = BETWEEN_GRIDS[: 1 if waits_in_roles(launch) else 2] if launch.dependent else ()
        lines = [
            "extern __shared__ __align__(16) unsigned char shared[];",
            *grids,
            *self._positions(),
            *self._cluster(),
            *head,
            *indent((*declared, *early, *body)),
            *tail,
            *self._last_turn(),
        ]
        return framed(self.program, self.schedule, self.facts, lines)

    def _tasks(self) -> tuple[list[str], list[str], list[str]]:
        """The loop over tasks: its head, what a task does about later ones, and its last lines."""
        plan, blocks = self.schedule.launch, self.schedule.cluster
        start, step = first_and_stride(blocks)
        inside = position_lines(self.program, plan, loads=True, within=True)
        if not plan.persistent:
            # A block has one task: what a loop would have ready before it only delays the loads.
            head = [*count_lines(self.program, plan), f"const int task = {start};"]
            copies = self._staged_copies()
            return [*head, "if (task < tasks) {", *indent((*inside, *copies))], [], ["}"]
        if not self.facts.ahead.of_tasks:
            head, tail = task_lines(self.program, plan, sharing=blocks)
            return head, [], tail.split("\n")
        walk = Walk("task", f"int({start})", f"int({step})", "tasks", "turn", tuple(inside))
        before, first = self._early(walk, "", self.program.body)
        return (
            [
                *count_lines(self.program, plan),
                *before,
                "int turn = 0;",
                "#pragma unroll 1",
                f"for (int task = {start}; task < tasks; task += {step}, ++turn) {{",
                *indent(inside),
            ],
            first,
            ["}"],
        )

    def _staged_copies(self) -> list[str]:
        ahead = self.facts.ahead
        if not self.schedule.staged or not ahead.of_tasks:
            return []
        ring = Ring(self.facts.rings[""], ahead.stages[""], 1)
        ops = [op for op in self.program.body if isinstance(op, Op) and op.id in ahead.copies]
        copies = [self._access(op).copy_lines(ahead.slots[op.id], STAGE) for op in ops]
        return [ring.stage("0"), *(line for one in copies for line in one), "copies_commit();"]

    def _positions(self) -> list[str]:
        lanes = self.schedule.lanes
        col = "threadIdx.x" if lanes == self.schedule.threads else f"threadIdx.x % {lanes}"
        row = "0" if self.schedule.rows == 1 else f"int(threadIdx.x / {lanes})"
        if self.schedule.cluster > 1:
            col = f"cluster_rank() * {lanes} + {col}"
        return [
            f"const int thread_col = int({col});" if lanes > 1 else "const int thread_col = 0;",
            f"const int thread_row = {row};",
        ]

    def _cluster(self) -> list[str]:
        """The barrier of the blocks that share the columns; the first exchange waits until all
        blocks have theirs."""
        if self.facts.cluster_at is None:
            return []
        warps = self.schedule.cluster * self.schedule.threads // WARP
        return [
            f"const unsigned cluster_at = smem_address(shared + {self.facts.cluster_at});",
            f"constexpr bool in_turns = {'true' if self._in_turns() else 'false'};",
            "unsigned cluster_turn = 0;",
            "if (threadIdx.x == 0) {",
            "  barrier_init(cluster_at, 1);",
            f"  barrier_init(cluster_at + 8, {warps});",
            "  fence_barrier_init();",
            "}",
            "cluster_begin();",
        ]

    def _last_turn(self) -> list[str]:
        """A block is there until no other one can arrive at its barrier."""
        if self.facts.cluster_at is None or not self._in_turns():
            return []
        return ["if (cluster_turn > 0) barrier_wait(cluster_at + 8, cluster_turn - 1 & 1);"]

    def _in_turns(self) -> bool:
        """Whether the blocks of a cluster exchange more than once."""
        if self.schedule.launch.persistent or any(isinstance(i, Loop) for i in self.program.body):
            return True
        alone = self.facts.weighted.tops | self.facts.picks.keys()
        sums = [op for op in self.program.ops() if OPS[op.kind].group == "reduce"]
        sources = [op.srcs[0] for op in sums if op.id not in alone]
        axes = [op.axis for op in sums if op.id not in alone]
        forms = [axis_form(x.type, self._form(x), a) for x, a in zip(sources, axes, strict=True)]
        return forms.count(COL) > 1

    def _variables(self) -> list[Var]:
        found: dict[str, Var] = {}
        for op in self.program.ops():
            if op.dst is not None:
                found[op.dst.name] = op.dst
        return list(found.values())

    def _declare(self, var: Var) -> str:
        extents = self.layout.extents(var.type, self.facts.forms[var.name])
        word = var.type.dtype.kind
        return f"{word} {c_name(var.name)}{''.join(f'[{n}]' for n in extents)};"

    # ---- the body

    def _body(self, items: tuple[Op | Loop, ...]) -> list[str]:
        first = [
            item for item in items if isinstance(item, Op) and item.id in self.facts.ahead.first
        ]
        # Numbers of a row lead the way: what is loaded by them waits for them alone.
        first.sort(key=lambda op: op.dst is not None and self._form(op.dst) in (TILE, COL))
        lines = [line for op in first for line in self._fetch(op)]
        if self.staged and items is self.program.body:
            lines.append("copies_wait<0>();")
        staged = self.staged and items is self.program.body
        for item in self._passes() if staged else items:
            if isinstance(item, Pass):
                lines += self._pass(item)
            elif isinstance(item, Loop):
                lines += self._loop(item)
            elif item.id not in self.facts.idle:
                lines += [_note(item), *self._whole(item)]
        return lines

    def _whole(self, op: Op) -> list[str]:
        """The code of an op outside of passes: the staged tiles that it reads come before it."""
        before: list[str] = []
        if op.id not in self.facts.picks:
            for var, load, access in self._taken([op]):
                name = self._lines(load)
                taken = access.take_lines(self.facts.ahead.slots[load.id], STAGE, name)
                values = access.value_lines(name, c_name(var.name))
                before += [self._declare(var), access.declared(name), *taken, *values]
        return ["{", *indent((*before, *self._op(op))), "}"] if before else self._op(op)

    def _taken(self, ops: Sequence[Op]) -> list[tuple[Var, Op, Access]]:
        """The staged tiles that ops read, with their loads."""
        read = dict.fromkeys(src for op in ops for src in op.srcs if src.name in self.staged)
        return [(var, load := self.staged[var.name], self._access(load)) for var in read]

    def _passes(self) -> list[Op | Loop | Pass]:
        facts = self.facts
        apart, idle = facts.blocks_of_words | facts.picks.keys(), facts.idle
        tops = [one.top for one in facts.weighted.sums.values()]
        return passes(self.program, self.layout, facts.forms, self.staged, apart, idle, tops)

    def _pass(self, one: Pass) -> list[str]:
        """Ops line by line: what is taken of a staged tile is used at once."""
        vector = self.schedule.vector
        before, after, body = list[str](), list[str](), list[str]()
        for var, load, access in self._taken(one.ops):
            name = f"{c_name(var.name)}_line_at"
            before += [self._declare(var), access.declared(name)]
            body += access.of_line(access.take_lines(self.facts.ahead.slots[load.id], STAGE, name))
            body += access.of_line(access.value_lines(name, c_name(var.name)))
        for op in one.ops:
            if op.kind in ("load", "store"):
                if op.kind == "store" and op.array and op.array.name in self.facts.loaded:
                    before.append("__syncthreads();")
                access, name = self._access(op), self._lines(op)
                if op.dst is None:
                    body += access.of_line(access.store_lines(c_name(op.srcs[0].name)))
                    continue
                if op.id not in self.facts.ahead.first:
                    lines = access.load_lines(name, early=True, here=True)
                    pinned = [one.strip() for one in lines if "pinned" in one]
                    before += [access.declared(name), *pinned]
                    body += access.of_line(lines)
                body += access.of_line(access.value_lines(name, c_name(op.dst.name)))
                continue
            if OPS[op.kind].group == "reduce":
                assert op.dst is not None
                source, into = c_name(op.srcs[0].name), c_name(op.dst.name)
                first, step = emit_axis.step_lines(self.layout, op, source, into)
                before += unroll("i", self.layout.extents(op.dst.type, ROW)[0], [first])
                after += ["{", *indent(self._reduce(op, own=False)), "}"]
            else:
                _, step = self._element(op)
            body += unroll("h", vector, [f"const int j = s * {vector} + h;", step])
        variables = [var for op in one.ops for var in (*op.srcs, op.dst) if var is not None]
        extents = [self.layout.extents(var.type, self._form(var)) for var in variables]
        rows, cols = max((one for one in extents if len(one) == 2), default=(1, *extents[-1]))
        whole = unroll("i", rows, unroll("s", cols // vector, body))
        return ["{", *indent([*map(_note, one.ops), *before, *whole, *after]), "}"]

    def _loop(self, loop: Loop) -> list[str]:
        index, start, stop = c_name(loop.index), c_index(loop.start), c_index(loop.stop)
        walk = Walk(index, start, "1", stop, f"{index} - ({start})")
        before, first = self._early(walk, loop.index, loop.body)
        reads = [read_line(read, True, False) for read in loop.reads]
        return [
            "{",
            *indent(before),
            "  #pragma unroll 1",
            f"  for (int {index} = {start}; {index} < {stop}; ++{index}) {{",
            *indent(indent((*reads, *first, *self._body(loop.body)))),
            "  }",
            "}",
        ]

    def _early(
        self, walk: Walk, index: str, body: tuple[Op | Loop, ...]
    ) -> tuple[list[str], list[str]]:
        """Before a loop, and where its iterations begin: loads that run ahead."""
        ahead, ops = self.facts.ahead, [op for op in body if isinstance(op, Op)]
        slots = [(op, ahead.slots.get(op.id)) for op in ops if op.id in ahead.copies | ahead.next]
        early = [
            Early(self._access(op), self._lines(op), c_name(op.dst.name), slot)
            for op, slot in slots
            if op.dst is not None
        ]
        copied = [one for one in early if one.slot]
        carried = [one for one in early if not one.slot]
        before, first = carried_lines(walk, carried) if carried else ([], [])
        if copied:
            ring = Ring(self.facts.rings[index], ahead.stages[index], self.schedule.stages)
            start, head = ring_lines(walk, copied, ring)
            before, first = [*start, *before], [*head, *first]
        return before, first

    def _access(self, op: Op) -> Access:
        var = op.srcs[0] if op.dst is None else op.dst
        return Access(self.layout, op, var.type, self._form(var))

    @staticmethod
    def _lines(op: Op) -> str:
        """The name of what a load reads, as it is in memory."""
        return f"lines{op.id}_at"

    def _pair_access(self, op: Op) -> PairAccess:
        var = op.srcs[0] if op.dst is None else op.dst
        return PairAccess(self.layout, op, var.type, self._form(var))

    def _fetch(self, op: Op) -> list[str]:
        if pair := self.facts.interleaved.get(op.id):
            if op.id != pair[0].id:
                return []
            both, name = self._pair_access(op), self._lines(op)
            here = op.array is not None and op.array.name in self.facts.stored
            return [both.declared(name), *both.pair_lines(name, here)]
        access, name = self._access(op), self._lines(op)
        early, once = op.id in self.facts.early, op.id in self.facts.once
        return [access.declared(name), *access.load_lines(name, early, once)]

    def _op(self, op: Op) -> list[str]:
        if op.kind == "load":
            return self._load(op)
        if op.kind in ("store", "store_add"):
            return self._store(op)
        group = OPS[op.kind].group
        if op.kind in EXCHANGES:
            lines = self._exchange(op)
        elif group == "reduce":
            lines = self._reduce(op)
        elif group == "scan":
            source = op.srcs[0]
            form = self._form(source)
            into = self._into(op, form)
            lines = emit_axis.scan_lines(self.layout, op, form, c_name(source.name), into[0])
            lines = [*into[1], *lines, *into[2]]
        else:
            return self._map(op)
        return ["{", *indent(lines), "}"]

    def _form(self, var: Var) -> str:
        return self.facts.forms[var.name]

    def _temporary(self, kind: TileType, form: str) -> tuple[str, str]:
        """(name, declaration) of a variable of one op."""
        name = f"held{self.temporaries}_at"
        self.temporaries += 1
        extents = "".join(f"[{n}]" for n in self.layout.extents(kind, form))
        return name, f"{kind.dtype.kind} {name}{extents};"

    def _operand(self, var: Var, wanted: str) -> tuple[str, list[str]]:
        """(name, lines before) of a variable in the form that is wanted."""
        form = self._form(var)
        if not converts(form, wanted):
            return c_name(var.name), []
        name, declaration = self._temporary(var.type, wanted)
        lines = emit_exchange.convert_lines(
            self.layout, var.type, form, wanted, c_name(var.name), name
        )
        return name, [declaration, *lines]

    def _into(self, op: Op, form: str) -> tuple[str, list[str], list[str]]:
        """(name to write in that form, lines before, lines after) for an op's result."""
        assert op.dst is not None
        own = self._form(op.dst)
        if own == form:
            return c_name(op.dst.name), [], []
        name, declaration = self._temporary(op.dst.type, form)
        after = emit_exchange.convert_lines(
            self.layout, op.dst.type, form, own, name, c_name(op.dst.name)
        )
        return name, [declaration], after

    def _element(self, op: Op) -> tuple[list[str], str]:
        """(lines before, a statement) of an op that computes each element by itself."""
        before, operands = self._operands(op)
        assert op.dst is not None
        form, name = self._form(op.dst), c_name(op.dst.name)
        exact = op.dst.name in self.facts.stored_only
        value = expression(self.layout, op, form, operands, exact)
        return before, f"{name}{NAMES[form]} = {value};"

    def _operands(self, op: Op) -> tuple[list[str], list[str]]:
        assert op.dst is not None
        form = self._form(op.dst)
        before: list[str] = []
        operands: list[str] = []
        for src in op.srcs:
            wanted = wanted_form(op.dst.type, form, src.type)
            name, lines = self._operand(src, wanted)
            before += lines
            own = SCALAR if self._form(src) == SCALAR else wanted
            operands.append(f"{name}{NAMES[own]}")
        if op.id in self.facts.weighted.products:
            at, one = self.facts.weighted.products[op.id]
            operands[at] = f"({operands[at]} * {emit_axis.share_name(one)}[i])"
        return before, operands

    def _map(self, op: Op) -> list[str]:
        assert op.dst is not None
        if op.id in self.facts.blocks_of_words:
            return philox_lines(self.layout, op, *self._operands(op))
        before, element = self._element(op)
        form, line = self._form(op.dst), [element]
        extents = self.layout.extents(op.dst.type, form)
        if form in (TILE, COL):
            line = unroll("j", extents[-1], line)
        if form in (TILE, ROW):
            line = unroll("i", extents[0], line)
        return ["{", *[f"  {text}" for text in (*before, *line)], "}"] if before else line

    def _reduce(self, op: Op, own: bool = True) -> list[str]:
        """A reduction; without `own`, `op.dst` has what a thread's own elements give."""
        assert op.dst is not None
        source = op.srcs[0]
        form = self._form(source)
        if pick := self.facts.picks.get(op.id):
            into, before, after = self._into(op, ROW)
            stored = pick.load.array is not None and pick.load.array.name in self.facts.stored
            return [*before, *emit_axis.pick_lines(self.layout, pick, into, stored), *after]
        weighted, name = self.facts.weighted, c_name(source.name)
        if op.id in weighted.tops:
            return emit_axis.own_top_lines(self.layout, op, name, c_name(op.dst.name), own)
        if one := weighted.sums.get(op.id):
            into = c_name(op.dst.name)
            return emit_axis.weighted_sum_lines(self.layout, op, one, name, into, own)
        if not own:
            return emit_axis.shared_lines(self.layout, op, c_name(op.dst.name))
        make = emit_axis.argmax_lines if op.kind == "argmax" else emit_axis.reduce_lines
        if form != TILE:
            return make(self.layout, op, form, c_name(source.name), f"&{c_name(op.dst.name)}")
        along = axis_form(source.type, form, op.axis)
        name, before, after = self._into(op, ROW if along == COL else COL)
        return [*before, *make(self.layout, op, form, c_name(source.name), name), *after]

    def _exchange(self, op: Op) -> list[str]:
        assert op.dst is not None
        source = op.srcs[0]
        form, name = self._form(source), c_name(source.name)
        into, before, after = self._into(op, form)
        if op.kind == "transpose" and form == TILE:
            lines = emit_exchange.transpose_lines(self.layout, op, name, into)
        elif op.kind == "transpose":
            lines = self._copy(op, form, name, into)
        elif op.kind == "slice":
            lines = emit_exchange.slice_lines(self.layout, op, form, name, into)
        elif op.kind == "quad_order":
            lines = emit_exchange.quad_lines(self.layout, op, form, name, into)
        else:
            index = op.srcs[1]
            wanted = wanted_form(op.dst.type, form, index.type)
            where, needed_lines = self._operand(index, wanted)
            before += needed_lines
            element = f"{where}{NAMES[wanted]}"
            lines = emit_exchange.gather_lines(self.layout, op, form, name, element, into)
        return [*before, *lines, *after]

    def _copy(self, op: Op, form: str, source: str, into: str) -> list[str]:
        # A vector transposed is the vector.
        assert op.dst is not None
        extents = self.layout.extents(op.dst.type, form)
        if form == SCALAR:
            return [f"{into} = {source};"]
        name = "i" if form == ROW else "j"
        return unroll(name, extents[0], [f"{into}[{name}] = {source}[{name}];"])

    def _load(self, op: Op) -> list[str]:
        assert op.dst is not None and op.array is not None
        if pair := self.facts.interleaved.get(op.id):
            part, name = int(op.id == pair[1].id), self._lines(pair[0])
            values = self._pair_access(op).part_lines(name, c_name(op.dst.name), part)
            return values if op.id in self.facts.ahead.first else [*self._fetch(op), *values]
        values = self._access(op).value_lines(self._lines(op), c_name(op.dst.name))
        ahead = self.facts.ahead
        if op.id in ahead.next:
            return []
        if op.id in ahead.first:
            return values
        if slot := ahead.slots.get(op.id):
            access, name = self._access(op), self._lines(op)
            taken = access.take_lines(slot, STAGE, name)
            return ["{", *indent([access.declared(name), *taken, *values]), "}"]
        # What other threads of the block stored before is read only after all of them did.
        sync = ["__syncthreads();"] if op.array.name in self.facts.stored else []
        return ["{", *indent([*sync, *self._fetch(op), *values]), "}"]

    def _store(self, op: Op) -> list[str]:
        assert op.array is not None
        if pair := self.facts.interleaved.get(op.id):
            if op.id == pair[0].id:
                return []  # written with the other one
            names = [c_name(one.srcs[0].name) for one in pair]
            lines = self._pair_access(pair[0]).store_pair_lines(names[0], names[1])
        else:
            lines = self._access(op).store_lines(c_name(op.srcs[0].name))
        return ["__syncthreads();", *lines] if op.array.name in self.facts.loaded else lines


def _note(op: Op) -> str:
    return f"// {op}  {op.where.rsplit('/', 1)[-1]}"
