"""Lines of C++."""

from __future__ import annotations

from collections.abc import Sequence


def indent(lines: Sequence[str]) -> list[str]:
    """The lines one level deeper."""
    return [f"  {line}" for line in lines]


def unrolled(name: str, count: int) -> list[str]:
    """The head of a loop over 0 ... count - 1 that the compiler unrolls."""
    return ["#pragma unroll", f"for (int {name} = 0; {name} < {count}; ++{name})"]
