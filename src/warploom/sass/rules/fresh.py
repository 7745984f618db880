"""What the checkers of changed programs share: both files read anew, only code changed, and no
hazard that the original has not.

A checker takes nothing from what made the change, so it decodes from the bytes; answers are kept by
content, as one original is compared with many candidates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

from warploom.sass.decode.cubin import WORD_BYTES, Cubin, parse
from warploom.sass.decode.disassembly import disassemble
from warploom.sass.decode.kernel import Kernel, build_kernel
from warploom.sass.decode.resources import resource_name
from warploom.sass.flow import outstanding
from warploom.sass.rules.lint import lint
from warploom.sass.rules.verdict import Finding


def decode_anew(cubin: Cubin, name: str) -> Kernel:
    """The kernel `name`, from the file's bytes alone."""
    return _from_bytes(cubin.data, name)


@lru_cache(maxsize=4)
def _from_bytes(data: bytes, name: str) -> Kernel:
    fresh = parse(data, name)
    return build_kernel(fresh, fresh.kernels[name], disassemble(fresh)[name])


def change_outside(original: Cubin, other: Cubin, name: str) -> Finding | None:
    """A finding when a byte outside of the kernel's code differs."""
    text = original.kernel(name).text
    start, end = text.offset, text.offset + text.size
    same = (
        len(original.data) == len(other.data)
        and original.data[:start] == other.data[:start]
        and original.data[end:] == other.data[end:]
    )
    if same:
        return None
    return Finding("CONTAINER", 0, name, "a byte outside the kernel's code changed")


def new_hazards(one: Kernel, other: Kernel, origin: Sequence[int]) -> Iterator[Finding]:
    """Registers that `other` uses while a variable-latency instruction has yet to write or read
    them, and `one` does not; `origin`: the place in `one` of each instruction of `other`."""
    before = {
        (entry.producer, item.index, hazard)
        for item, state in outstanding.walk(one)
        for entry, hazard in outstanding.conflicts(one, state, item)
    }
    found: dict[tuple[int, int, object], Finding] = {}
    for item, state in outstanding.walk(other):
        for entry, hazard in outstanding.conflicts(other, state, item):
            key = (origin[entry.producer], origin[item.index], hazard)
            if key not in before:
                name, user = resource_name(entry.resource), other.instructions[entry.producer]
                reason = f"{name} is still in use by {user}, and nothing waits for it"
                found[key] = Finding.at("NEW_DEPENDENCE", item, reason)
    yield from found.values()


def new_lint(one: Kernel, other: Kernel, origin: Sequence[int]) -> Iterator[Finding]:
    """Findings of `lint` on `other` that `one` has not where the instruction comes from."""
    before = {(row.rule, row.offset) for row in lint(one)}
    for row in lint(other):
        if (row.rule, origin[row.offset // WORD_BYTES] * WORD_BYTES) not in before:
            yield Finding(row.rule, row.offset, row.instruction, row.reason)
