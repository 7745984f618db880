"""Conditions under which a warp leaves an op out: each is equal in all threads of the warp.

Under a guard the op would write the values that are already there, or values that no op reads
(`voted_skip`, `uniform`, `known`). The printer turns it into `if (!(condition))`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from warploom.codegen.analysis.known import Known
from warploom.tile import Index


@dataclass(frozen=True)
class Always:
    """What is known at the op's place says that it is not needed (True) or that it is (False)."""

    holds: bool


@dataclass(frozen=True)
class Vote:
    """An inlined condition of rows holds in all rows of the warp."""

    condition: str


@dataclass(frozen=True)
class UnitRows:
    """A factor of rows is 1 in all rows of the warp, in each of its blocks of 64 rows."""

    factor: str
    blocks: int


@dataclass(frozen=True)
class Position:
    """A coordinate along a tile's axis: `start`, `part_rows` further for each group before this
    one, and `last` further at the tile's other end; None: at its beginning."""

    start: Index
    part_rows: int = 0
    last: int | None = None


@dataclass(frozen=True)
class Combined:
    """Two edges under +, -, min or max."""

    sign: str
    left: Edge
    right: Edge


Edge = int | Position | Combined


@dataclass(frozen=True)
class Compared:
    """A comparison of two edges of integer tiles, with the sign C has for it."""

    left: Edge
    sign: str
    right: Edge


@dataclass(frozen=True)
class Joined:
    """Several tests, all (&&) or any (||)."""

    sign: str
    tests: tuple[Test, ...]


Test = Compared | Joined


@dataclass(frozen=True)
class Everywhere:
    """A condition on coordinates holds in the whole tile: the same for all threads of a group."""

    test: Test


Guard = Always | Vote | UnitRows | Everywhere


@dataclass(frozen=True)
class Place:
    """Where an op runs.

    known     tiles that are constant there
    straight  ops of the straight code around it, in order; () where it is not straight
    order     (stage, place) of the ops of the loop at hand; elsewhere ops are in program order
    """

    known: Known = field(default_factory=dict[str, float])
    straight: tuple[int, ...] = ()
    order: Mapping[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
