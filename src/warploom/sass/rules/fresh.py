"""What the checker of changed scoreboards asks besides: both files read anew, only code changed,
and no finding of `lint` that the original has not.

A checker takes nothing from what made the change, so it decodes from the bytes; answers are kept by
content, as one original is compared with many candidates.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from warploom.sass.decode.cubin import Cubin, parse
from warploom.sass.decode.disassembly import disassemble
from warploom.sass.decode.kernel import Kernel, build_kernel
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


def new_lint(one: Kernel, other: Kernel) -> Iterator[Finding]:
    """Findings of `lint` on `other` that `one` has not at the same instruction."""
    before = {(row.rule, row.offset) for row in lint(one)}
    for row in lint(other):
        if (row.rule, row.offset) not in before:
            yield Finding(row.rule, row.offset, row.instruction, row.reason)
