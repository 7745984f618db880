"""`verify(original, candidate)`: is the candidate a legal reordering of the original?

Reads both files from their bytes and trusts nothing the editor recorded. A `Verifier` derives the
constraints of one original once; checking a candidate is then a few vector operations, so that a
search can ask for a verdict on every candidate it thinks of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial

import numpy as np

from warploom.errors import InputError
from warploom.sass.decode import nvinfo
from warploom.sass.decode.cubin import WORD_BYTES, Cubin, parse
from warploom.sass.decode.disassembly import disassemble
from warploom.sass.decode.kernel import Kernel, build_kernel
from warploom.sass.decode.words import Words, control_fields, instruction_words
from warploom.sass.flow.aliasing import AliasMode
from warploom.sass.flow.diff import diff
from warploom.sass.flow.latency import table_for
from warploom.sass.rules.constraints import derive
from warploom.sass.rules.control_rules import ControlRules
from warploom.sass.rules.distance_rules import SpacingRules, check_across, check_gaps
from warploom.sass.rules.order_rules import check_order, check_waits
from warploom.sass.rules.original import CLEAR, Original, State
from warploom.sass.rules.rules import Constraints, Ints
from warploom.sass.rules.verdict import Finding, Verdict


class Verifier:
    """Checks candidates against one kernel of one original cubin."""

    def __init__(
        self, original: Cubin, kernel: str | None = None, mode: AliasMode = AliasMode.STRICT
    ) -> None:
        code = original.kernel(kernel)
        # Parsed again from the bytes: what the caller decoded is not trusted.
        self.original = parse(original.data, original.origin)
        self.mode = mode
        self.kernel: Kernel = build_kernel(
            self.original, self.original.kernels[code.name], disassemble(self.original)[code.name]
        )
        self.table = table_for(self.kernel.sm)
        self.constraints: Constraints = derive(self.kernel, mode, self.table)
        self.known = Original(self.original, self.kernel, self.table, self.constraints)
        self._prepare_identities()
        known = self.known
        self._rules: tuple[Callable[[State], list[Finding]], ...] = (
            ControlRules(known).check,
            partial(check_order, known),
            partial(check_gaps, known),
            SpacingRules(known).check,
            partial(check_across, known),
            partial(check_waits, known),
        )

    def _prepare_identities(self) -> None:
        """Numbers for the distinct words (control fields apart), and each block's set of them."""
        known = self.known
        pairs = np.stack([known.low, known.identity_high], axis=1)
        unique, inverse = np.unique(pairs, axis=0, return_inverse=True)
        self._unique = unique
        self._ids: Ints = inverse.reshape(-1).astype(np.int64)
        self._id_of = {(int(low), int(high)): number for number, (low, high) in enumerate(unique)}
        self._sorted = np.argsort(known.block_of * (len(unique) + 1) + self._ids, kind="stable")

    @cached_property
    def _other_bytes(self) -> tuple[tuple[int, int], ...]:
        """Byte ranges of the file that no edit may touch."""
        code = self.original.kernels[self.kernel.name]
        holes = [(code.text.offset, code.text.size)]
        if code.info is not None:
            holes.append((code.info.offset, code.info.size))
        ranges: list[tuple[int, int]] = []
        position = 0
        for offset, size in sorted(holes):
            ranges.append((position, offset))
            position = offset + size
        ranges.append((position, len(self.original.data)))
        return tuple(ranges)

    def check_file(self, candidate: Cubin) -> Verdict:
        """Verdict on a whole file: every byte outside the kernel's code must be the original's."""
        finding = self._check_container(candidate)
        if finding is not None:
            return Verdict(False, self.mode, (finding,))
        words = instruction_words(candidate, self.kernel.name)
        code = candidate.kernels[self.kernel.name]
        return self.check_words(
            words, candidate.section_bytes(code.info) if code.info else b"", every=True
        )

    def _check_container(self, candidate: Cubin) -> Finding | None:
        name = self.kernel.name
        if len(candidate.data) != len(self.original.data):
            reason = f"the file has {len(candidate.data)} bytes, not {len(self.original.data)}"
            return Finding("CONTAINER", 0, name, reason)
        for start, end in self._other_bytes:
            if candidate.data[start:end] != self.original.data[start:end]:
                where = next(
                    position
                    for position in range(start, end)
                    if candidate.data[position] != self.original.data[position]
                )
                return Finding("CONTAINER", 0, name, f"byte {where:#x} outside the code changed")
        return None

    def check_words(self, words: Words, info: bytes | None = None, every: bool = False) -> Verdict:
        """Verdict on instruction words [n, 2] and the kernel's `.nv.info` bytes.

        `every` lists all findings; without it the first one ends the check.
        """
        low, high = words[:, 0], words[:, 1]
        count = self.known.count
        if len(low) != count:
            reason = f"{len(low)} instructions, not {count}"
            return self._verdict([Finding("MULTISET", 0, self.kernel.name, reason)])
        mapped = self._positions(low, high & CLEAR)
        if isinstance(mapped, Finding):
            return self._verdict([mapped])
        state = State(*mapped, control_fields(high))
        findings: list[Finding] = []
        for check in self._rules:
            findings.extend(check(state))
            if findings and not every:
                break
        if info is not None and (every or not findings):
            findings.extend(self._check_info(state.position, info))
        return self._verdict(findings)

    def _verdict(self, findings: list[Finding]) -> Verdict:
        return Verdict(not findings, self.mode, tuple(findings))

    def _positions(self, low: Words, high: Words) -> tuple[Ints, Ints] | Finding:
        """(new position of each original instruction, original instruction at each position)."""
        ids = self._ids.copy()
        changed = np.flatnonzero((low != self.known.low) | (high != self.known.identity_high))
        for index in changed.tolist():
            number = self._id_of.get((int(low[index]), int(high[index])))
            if number is None:
                reason = "no such instruction in the original"
                return Finding("MULTISET", index * WORD_BYTES, f"word {index}", reason)
            ids[index] = number
        order = np.arange(self.known.count)
        position = order.copy()
        if len(changed):
            arranged = np.argsort(
                self.known.block_of * (len(self._unique) + 1) + ids, kind="stable"
            )
            if not np.array_equal(ids[arranged], self._ids[self._sorted]):
                where = int(changed[0])
                return self.known.finding(
                    "MULTISET", where, "its block does not hold the same instructions any more"
                )
            position[self._sorted] = arranged
            order[arranged] = self._sorted
        return position, order

    def _check_info(self, position: Ints, info: bytes) -> list[Finding]:
        def moved(offset: int) -> int:
            index = offset // WORD_BYTES
            if offset % WORD_BYTES or index >= self.known.count:
                return offset
            return int(position[index]) * WORD_BYTES

        expected = nvinfo.rewrite(self.kernel.info, moved)
        if info == expected:
            return []
        stale = nvinfo.rewritten_offsets(self.kernel.info)
        named = next((index // WORD_BYTES for index in stale if moved(index) != index), 0)
        return [self.known.finding("NV_INFO", named, "the .nv.info offsets do not follow the code")]


def verify(
    original: Cubin, candidate: Cubin, kernel: str | None = None, mode: AliasMode = AliasMode.STRICT
) -> Verdict:
    """Static verdict on `candidate` as a reordering of `original`.

    Raises `InputError` when the two are not for the same architecture.
    """
    if original.sm != candidate.sm:
        raise InputError(
            f"{candidate.origin} is for {candidate.arch}, the original is for {original.arch}"
        )
    return counted(
        Verifier(original, kernel, mode).check_file(candidate), original, candidate, kernel
    )


def verify_all(
    original: Cubin, candidate: Cubin, mode: AliasMode = AliasMode.STRICT
) -> dict[str, Verdict]:
    """The verdict on every kernel of a file, each with the rest of the file as it was.

    What changed outside of all kernels is a finding of the first. Raises `InputError` when the two
    are not for one architecture or do not have the same kernels.
    """
    if missing := set(original.kernels) ^ set(candidate.kernels):
        raise InputError(
            f"kernel {min(missing)} is not in both, {original.origin} and {candidate.origin}"
        )
    if len(original.kernels) == 1:
        return {name: verify(original, candidate, name, mode) for name in original.kernels}
    found: dict[str, Verdict] = {}
    together = original
    for name, code in candidate.kernels.items():
        info = candidate.section_bytes(code.info) if code.info else None
        if len(code.words) != len(original.kernels[name].words):
            reason = f"{len(code.words)} instructions, not {len(original.kernels[name].words)}"
            found[name] = Verdict(False, mode, (Finding("MULTISET", 0, name, reason),))
            continue
        alone = original.replace(original.kernels[name], code.words, info)
        together = together.replace(together.kernels[name], code.words, info)
        found[name] = verify(original, alone, name, mode)
    if together.data != candidate.data and all(one.legal for one in found.values()):
        first = next(iter(found))
        outside = Finding("CONTAINER", 0, first, "bytes outside of all kernels changed")
        found[first] = Verdict(False, mode, (outside,))
    return found


def counted(verdict: Verdict, before: Cubin, after: Cubin, kernel: str | None) -> Verdict:
    """A legal verdict with how far `after` is from `before`, in the words and numbers of a diff."""
    if not verdict.legal:
        return verdict
    (found,) = diff(before, after, before.kernel(kernel).name)
    return replace(verdict, moved=found.moved, control_edits=found.control_edits)
