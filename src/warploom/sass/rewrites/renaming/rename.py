"""Give values other registers, to break false dependences: choose targets and rewrite the words.

A later write of a register waits for earlier reads and writes of it although no value passes
between them. With the value in a register nobody has used lately the two may change places. The
order and the control fields stay as they are; `verify` proves the result, from the bytes.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from warploom.errors import InputError
from warploom.sass.decode.cubin import WORD_BYTES, Cubin
from warploom.sass.decode.effects import split_results
from warploom.sass.decode.kernel import Instruction, Kernel, decode
from warploom.sass.decode.operands import Kind
from warploom.sass.decode.resources import (
    PREDICATE_BASE,
    UNIFORM_BASE,
    UNIFORM_PREDICATE_BASE,
    resource_name,
)
from warploom.sass.rewrites.renaming.fields import BITS, Field, fields, put
from warploom.sass.rewrites.renaming.verify import verify_renaming
from warploom.sass.rewrites.renaming.webs import Group, Webs

BASES: Final = {
    "R": 0,
    "UR": UNIFORM_BASE,
    "P": PREDICATE_BASE,
    "UP": UNIFORM_PREDICATE_BASE,
}


@dataclass(frozen=True)
class Renaming:
    """One group of webs moved by `distance` registers. `why` in words, for people."""

    group: int
    distance: int
    why: str


class Renamer:
    """Renames values of one kernel. Reads which registers are free, and where they are encoded."""

    def __init__(self, original: Cubin, kernel: str | None = None) -> None:
        self.original = original
        self.kernel: Kernel = decode(original, kernel)
        self.webs = Webs(self.kernel)
        self._top = _highest(self.kernel)
        found = fields(self.kernel.instructions, self.kernel.sm)
        self._fields: dict[int, dict[int, Field]] = {
            item.index: {row.occurrence: row for row in found.get(item.index, ())}
            for item in self.kernel.instructions
        }

    def free_distances(self, group: Group, taken: Mapping[int, frozenset[int]]) -> list[int]:
        """Distances by which a group may move: every target free wherever the group is live.

        `taken` {resource: instructions}: targets already given away.
        """
        if not group.movable:
            return []
        file, base = _file_of(group.registers[0])
        step = 4 if group.width > 2 else group.width
        lowest, highest = min(group.registers), max(group.registers)
        first = -((lowest - base) // step) * step
        found: list[int] = []
        for distance in range(first, base + self._top[file] - highest + 1, step):
            targets = [register + distance for register in group.registers]
            if distance and all(self._is_free(group, target, taken) for target in targets):
                found.append(distance)
        return found

    def _is_free(self, group: Group, target: int, taken: Mapping[int, frozenset[int]]) -> bool:
        if target == 1 or not taken.get(target, frozenset()).isdisjoint(group.live):
            return False
        live_out, items = self.webs.live_out, self.kernel.instructions
        for index in group.live:
            if live_out[index] >> target & 1:
                return False
            effects = items[index].effects
            if any(access.resource == target for access in effects.writes):
                return False
        # An instruction of the group must not read the target's old value either: a wide result
        # could overwrite it before it is read.
        return not any(
            access.resource == target
            for index in group.touched
            for access in items[index].effects.reads
        )

    def choose(self, rng: random.Random, share: float = 0.3) -> list[Renaming]:
        """Random renamings of about `share` of the groups that can move, none in another's way.

        Of the free targets one of those is taken whose last use before the group's first
        definition lies furthest back.
        """
        groups = [group for group in self.webs.groups if group.movable]
        rng.shuffle(groups)
        taken: dict[int, frozenset[int]] = {}
        chosen: list[Renaming] = []
        for group in groups:
            if rng.random() >= share:
                continue
            free = self.free_distances(group, taken)
            if not free or not self._encodable(group):
                continue
            ranked = sorted(free, key=lambda distance: -self._rest(group, distance))
            distance = rng.choice(ranked[: max(1, len(ranked) // 3)])
            for register in group.registers:
                target = register + distance
                taken[target] = taken.get(target, frozenset()) | group.live
            lowest = min(group.registers)
            names = f"{resource_name(lowest)} to {resource_name(lowest + distance)}"
            chosen.append(Renaming(group.number, distance, names))
        return chosen

    def _rest(self, group: Group, distance: int) -> int:
        """Instructions since the last touch of the target before the group begins, and to the
        next one after it ends; the smaller of the two."""
        begin, end = min(group.live), max(group.live)
        targets = {register + distance for register in group.registers}
        items = self.kernel.instructions
        block = self.kernel.blocks[self.kernel.block_of[begin]]
        back = next(
            (
                begin - index
                for index in range(begin - 1, block.start - 1, -1)
                if _touches(items[index], targets)
            ),
            len(items),
        )
        block = self.kernel.blocks[self.kernel.block_of[end]]
        ahead = next(
            (index - end for index in range(end + 1, block.end) if _touches(items[index], targets)),
            len(items),
        )
        return min(back, ahead)

    # --- rewriting -------------------------------------------------------------------------

    def _encodable(self, group: Group) -> bool:
        """True when every mention of the group's registers stands in a field we found."""
        for index in group.touched:
            mentions = self._mentions(self.kernel.instructions[index])
            for place, (_, _, number) in mentions.items():
                if number == group.number and place not in self._fields[index]:
                    return False
        return True

    def _mentions(self, item: Instruction) -> dict[int, tuple[str, int, int | None]]:
        """{occurrence in the text: (file, number, group)} of an instruction's registers."""
        found: dict[int, tuple[str, int, int | None]] = {}
        place = 0
        if item.line.guard and item.line.guard.lstrip("!")[-1] != "T":
            guard = item.line.guard.lstrip("!")
            file, number = guard.rstrip("0123456789"), int(guard[-1])
            found[place] = (file, number, self._group(item, BASES[file] + number, False))
            place += 1
        results = split_results(item.effects.info, item.effects.operands)
        for position, operand in enumerate(item.effects.operands):
            written = position < results and operand.kind is not Kind.MEMORY
            for name in (*operand.descriptor, *operand.registers):
                if name.index < 0:
                    continue
                resource = BASES[name.file] + name.index
                found[place] = (name.file, name.index, self._group(item, resource, written))
                place += 1
        return found

    def _group(self, item: Instruction, resource: int, written: bool) -> int | None:
        accesses = item.effects.writes if written else item.effects.reads
        if not any(access.resource == resource for access in accesses):
            return None
        webs = self.webs
        web = (
            webs.web_of_write(item.index, resource)
            if written
            else webs.web_of_read(item.index, resource)
        )
        return None if web is None else webs.group_of.get(web)

    def rewrite(self, renamings: Sequence[Renaming]) -> Cubin:
        """The cubin with the groups' registers changed; order and control fields as they were.

        Raises `InputError` when a register stands in no field that was found.
        """
        distance = {renaming.group: renaming.distance for renaming in renamings}
        words = [(item.low, item.high) for item in self.kernel.instructions]
        for group in (self.webs.groups[number] for number in distance):
            if not self._encodable(group):
                raise InputError(
                    f"{resource_name(min(group.registers))}: a place that names it is not encoded "
                    "by a field that could be found"
                )
        touched = {i for number in distance for i in self.webs.groups[number].touched}
        for index in sorted(touched):
            item = self.kernel.instructions[index]
            word = item.low | item.high << 64
            for place, (file, number, group) in self._mentions(item).items():
                if group in distance:
                    field = self._fields[index][place]
                    word = put(word, field.bit, BITS[file], number + distance[group])
            words[index] = (word & (1 << 64) - 1, word >> 64)
        return self.original.replace(self.original.kernel(self.kernel.name), words)


