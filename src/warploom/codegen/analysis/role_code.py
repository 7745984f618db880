"""The code of each role: its steps, with what a warp leaves out and where sums begin at zero.

*requires*  a block program; skips as its launch plan asks for them
*before -> after*  `Run f` -> `if (!(guard)) Run f`, and of neighbouring steps under votes of a warp
                   one test for all of them, or one within another:
                   `if (!all(a)) x; if (!all(a)) y` -> `if (!all(a)) { x; y }`
                   `if (!all(a)) x; if (!all(ab)) y` -> `if (!all(ab)) { if (!all(a)) x; y }`
*keeps*  the order of steps and every value that is read; where the outer condition of two holds,
         one vote is left of them
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from warploom.codegen.analysis.exchanges import crosses_rows, exchanges
from warploom.codegen.analysis.guards import Always, Everywhere, Guard, Place, UnitRows, Vote
from warploom.codegen.analysis.register_tiles import RegisterTiles
from warploom.codegen.analysis.uniform import everywhere
from warploom.codegen.analysis.voted_skip import skip_guard
from warploom.codegen.ir.block import BlockProgram, Pipeline, Role, Section, Straight, with_turns
from warploom.codegen.ir.plan import LaunchPlan
from warploom.codegen.ir.steps import Issue, Join, Meet, OpStep, Release, Run, Step, Wait
from warploom.errors import InputError
from warploom.tile import Loop, Op, Program

# Ops that run along the columns have code of their own and are never left out.
WHOLE = ("argmax", "cumsum", "slice")


@dataclass(frozen=True)
class Guarded:
    """Steps that a warp leaves out where the guard holds."""

    guard: Guard
    body: tuple[Code, ...]


@dataclass(frozen=True)
class InTurn:
    """Steps of which one group in turn does all, and the others some: both are written out, so that
    ptxas follows the matmuls of each way. Between them stand no waits for slots."""

    own: tuple[Step, ...]
    others: tuple[Step, ...]


Code = Step | Guarded | InTurn
Steps = tuple[Code, ...]
Iterations = tuple[tuple[Steps, ...], Steps, tuple[Steps, ...], Steps]
"""Of a pipeline: prologue, steady iteration, epilogue, and the iteration of the plain loop."""


@dataclass(frozen=True)
class LoopCode:
    """A pipeline with its steps as code: the fields are those of `Pipeline`. What the section does
    where an iteration is left out or there is none (waits, releases, turns) is code as it stands.

    by_iteration  rings whose slot is read stages after its wait: there the slot follows from the
                  iteration, and is not that of the latest wait
    zeroed        fills of sums that are zeroed after the loop where no matmul has run in it
    """

    section: Pipeline
    prologue: tuple[Steps, ...]
    steady: Steps
    epilogue: tuple[Steps, ...]
    plain: Steps
    by_iteration: frozenset[str]
    zeroed: tuple[Op, ...]


@dataclass(frozen=True)
class RoleCode:
    """A role with the code of its sections."""

    role: Role
    sections: tuple[tuple[Code, ...] | LoopCode, ...]


@dataclass(frozen=True)
class Skips:
    """What a launch plan lets a warp leave out: products with factors of 1, and corrections that
    its vote says no row needs."""

    unit: bool = False
    voted: bool = False

    @classmethod
    def of(cls, plan: LaunchPlan) -> Skips:
        """What a launch plan lets be left out."""
        return cls(plan.skip_unit, plan.skip_voted)


def guard_of(tiles: RegisterTiles, op: Op, skips: Skips, at: Place | None = None) -> Guard | None:
    """When a warp may leave an op out at a place; None: never.

    An op in which the warps of a group exchange elements is not left out by one of them.
    """
    placement, place = tiles.placement, at or Place()
    if op.dst is None or op.kind in WHOLE:
        return None
    if crosses_rows(placement, op) or exchanges(placement, op):
        return None
    if skips.voted and (found := skip_guard(tiles, op, place)) is not None:
        return None if found == Always(False) else found
    if tiles.form(op.dst.type) != "tile" or op.dst not in op.srcs:
        return None
    if op.kind == "where" and op.srcs[1] == op.dst:
        test = everywhere(tiles, op.srcs[0])
        return None if test is None else Everywhere(test)
    factor = op.srcs[-1]
    if (
        skips.unit
        and op.kind == "mul"
        and op.srcs[0] == op.dst
        and tiles.form(factor.type) == "row"
        and factor.name not in placement.fusion.inlined
    ):
        return UnitRows(factor.name, tiles.blocks(op.dst.type))
    return None


def overwritten(program: Program) -> frozenset[str]:
    """Sums that are only zeroed before, and only added to by, one loop: the first matmul there
    overwrites them, which costs nothing, and they are zeroed only where none has run."""
    inside = {o.id for loop in program.loops() for o in loop.body if isinstance(o, Op)}
    found: set[str] = set()
    for op in program.ops():
        if op.kind != "mma" or len(op.srcs) != 3 or op.dst is None or op.id not in inside:
            continue
        touching = [o for o in program.ops() if o.dst == op.dst or op.dst in o.srcs]
        before = [o for o in touching if o.id <= op.id]
        if (
            [o.kind for o in before] == ["fill", "mma"]
            and before[0].value == 0
            and before[0].id not in inside
            and sum(o.id in inside for o in touching) == 1
        ):
            found.add(op.dst.name)
    return frozenset(found)


def role_code(block: BlockProgram, role: Role, sums: frozenset[str]) -> RoleCode:
    """The code of a role; `sums` are those that the first matmul overwrites."""
    return _Coder(block, role, sums).result()


@dataclass
class _Coder:
    """Walks the sections of a role in the order of its code and keeps what is known of tiles."""

    block: BlockProgram
    role: Role
    sums: frozenset[str]
    known: dict[str, float] = field(default_factory=dict[str, float])

    def __post_init__(self) -> None:
        self.tiles = RegisterTiles(self.block.placement)
        self.skips = Skips.of(self.block.launch)

    def result(self) -> RoleCode:
        return RoleCode(self.role, tuple(self._section(one) for one in self.role.sections))

    def _section(self, section: Section) -> tuple[Code, ...] | LoopCode:
        if isinstance(section, Straight):
            return tuple(self._single(step, (), {}) for step in section.steps)
        assert isinstance(section, Pipeline), "only a block program after all passes is emitted"
        return self._loop(section)

    def _loop(self, section: Pipeline) -> LoopCode:
        order = {
            step.op.id: (step.stage, place)
            for place, step in enumerate(section.steady)
            if isinstance(step, OpStep)
        }
        made = self._rolled(section, order)
        self.known.clear()
        return LoopCode(
            section,
            *made,
            by_iteration=_by_iteration(self.block, section) if self.role.computes else frozenset(),
            zeroed=self._zeroed(section.loop) if self.role.computes else (),
        )

    def _rolled(self, section: Pipeline, order: Mapping[int, tuple[int, int]]) -> Iterations:
        """What is known before the loop holds in the iteration that is started ahead; the loop may
        have run or not, so that nothing is known after it."""
        prologue: list[tuple[Code, ...]] = []
        for steps in section.prologue:
            ops = tuple(step.op.id for step in steps if isinstance(step, OpStep))
            prologue.append(self._joined(steps, ops if section.depth == 1 else (), order))
        self.known.clear()
        steady = self._joined(section.steady, (), order)
        self.known.clear()
        epilogue = tuple(self._joined(steps, (), order) for steps in section.epilogue)
        self.known.clear()
        plain = self._joined(section.plain, (), order)
        return tuple(prologue), steady, epilogue, plain

    def _zeroed(self, loop: Loop) -> tuple[Op, ...]:
        added = {o.dst.name for o in loop.body if isinstance(o, Op) and o.dst is not None}
        fills = {
            op.dst.name: op
            for op in reversed(tuple(self.block.placement.program.ops()))
            if op.kind == "fill" and op.dst is not None
        }
        return tuple(fills[name] for name in sorted(self.sums & added))

    def _single(
        self, step: Step, straight: tuple[int, ...], order: Mapping[int, tuple[int, int]]
    ) -> Code:
        """One step by itself; afterwards what it writes is known, or known no more."""
        code = self._code(step, Place(dict(self.known), straight, order))
        if isinstance(step, OpStep) and step.op.dst is not None:
            self.known.pop(step.op.dst.name, None)
            if step.op.kind == "fill":
                self.known[step.op.dst.name] = float(step.op.value or 0)
        return code

    def _code(self, step: Step, at: Place) -> Code:
        guard = None
        if isinstance(step, Run):
            guard = guard_of(self.tiles, step.op, self.skips, at)
        return step if guard is None else Guarded(guard, (step,))

    def _joined(
        self, steps: Sequence[Step], straight: tuple[int, ...], order: Mapping[int, tuple[int, int]]
    ) -> tuple[Code, ...]:
        codes = _Joining(self.block)
        for step in steps:
            codes.add(step, self._single(step, straight, order))
        return self._in_turn(codes.found)

    def _in_turn(self, codes: Sequence[Code]) -> tuple[Code, ...]:
        """The steps of an iteration with those apart that groups do in turn, from the meeting
        before the first of them to the last."""
        placement = self.block.placement
        own = [(n, op) for n, (_, op) in enumerate(with_turns(placement, codes)) if op is not None]
        if not own or not self.role.computes:
            return tuple(codes)
        first, last = own[0][0], own[-1][0] + 1
        first -= isinstance(codes[first - 1], Meet)
        made = {op.dst.name for _, op in own if op.dst is not None}
        every, others = list[Step](), list[Step]()
        for number, step in enumerate(codes[first:last], first):
            if not isinstance(step, Meet | Issue | Join | Run | Release):
                raise InputError(
                    f"{own[0][1].where}: groups do {own[0][1].label} to {own[-1][1].label} in "
                    f"turn, and {step} comes between; expected matmuls and stores alone"
                )
            every.append(step)
            if number not in dict(own):
                join = isinstance(step, Join)
                names = tuple(n for n in step.names if n not in made) if join else ()
                others.append(replace(step, names=names) if join else step)
        return *codes[:first], InTurn(tuple(every), tuple(others)), *codes[last:]


class _Joining:
    """Puts steps under the votes of their neighbours where that keeps every value."""

    def __init__(self, block: BlockProgram) -> None:
        self.fusion, self.staged = block.placement.fusion, block.placement.staged
        self.found: list[Code] = []
        self.open = False  # whether the last code is a vote that others may join
        self.written: set[str] = set()  # in it

    def add(self, step: Step, code: Code) -> None:
        """The next step, as it is by itself."""
        dst = step.op.dst if isinstance(step, OpStep) else None
        name = "" if dst is None else dst.name
        # What a matmul reads from shared memory is copied there by the whole group.
        votes = isinstance(code, Guarded) and isinstance(code.guard, Vote | UnitRows)
        votes = votes and name not in self.staged
        last = self.found[-1] if self.open else None
        joined = None
        if votes and isinstance(code, Guarded) and isinstance(last, Guarded):
            joined = self._join(last, code)
        if joined is not None:
            self.found[-1] = joined
            self.written.add(name)
            return
        self.found.append(code)
        self.open, self.written = votes, {name}

    def _join(self, last: Guarded, new: Guarded) -> Guarded | None:
        outer, inner = new.guard, last.guard
        if isinstance(outer, Vote) and isinstance(inner, Vote):
            read = {var.name for var in self.fusion.sources(self.fusion.inlined[outer.condition])}
            if read & self.written or not self._implies(outer.condition, inner.condition):
                return None
        elif outer != inner:
            return None
        if outer == inner:
            return Guarded(inner, (*last.body, *new.body))
        return Guarded(outer, (last, *new.body))

    def _implies(self, outer: str, inner: str) -> bool:
        """Whether one condition holds wherever another does, as their forms show."""
        op = self.fusion.inlined.get(outer)
        if outer == inner or op is None or op.kind != "and":
            return outer == inner
        return any(self._implies(src.name, inner) for src in op.srcs)


def first_step(code: Code) -> Step:
    """The first of the steps of some code."""
    while not isinstance(code, Step):
        code = code.body[0] if isinstance(code, Guarded) else code.own[0]
    return code


def _by_iteration(block: BlockProgram, section: Pipeline) -> frozenset[str]:
    waits = {s.ring: s.stage for s in section.steady if isinstance(s, Wait)}
    return frozenset(
        ring.name
        for step in section.steady
        if isinstance(step, OpStep)
        for ring in block.rings_read(step.op)
        if ring.name in waits and waits[ring.name] != step.stage
    )
