"""What differs between two cubins, instruction by instruction.

Two versions of one kernel are aligned on identity (the word without its control field; for branches
the text without the target) by the longest common subsequence, in linear memory (Hirschberg, CACM
18(6), 1975). When every block holds the same instructions on both sides the alignment goes block by
block, and what is left over is *moved*. Otherwise, as between two compiler versions, it goes over
the whole kernel; leftovers with equal text are moved too, leftovers that face each other and share
an opcode are *changed*, the rest is removed or added.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from warploom.errors import InputError
from warploom.sass.decode.control import Control
from warploom.sass.decode.cubin import Cubin
from warploom.sass.decode.kernel import RELATIVE, Block, Instruction, Kernel, decode_all

Scores = npt.NDArray[np.int32]
CONTROL_FIELDS: Final = ("stall", "stay", "write_sb", "read_sb", "wait", "reuse")


class Change(Enum):
    """What became of an instruction."""

    SAME = "same"
    MOVED = "moved"
    CHANGED = "changed"
    REMOVED = "removed"
    ADDED = "added"


@dataclass(frozen=True)
class Row:
    """One line of the diff: instruction numbers on either side (None: not there) and the control
    fields that differ, as (field, before, after)."""

    change: Change
    before: int | None
    after: int | None
    control: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class KernelDiff:
    """The aligned rows of one kernel, in the order of the second file.

    `reordering`: every block holds the same instructions on both sides.
    """

    before: Kernel
    after: Kernel
    reordering: bool
    rows: tuple[Row, ...]

    @property
    def counts(self) -> dict[str, int]:
        """How many rows of each kind, and how many control edits."""
        found = Counter(row.change.value for row in self.rows)
        found["control edits"] = self.control_edits
        return dict(found)

    @property
    def moved(self) -> int:
        """The least number of instructions that must be lifted out and put back elsewhere."""
        return sum(row.change is Change.MOVED for row in self.rows)

    @property
    def control_edits(self) -> int:
        """Instructions whose control field differs, moved or not."""
        return sum(bool(row.control) for row in self.rows)

    @property
    def same(self) -> bool:
        """True when the two kernels hold the same words in the same order."""
        return all(row.change is Change.SAME and not row.control for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """Counts, and the rows that differ with the text and offset of either side."""

        def side(kernel: Kernel, index: int | None) -> dict[str, Any] | None:
            if index is None:
                return None
            item = kernel.instructions[index]
            return {
                "offset": item.offset,
                "text": item.line.text,
                "block": kernel.block_of[index],
                "control": asdict(item.control),
            }

        return {
            "kernel": self.after.name,
            "reordering": self.reordering,
            "same": self.same,
            "counts": self.counts,
            "rows": [
                {
                    "change": row.change.value,
                    "before": side(self.before, row.before),
                    "after": side(self.after, row.after),
                    "control": {name: [old, new] for name, old, new in row.control},
                }
                for row in self.rows
                if row.change is not Change.SAME or row.control
            ],
        }


def diff(before: Cubin, after: Cubin, kernel: str | None = None) -> list[KernelDiff]:
    """The differences of every kernel both files hold (or of the one named).

    Two files with one kernel each are compared whatever its name. Raises `InputError` when no
    kernel is common to both.
    """
    first, second = decode_all(before), decode_all(after)
    if kernel is not None:
        return [diff_kernels(first[before.kernel(kernel).name], second[after.kernel(kernel).name])]
    if len(first) == 1 == len(second):
        return [diff_kernels(*first.values(), *second.values())]
    common = [name for name in first if name in second]
    if not common:
        raise InputError(
            f"{before.origin} and {after.origin} have no kernel in common; the first holds "
            f"{', '.join(first)}, the second {', '.join(second)}"
        )
    return [diff_kernels(first[name], second[name]) for name in common]


def diff_kernels(before: Kernel, after: Kernel) -> KernelDiff:
    """Align two kernels."""
    left = [_identity(item) for item in before.instructions]
    right = [_identity(item) for item in after.instructions]
    reordering = _same_blocks(before.blocks, after.blocks, left, right)
    pairs: list[tuple[int, int]] = []
    if reordering:
        for block in after.blocks:
            span = slice(block.start, block.end)
            found = align(left[span], right[span])
            pairs.extend((block.start + i, block.start + j) for i, j in found)
    else:
        pairs = align(left, right)
    return KernelDiff(before, after, reordering, tuple(_rows(before, after, left, right, pairs)))


def _identity(item: Instruction) -> Hashable:
    if item.base in RELATIVE:
        return item.line.guard, item.line.opcode, item.line.operands.partition("`")[0]
    return item.identity


def _same_blocks(
    first: Sequence[Block],
    second: Sequence[Block],
    left: Sequence[Hashable],
    right: Sequence[Hashable],
) -> bool:
    return (
        len(left) == len(right)
        and len(first) == len(second)
        and all(
            (a.start, a.end) == (b.start, b.end)
            and Counter(left[a.start : a.end]) == Counter(right[b.start : b.end])
            for a, b in zip(first, second, strict=True)
        )
    )


def align(left: Sequence[Hashable], right: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Index pairs of a longest common subsequence, ascending."""
    numbers: dict[Hashable, int] = {}
    first = np.array([numbers.setdefault(item, len(numbers)) for item in left], np.int32)
    second = np.array([numbers.setdefault(item, len(numbers)) for item in right], np.int32)
    found: list[tuple[int, int]] = []
    # (first from, to, second from, to), worked off in order.
    pending = [(0, len(first), 0, len(second))]
    while pending:
        a, b, c, d = pending.pop()
        while a < b and c < d and first[a] == second[c]:
            found.append((a, c))
            a, c = a + 1, c + 1
        while a < b and c < d and first[b - 1] == second[d - 1]:
            b, d = b - 1, d - 1
            found.append((b, d))
        if a >= b or c >= d:
            continue
        if b - a == 1:
            match = np.flatnonzero(second[c:d] == first[a])
            if len(match):
                found.append((a, c + int(match[0])))
            continue
        middle = (a + b) // 2
        head = _lengths(first[a:middle], second[c:d])
        tail = _lengths(first[middle:b][::-1], second[c:d][::-1])[::-1]
        split = c + int(np.argmax(head + tail))
        pending.extend(((middle, b, split, d), (a, middle, c, split)))
    return sorted(found)


