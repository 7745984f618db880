"""The text of a block program, which parses back: passes are read and tested as text.

The text has all that the block program has beside the tile program: ops stand in it by label
(`mma.3`), and where tiles live follows from the program, the launch plan and the number of groups.

    block program attention, schedule "overlapped"
      launch {"split": "rows"}
      ring k x2: load.31 (4096 B a slot)
      role compute0: 4 warps, 240 registers, part 0
        straight
          Wait q
        loop block, 1 started ahead
          prologue 0
            Wait k
          steady
            Issue mma.32
            Run exp2.40 (iteration -1)
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace

from warploom.codegen.ir import steps
from warploom.codegen.ir.block import (
    TRANSPOSES,
    At,
    BlockProgram,
    Pipeline,
    Ring,
    Role,
    Scheduled,
    Section,
    Straight,
    make_ring,
)
from warploom.codegen.ir.place import Placement, placed_for
from warploom.codegen.ir.plan import LaunchPlan
from warploom.errors import InputError
from warploom.tile import Op, Program

ONCE = ("steady", "plain", "skip", "empty", "none")  # blocks of a pipeline that it has one of
ON_RING = {
    kind.__name__: kind for kind in (steps.Acquire, steps.Publish, steps.Wait, steps.Release)
}
OF_OP = {kind.__name__: kind for kind in (steps.Run, steps.Take, steps.Send)}
OF_GROUP = {
    kind.__name__: kind
    for kind in (
        steps.GroupSync,
        steps.FencedGroupSync,
        steps.PanelSync,
        steps.TurnWait,
        steps.TurnPass,
        steps.Ahead,
    )
}
LAG = r"(?: \(iteration -(\d+)\))?"

Line = tuple[int, str]  # number and text, without the spaces around it


def block_text(block: BlockProgram) -> str:
    """The block program as text."""
    usual = asdict(LaunchPlan())
    launch = {name: value for name, value in asdict(block.launch).items() if value != usual[name]}
    program = block.placement.program.name
    lines = [f"block program {program}, schedule {json.dumps(block.name)}"]
    lines += [f"  launch {json.dumps(launch)}"] if launch else []
    lines += ["  pingpong"] if block.pingpong else []
    for ring in block.rings:
        inner = ", ".join("/".join(op.label for op in buffer.loads) for buffer in ring.buffers)
        lines.append(f"  ring {ring.name} x{ring.depth}: {inner} ({ring.slot_bytes} B a slot)")
    for role in block.roles:
        part = f", part {role.part}" if role.computes else ", transposes" * role.transposes
        lines.append(f"  role {role.name}: {role.warps} warps, {role.registers} registers{part}")
        lines += [f"    ahead: {step}" for step in role.ahead]
        lines += [f"    {line}" for section in role.sections for line in _section_lines(section)]
    return "\n".join(lines) + "\n"


def _section_lines(section: Section) -> Iterator[str]:
    if isinstance(section, Straight):
        yield "straight"
        yield from (f"  {step}" for step in section.steps)
        return
    if isinstance(section, Scheduled):
        yield f"loop {section.loop.index}, every {section.interval} cycles"
    else:
        yield f"loop {section.loop.index}, {section.depth} started ahead"
    if isinstance(section, Scheduled):
        yield from (f"  at {at.time}: {at.step}" for at in section.steps)
        return
    blocks = {f"prologue {n}": body for n, body in enumerate(section.prologue)}
    blocks["steady"] = section.steady
    blocks |= {f"epilogue {n}": body for n, body in enumerate(section.epilogue)}
    blocks |= {name: getattr(section, name) for name in ONCE[1:]}
    for name, body in blocks.items():
        if body:
            yield f"  {name}"
            yield from (f"    {step}" for step in body)


def parse_block(text: str, program: Program) -> BlockProgram:
    """The block program of a text; raises `InputError` with the line that is wrong."""
    lines = [(n, line.strip()) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    head, *roles = _split(lines, "role ")
    if not head:
        raise InputError("block program: no line says which program it is of")
    name, schedule = _match(head[0], r"block program (\S+), schedule (\".*\")")
    if name != program.name:
        raise InputError(f"block program of {name}, but the tile program is {program.name}")
    launch, pingpong = LaunchPlan(), False
    rings: list[Line] = []
    for line in head[1:]:
        if line[1].startswith("launch "):
            launch = _launch(line)
        elif line[1] == "pingpong":
            pingpong = True
        else:
            rings.append(line)
    parts = sum(", part " in lines[0][1] for lines in roles)
    named = {label for line in rings for label in re.findall(r"load\.\d+", line[1])}
    loads = [op.dst for op in program.ops() if op.kind == "load" and op.label in named]
    vectors = any(var is not None and len(var.type.axes) == 1 for var in loads)
    placed = placed_for(program, launch, parts, vectors)
    placement = replace(placed, whole=launch.overlap_next_task)
    reader = _Reader(placement)
    return BlockProgram(
        json.loads(schedule),
        placement,
        launch,
        pingpong,
        tuple(reader.ring(line) for line in rings),
        tuple(reader.role(lines) for lines in roles),
    )


class _Reader:
    """Reads what refers to ops of the program."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.ops = {op.label: op for op in placement.program.ops()}
        self.loops = {loop.index: loop for loop in placement.program.loops()}

    def ring(self, line: Line) -> Ring:
        name, depth, inner, size = _match(line, r"ring (\S+) x(\d+): (.+) \((\d+) B a slot\)")
        columns = [[self._op(line, one) for one in part.split("/")] for part in inner.split(", ")]
        if odd := [op.label for column in columns for op in column if not self._shared(op)]:
            raise _wrong(line, f"{odd[0]} loads nothing into shared memory")
        ring = make_ring(self.placement, name, int(depth), columns)
        if ring.slot_bytes != int(size):
            raise _wrong(line, f"a slot of {name} has {ring.slot_bytes} B")
        return ring

    def role(self, lines: Sequence[Line]) -> Role:
        form = r"role (.+): (\d+) warps, (\d+) registers(?:, part (\d+)|, (transposes))?"
        name, warps, registers, part, transposes = _match(lines[0], form)
        before, *sections = _split(lines[1:], "straight", "loop ")
        ahead: list[steps.Wait | steps.Issue] = []
        for line in before:
            step = self._step(line, *_match(line, r"ahead: (.+)"))
            if not isinstance(step, steps.Wait | steps.Issue):
                raise _wrong(line, "only waits and a matmul are done ahead of a task")
            ahead.append(step)
        return Role(
            name,
            int(warps),
            int(registers),
            tuple(map(self._section, sections)),
            int(part) if part else TRANSPOSES if transposes else -1,
            tuple(ahead),
        )

    def _section(self, lines: Sequence[Line]) -> Section:
        first, *inner = lines
        if first[1] == "straight":
            return Straight(tuple(self._step(line, line[1]) for line in inner))
        form = r"loop (\S+), (?:every (\d+) cycles|(\d+) started ahead)"
        index, interval, depth = _match(first, form)
        if index not in self.loops:
            raise _wrong(first, f"the program has no loop {index}; it has {sorted(self.loops)}")
        loop = self.loops[index]
        if interval:
            return Scheduled(loop, int(interval), tuple(map(self._at, inner)))
        stray, *parts = _split(inner, "prologue ", "epilogue ", *ONCE)
        if stray:
            raise _wrong(stray[0], "no block of the loop has begun")
        blocks = {
            _match(part[0], rf"((?:pro|epi)logue \d+|{'|'.join(ONCE)})")[0]: tuple(
                self._step(line, line[1]) for line in part[1:]
            )
            for part in parts
        }
        return Pipeline(
            loop,
            int(depth),
            _numbered(blocks, "prologue", int(depth)),
            epilogue=_numbered(blocks, "epilogue", int(depth)),
            **{name: blocks.get(name, ()) for name in ONCE},
        )

    def _at(self, line: Line) -> At:
        time, text = _match(line, r"at (-?\d+): (.+)")
        step = self._step(line, text)
        if not isinstance(step, steps.RingStep | steps.OpStep):
            raise _wrong(line, "belongs to no iteration, so it has no time")
        return At(int(time), step)

    def _step(self, line: Line, text: str) -> steps.Step:
        if text in OF_GROUP:
            return OF_GROUP[text]()
        if text.startswith("Join "):
            return self._join(line, text)
        if text.startswith("Share "):
            return self._share(line, text)
        form = rf"(\w+) (\S+?)(?: into (\S+))?{LAG}(?:, turn (\d+))?"
        kind, what, ring, lag, turn = _match((line[0], text), form)
        stage = int(lag or 0)
        if kind == "Issue":
            return steps.Issue(self._op(line, what), stage, int(turn) if turn else None)
        if kind == "Fill" and ring:
            return steps.Fill(self._op(line, what), ring, stage)
        if kind in OF_OP:
            return OF_OP[kind](self._op(line, what), stage)
        if kind in ON_RING:
            return ON_RING[kind](what, stage)
        if kind == "Meet":
            return self._meet(line, what, stage)
        raise _wrong(line, f"no step is called {kind}")

    def _meet(self, line: Line, tile: str, stage: int) -> steps.Meet:
        if tile not in self.placement.common | self.placement.handed:
            raise _wrong(line, f"groups write no part of {tile} into shared memory")
        return steps.Meet(tile, stage)

    def _share(self, line: Line, text: str) -> steps.Share:
        names, lag = _match((line[0], text), rf"Share (\S+(?:, \S+)*?){LAG}")
        tiles = tuple(names.split(", "))
        if odd := set(tiles) - self.placement.spread:
            raise _wrong(line, f"{min(odd)} is no vector that a group shares")
        return steps.Share(tiles, int(lag or 0))

    def _join(self, line: Line, text: str) -> steps.Join:
        form = r"Join( in turn)? <= (\d+)(?:: (.+))?"
        own, count, names = _match((line[0], text), form)
        return steps.Join(int(count), tuple(one for one in names.split(", ") if one), bool(own))

    def _op(self, line: Line, label: str) -> Op:
        if label not in self.ops:
            raise _wrong(line, f"the program has no op {label}")
        return self.ops[label]

    def _shared(self, op: Op) -> bool:
        return op.dst is not None and self.placement.is_shared(op.dst)


