"""Observed minima: distances that no compiler was seen to go below, although it often keeps them.

A mined distance (`latency`) says what an edit may do, because it was seen. What must a single file
not do? "Never seen" convicts only where the compiler had a reason to go lower and did not. So an
observed minimum needs 50 pairs that keep exactly the smallest distance of all. Pairs that
one machine latency rules are counted together: arithmetic sources are read in one cycle whichever
slot names them, the words of a result come together (those of two-pass products do not), the
uniform datapath and the copy engines collect their operands as one. `bench/mine_distances.py`
measures what this convicts of compiler output it was not mined from, and which planted faults it
finds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from warploom.sass.decode.kernel import GROUP_SLOT
from warploom.sass.flow.latency import TWO_PASSES

ANY: Final = "any"

UNIFORM: Final = frozenset("UIMAD UIMAD.WIDE UIADD3.64 UFLO UPOPC VOTEU uniform".split())
ENGINES: Final = ("UTMA", "UBLK")
_SOURCE: Final = re.compile(r"[a-j]\d*")
_LATE: Final = "c1"


def minimum_keys(key: str) -> tuple[str, ...]:
    """The minima that bound a read-after-write key of `latency.raw_key`, the closest first: that of
    its consumers, and that of everything which reads its producer's result."""
    producer, arrow, consumer = key.partition(" > ")
    if not arrow:
        return ()
    maker, _, word = producer.rpartition(".")
    reader, _, slot = consumer.rpartition(".")
    if GROUP_SLOT in (word, slot):
        return ()  # an accumulator named by WARPGROUP: order, no reading
    if word.startswith("d") and maker not in TWO_PASSES:
        word = "d"
    late = slot == _LATE and reader in TWO_PASSES
    if reader in UNIFORM:
        reader = "uniform"
    elif reader.startswith(ENGINES):
        reader = "engine"
    if _SOURCE.fullmatch(slot):
        slot = _LATE if late else "source"
    first = f"{maker}.{word} > {reader}.{slot}"
    return (first,) if late else (first, f"{maker}.{word} > {ANY}")


def least(minima: Mapping[str, int], key: str) -> int:
    """Cycles that a pair must be apart by its closest minimum; 0 where there is none."""
    return next((minima[one] for one in minimum_keys(key) if one in minima), 0)
