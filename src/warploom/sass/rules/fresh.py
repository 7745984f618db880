"""What the checkers of changed programs begin with: both files read anew, and only code changed.

A checker takes nothing from what made the change, so it decodes from the bytes; answers are kept by
content, as one original is compared with many candidates.
"""

from __future__ import annotations

from functools import lru_cache

from warploom.sass.decode.cubin import Cubin, parse
from warploom.sass.decode.disassembly import disassemble
from warploom.sass.decode.kernel import Kernel, build_kernel
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
