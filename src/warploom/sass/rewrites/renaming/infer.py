"""Given a kernel that was renamed and reordered, find the renaming alone.

The result, the *base*, holds the original's instructions in the original's order with the other
kernel's registers. It is a guess to be proved: `verify_renaming(original, base)` and then
`Verifier(base).check_file(other)` trust nothing of it.

Instructions are matched by colours: first their block and their text without register numbers and
operand hints, then, round by round, the colours of what they read from and what reads them
(Weisfeiler-Leman refinement of the def-use graph). Instructions that stay alike are matched in
order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from warploom.sass.decode.control import CONTROL_MASK
from warploom.sass.decode.cubin import Cubin
from warploom.sass.decode.kernel import Kernel, decode
from warploom.sass.rewrites.renaming.fields import shape
from warploom.sass.rewrites.renaming.webs import Webs

ROUNDS: Final = 24
_Colours = list[int]


def infer_base(original: Cubin, other: Cubin, name: str) -> Cubin | None:
    """`original` in the registers of `other`; None when their instructions cannot be matched."""
    kernels = (decode(original, name), decode(other, name))
    one, two = (_colours(kernel) for kernel in kernels)
    if sorted(one) != sorted(two):
        return None
    places: dict[int, list[int]] = {}
    for index in range(len(two) - 1, -1, -1):
        places.setdefault(two[index], []).append(index)
    words: list[tuple[int, int]] = []
    for item, colour in zip(kernels[0].instructions, one, strict=True):
        found = kernels[1].instructions[places[colour].pop()]
        words.append((found.low, found.high & ~CONTROL_MASK | item.high & CONTROL_MASK))
    return original.replace(original.kernel(name), words)


def _colours(kernel: Kernel) -> _Colours:
    """One number an instruction, equal for instructions that play the same part."""
    webs = Webs(kernel)
    sources = [webs.sources(item.index) for item in kernel.instructions]
    readers: list[list[tuple[int, int, int]]] = [[] for _ in kernel.instructions]
    for index, reads in enumerate(sources):
        for place, origins in enumerate(reads):
            for origin, slot in origins:
                if origin >= 0:
                    readers[origin].append((slot, place, index))
    colours = [
        hash((kernel.block_of[item.index], shape(item.line.text.replace(".reuse", ""))))
        for item in kernel.instructions
    ]
    count = len(set(colours))
    for _ in range(ROUNDS):
        colours = [
            hash(
                (
                    colours[index],
                    tuple(_seen(origins, colours) for origins in sources[index]),
                    tuple(sorted((slot, place, colours[i]) for slot, place, i in readers[index])),
                )
            )
            for index in range(len(colours))
        ]
        found = len(set(colours))
        if found == count:
            break
        count = found
    return colours


def _seen(origins: Sequence[tuple[int, int]], colours: _Colours) -> tuple[tuple[int, int], ...]:
    """The colours a value may come from; one from before the kernel has its register's number."""
    return tuple(sorted((colours[i] if i >= 0 else i, slot) for i, slot in origins))