def _launch(line: Line) -> LaunchPlan:
    try:
        given = json.loads(line[1].removeprefix("launch "))
        return LaunchPlan.from_json({**asdict(LaunchPlan()), **given})
    except (TypeError, ValueError) as error:
        raise _wrong(line, f"no launch plan: {error}") from None


def _numbered(
    blocks: Mapping[str, tuple[steps.Step, ...]], name: str, least: int
) -> tuple[tuple[steps.Step, ...], ...]:
    """The prologue or epilogue: `least` blocks, or more where there are more."""
    numbers = [int(key.split()[1]) for key in blocks if key.startswith(name)]
    count = max(least, 1 + max(numbers, default=-1))
    return tuple(blocks.get(f"{name} {number}", ()) for number in range(count))


def _split(lines: Sequence[Line], *starts: str) -> list[list[Line]]:
    """What stands before the first line that begins so, then a list from each such line on."""
    result: list[list[Line]] = [[]]
    for line in lines:
        if line[1].startswith(starts):
            result.append([])
        result[-1].append(line)
    return result


def _match(line: Line, form: str) -> tuple[str, ...]:
    """The groups of a line, "" for one that is not there."""
    found = re.fullmatch(form, line[1])
    if found is None:
        raise _wrong(line, f"expected {form}")
    return found.groups("")


def _wrong(line: Line, why: str) -> InputError:
    return InputError(f"block program, line {line[0]}: {line[1]!r}: {why}")
