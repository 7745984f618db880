"""Webs: the definitions and uses that must share a register, and where each web is live.

A web is a set of definitions joined by common uses. Webs of one multi-register operand (a pair, a
quad) are tied into a group that moves as a whole, by one distance. A group is *free to move* when
nothing else depends on its register numbers: no value from before the kernel, no asynchronous
matrix instruction, no call, no table that names the instruction.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from warploom.sass.decode import nvinfo
from warploom.sass.decode.cubin import WORD_BYTES
from warploom.sass.decode.kernel import GROUP_SLOT, Instruction, Kernel
from warploom.sass.decode.opcodes import UNKNOWN, Pipe
from warploom.sass.decode.resources import Access
from warploom.sass.decode.special_forms import SPECIAL_FORMS
from warploom.sass.flow.liveness import live_registers

_Reaching = dict[int, frozenset[int]]
STACK: Final = 1  # R1 is the stack pointer by convention
FIXED_BASES: Final = frozenset("CALL RET BRX JMX RPCMOV WARPGROUP USETMAXREG BMOV R2B B2R".split())


@dataclass(frozen=True)
class Group:
    """Webs that move together. `members`: (definition ids, register); `width` of the widest tie.

    `live` are the instructions after whose issue a member is live or which touch a member.
    """

    number: int
    registers: tuple[int, ...]
    width: int
    live: frozenset[int]
    touched: frozenset[int]
    movable: bool


class Webs:
    """The webs of a kernel. Definition ids are (instruction, resource) pairs, numbered."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self._ids: dict[tuple[int, int], int] = {}
        for item in kernel.instructions:
            for access in item.effects.writes:
                self._ids.setdefault((item.index, access.resource), len(self._ids))
        self._entry_base = len(self._ids)
        self._parent = list(range(self._entry_base + 1024))
        self._names = {number: pair for pair, number in self._ids.items()}
        self.live_out = live_registers(kernel).after
        self._at_entry = self._reaching_blocks()
        self._before: list[_Reaching] = []
        self._walk()
        self.groups = self._tie()

    # --- reaching definitions --------------------------------------------------------------

    def _entry_id(self, resource: int) -> int:
        return self._entry_base + resource

    def _reaching_blocks(self) -> list[_Reaching]:
        entry: list[_Reaching] = [{} for _ in self.kernel.blocks]
        entry[0] = {resource: frozenset((self._entry_id(resource),)) for resource in range(528)}
        pending = list(range(len(self.kernel.blocks)))
        while pending:
            number = pending.pop(0)
            block = self.kernel.blocks[number]
            state = dict(entry[number])
            for item in self.kernel.items(block):
                self._step(state, item)
            for successor in block.successors:
                target, grown = entry[successor], False
                for resource, ids in state.items():
                    before = target.get(resource, frozenset())
                    if not ids <= before:
                        target[resource] = before | ids
                        grown = True
                if grown and successor not in pending:
                    pending.append(successor)
        return entry

    def _step(self, state: _Reaching, item: Instruction) -> None:
        for access in item.effects.writes:
            mine = frozenset((self._ids[item.index, access.resource],))
            kept = state.get(access.resource) if item.effects.partial else None
            state[access.resource] = mine if kept is None else kept | mine

    def _walk(self) -> None:
        """Remember what reaches every instruction, and join the definitions of every use."""
        for block in self.kernel.blocks:
            state = dict(self._at_entry[block.index])
            for item in self.kernel.items(block):
                here: _Reaching = {}
                for access in (*item.effects.reads, *item.effects.writes):
                    here[access.resource] = state.get(access.resource, frozenset())
                self._before.append(here)
                for access in item.effects.reads:
                    ids = sorted(here[access.resource])
                    for other in ids[1:]:
                        self._join(ids[0], other)
                if item.effects.partial:
                    for access in item.effects.writes:
                        for other in here[access.resource]:
                            self._join(self._ids[item.index, access.resource], other)
                self._step(state, item)

    def _join(self, one: int, other: int) -> None:
        self._parent[self._root(one)] = self._root(other)

    def _root(self, number: int) -> int:
        while self._parent[number] != number:
            self._parent[number] = self._parent[self._parent[number]]
            number = self._parent[number]
        return number

    def web_of_write(self, index: int, resource: int) -> int:
        """The web an instruction's result belongs to."""
        return self._root(self._ids[index, resource])

    def web_of_read(self, index: int, resource: int) -> int | None:
        """The web of the value an instruction reads; None when nothing reaches it."""
        ids = self._before[index][resource]
        return self._root(next(iter(ids))) if ids else None

    def sources(self, index: int) -> list[list[tuple[int, int]]]:
        """For each read of an instruction, where its value may come from: (instruction, which of
        its results), or (-1, register) for a value from before the kernel."""
        found: list[list[tuple[int, int]]] = []
        for access in self.kernel.instructions[index].effects.reads:
            origins: list[tuple[int, int]] = []
            for number in self._before[index][access.resource]:
                if number >= self._entry_base:
                    origins.append((-1, number - self._entry_base))
                else:
                    writer, resource = self._names[number]
                    writes = self.kernel.instructions[writer].effects.writes
                    slots = [write.resource for write in writes]
                    origins.append((writer, slots.index(resource)))
            found.append(origins)
        return found

    # --- groups ----------------------------------------------------------------------------

    def _tie(self) -> list[Group]:
        """Webs tied by multi-register operands, with what pins them and where they are live."""
        ties = list(range(len(self._parent)))

        def find(number: int) -> int:
            while ties[number] != number:
                ties[number] = ties[ties[number]]
                number = ties[number]
            return number

        width: dict[int, int] = {}
        pinned: set[int] = set()
        named = _named(self.kernel)
        uses: dict[int, set[int]] = {}
        register: dict[int, int] = {}
        for item in self.kernel.instructions:
            held = _holds(item) or item.offset in named
            for operand in _operands(item):
                webs = [self._web(item, access, written) for access, written in operand]
                known = [web for web in webs if web is not None]
                for web, (access, _) in zip(webs, operand, strict=True):
                    if web is None:
                        continue
                    register[web] = access.resource
                    uses.setdefault(web, set()).add(item.index)
                    width[web] = max(width.get(web, 1), len(operand))
                    if held or len(known) < len(operand):
                        pinned.add(web)
                for other in known[1:]:
                    ties[find(other)] = find(known[0])
        for resource in range(528):
            pinned.add(self._root(self._entry_id(resource)))
        pinned |= {web for web, resource in register.items() if resource == STACK}
        live = self._live_points(register)
        gathered: dict[int, list[int]] = {}
        for web in register:
            gathered.setdefault(find(web), []).append(web)
        self.group_of: dict[int, int] = {}
        groups: list[Group] = []
        for webs in gathered.values():
            number = len(groups)
            self.group_of.update(dict.fromkeys(webs, number))
            touched = frozenset(index for web in webs for index in uses[web])
            points = frozenset(index for web in webs for index in live.get(web, ()))
            groups.append(
                Group(
                    number,
                    tuple(sorted({register[web] for web in webs})),
                    max(width[web] for web in webs),
                    points | touched,
                    touched,
                    not any(web in pinned for web in webs),
                )
            )
        return groups

    def _web(self, item: Instruction, access: Access, written: bool) -> int | None:
        if written:
            return self.web_of_write(item.index, access.resource)
        return self.web_of_read(item.index, access.resource)

    def _live_points(self, register: dict[int, int]) -> dict[int, set[int]]:
        """{web: instructions after whose issue its register holds a live value of it}."""
        live: dict[int, set[int]] = {}
        wanted = set(register.values())
        for block in self.kernel.blocks:
            state = dict(self._at_entry[block.index])
            for item in self.kernel.items(block):
                self._step(state, item)
                alive = self.live_out[item.index]
                for resource in wanted:
                    if alive >> resource & 1 and (ids := state.get(resource)):
                        live.setdefault(self._root(next(iter(ids))), set()).add(item.index)
        return live