def _touches(item: Instruction, targets: set[int]) -> bool:
    effects = item.effects
    return any(access.resource in targets for access in (*effects.reads, *effects.writes))


def _file_of(resource: int) -> tuple[str, int]:
    for file, base in sorted(BASES.items(), key=lambda pair: -pair[1]):
        if resource >= base:
            return file, base
    raise AssertionError(resource)


def _highest(kernel: Kernel) -> dict[str, int]:
    """The highest register of each file the kernel uses: no other is allocated for certain."""
    top = {"R": 0, "UR": 0, "P": 6, "UP": 6}
    for item in kernel.instructions:
        for access in (*item.effects.reads, *item.effects.writes):
            file, base = _file_of(access.resource)
            if file in ("R", "UR"):
                top[file] = max(top[file], access.resource - base)
    return top


REPAIRS: Final = 16


def renamed(renamer: Renamer, rng: random.Random, share: float) -> tuple[Cubin, list[Renaming]]:
    """The original in other registers, proved by `verify_renaming`, and what was renamed.

    Renamings that the proof complains about are dropped until it does not; with none left the
    original comes back.
    """
    chosen = renamer.choose(rng, share)
    name = renamer.kernel.name
    for _ in range(REPAIRS):
        if not chosen:
            break
        image = renamer.rewrite(chosen)
        findings = verify_renaming(renamer.original, image, name)
        if not findings:
            return image, chosen
        blamed = {finding.offset // WORD_BYTES for finding in findings}
        kept = [row for row in chosen if not _concerned(renamer, row, blamed)]
        # A complaint nobody is concerned by: fewer renamings have fewer of them.
        chosen = kept if len(kept) < len(chosen) else chosen[: len(chosen) // 2]
    return renamer.original, []


def _concerned(renamer: Renamer, row: Renaming, blamed: set[int]) -> bool:
    """True when a blamed instruction is of the group, or names a register the group moved to."""
    group = renamer.webs.groups[row.group]
    if not blamed.isdisjoint(group.touched):
        return True
    targets = {register + row.distance for register in group.registers}
    items = renamer.kernel.instructions
    return any(_touches(items[index], targets) for index in blamed)