def _lengths(first: Scores, second: Scores) -> Scores:
    """Length of a longest common subsequence of `first` with every prefix of `second`."""
    row = np.zeros(len(second) + 1, np.int32)
    for item in first:
        matched = row[:-1] + (second == item)
        row[1:] = np.maximum.accumulate(np.maximum(row[1:], matched))
    return row


def _rows(
    before: Kernel,
    after: Kernel,
    left: Sequence[Hashable],
    right: Sequence[Hashable],
    pairs: list[tuple[int, int]],
) -> Iterable[Row]:
    partner = {j: i for i, j in pairs}
    aligned = {i for i, _ in pairs}
    changes = dict.fromkeys(partner, Change.SAME)
    homeless: dict[Hashable, list[int]] = {}
    for i in range(len(left)):
        if i not in aligned:
            homeless.setdefault(left[i], []).append(i)
    for j in range(len(right)):
        if j not in partner and homeless.get(right[j]):
            partner[j] = homeless[right[j]].pop(0)
            changes[j] = Change.MOVED
    gone = sorted(i for rest in homeless.values() for i in rest)
    _facing(before, after, gone, partner, changes)
    taken = set(partner.values())
    left_out = [i for i in gone if i not in taken]
    for j in range(len(right)):
        if changes.get(j) is not Change.MOVED and j in partner:
            while left_out and left_out[0] < partner[j]:
                yield Row(Change.REMOVED, left_out.pop(0), None, ())
        if j in partner:
            control = _edits(before.instructions[partner[j]], after.instructions[j])
            yield Row(changes[j], partner[j], j, control)
        else:
            yield Row(Change.ADDED, None, j, ())
    for i in left_out:
        yield Row(Change.REMOVED, i, None, ())


def _facing(
    before: Kernel,
    after: Kernel,
    gone: list[int],
    partner: dict[int, int],
    changes: dict[int, Change],
) -> None:
    """Pair leftovers with one opcode that stand between the same aligned neighbours."""
    fixed = sorted((i, j) for j, i in partner.items() if changes[j] is Change.SAME)
    bounds = [(-1, -1), *fixed, (len(before.instructions), len(after.instructions))]
    missing = set(gone)
    for (i, j), (k, m) in pairwise(bounds):
        old = [index for index in range(i + 1, k) if index in missing]
        new = [index for index in range(j + 1, m) if index not in partner]
        if not old or not new:
            continue
        found = align(
            [before.instructions[index].line.opcode for index in old],
            [after.instructions[index].line.opcode for index in new],
        )
        for a, b in found:
            partner[new[b]] = old[a]
            changes[new[b]] = Change.CHANGED


def _edits(before: Instruction, after: Instruction) -> tuple[tuple[str, int, int], ...]:
    def fields(control: Control) -> list[int]:
        return [int(getattr(control, name)) for name in CONTROL_FIELDS]

    return tuple(
        (name, old, new)
        for name, old, new in zip(
            CONTROL_FIELDS, fields(before.control), fields(after.control), strict=True
        )
        if old != new
    )