def _operands(item: Instruction) -> Iterator[list[tuple[Access, bool]]]:
    """The accesses of an instruction, those of one register operand together."""
    for accesses, written in ((item.effects.writes, True), (item.effects.reads, False)):
        current: list[tuple[Access, bool]] = []
        for access in accesses:
            follows = (
                bool(current)
                and access.slot.rstrip("0123456789") == current[-1][0].slot.rstrip("0123456789")
                and access.resource == current[-1][0].resource + 1
                and access.slot[-1:].isdigit()
                and access.slot[-1:] != "0"
            )
            if follows:
                current.append((access, written))
                continue
            if current:
                yield current
            current = [(access, written)]
        if current:
            yield current


def _holds(item: Instruction) -> bool:
    """True for an instruction whose registers keep their numbers."""
    info = item.effects.info
    return (
        info.pipe is Pipe.ASYNC
        or info.name == UNKNOWN.name
        or item.base in FIXED_BASES
        or info.name in SPECIAL_FORMS
        or any(access.slot == GROUP_SLOT for access in item.effects.reads)
    )


def _named(kernel: Kernel) -> set[int]:
    """Offsets of the instructions that any table of `.nv.info` names."""
    size = len(kernel.instructions) * WORD_BYTES
    found = set(nvinfo.pinned_offsets(kernel.info, size))
    return found | set(nvinfo.rewritten_offsets(kernel.info))
