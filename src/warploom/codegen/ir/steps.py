"""The steps of a role of a block program, each a type with what it needs and nothing else.

A step acts on the newest iteration in flight, or on the one `stage` before it. Joins, turns and
`Ahead` belong to no iteration: their stage is 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from warploom.tile import Op


@dataclass(frozen=True)
class _OfIteration:
    """A step of the iteration `stage` before the newest in flight."""

    def at(self, stage: int) -> Self:
        """The same step in another stage."""
        return replace(self, stage=stage)


@dataclass(frozen=True)
class _OfRing(_OfIteration):
    ring: str
    stage: int = 0

    def __str__(self) -> str:
        return f"{type(self).__name__} {self.ring}{_lag(self.stage)}"


@dataclass(frozen=True)
class _OfOp(_OfIteration):
    op: Op
    stage: int = 0

    def __str__(self) -> str:
        return f"{type(self).__name__} {self.op.label}{_lag(self.stage)}"


@dataclass(frozen=True)
class Meet(_OfIteration):
    """Consumer: wait for all compute groups, before and after they write an operand of all."""

    tile: str
    stage: int = 0

    def __str__(self) -> str:
        return f"Meet {self.tile}{_lag(self.stage)}"


@dataclass(frozen=True)
class Share(_OfIteration):
    """Consumer: put vectors of which each thread holds a part into the group's shared memory."""

    tiles: tuple[str, ...]
    stage: int = 0

    def __str__(self) -> str:
        return f"Share {', '.join(self.tiles)}{_lag(self.stage)}"


@dataclass(frozen=True)
class _OfGroup:
    stage: ClassVar[int] = 0

    def __str__(self) -> str:
        return type(self).__name__


class Acquire(_OfRing):
    """Producer: wait until the next slot is empty; its barrier then expects the bytes."""


class Publish(_OfRing):
    """Producer: go to the next slot."""


class Wait(_OfRing):
    """Consumer: wait until its next slot is full."""


class Release(_OfRing):
    """Consumer: the oldest slot it holds is empty again."""


@dataclass(frozen=True)
class Fill(_OfIteration):
    """Producer: start the copy of a load into the slot acquired."""

    op: Op
    ring: str
    stage: int = 0

    def __str__(self) -> str:
        return f"Fill {self.op.label} into {self.ring}{_lag(self.stage)}"


@dataclass(frozen=True)
class Issue(_OfOp):
    """Consumer: start a matmul and go on; `turn` numbers its turn until turns are steps."""

    turn: int | None = None

    def __str__(self) -> str:
        return super().__str__() + ("" if self.turn is None else f", turn {self.turn}")


class Run(_OfOp):
    """Consumer: any other op."""


class Take(_OfOp):
    """Consumer: take the result of an op that the first group has done for all."""


class Send(_OfOp):
    """Consumer: start the copies of a store whose panels are written (`LaunchPlan.late_stores`);
    nothing in a stage that no iteration has reached."""


@dataclass(frozen=True)
class Join(_OfGroup):
    """Consumer: wait until at most `count` started matmuls are unfinished; `in_turn`: the group
    whose turn it is with what one does in an iteration, which the next step belongs to."""

    count: int = 0
    names: tuple[str, ...] = ()  # variables whose value becomes readable
    in_turn: bool = False

    def __str__(self) -> str:
        form = f"Join{' in turn' if self.in_turn else ''} <= {self.count}"
        return form + (f": {', '.join(self.names)}" if self.names else "")


class GroupSync(_OfGroup):
    """Consumer: the warps of the group wait for one another."""


class FencedGroupSync(_OfGroup):
    """Consumer: the same, and matmuls see what they wrote to shared memory before."""


class PanelSync(_OfGroup):
    """Consumer: the warps of the group wait for one another, and for all copies that it started:
    they have read their panels."""


class TurnWait(_OfGroup):
    """Consumer: wait for the group's turn with the tensor core."""


class TurnPass(_OfGroup):
    """Consumer: give the turn to the next group."""


class Ahead(_OfGroup):
    """Consumer: take the next task and do the role's `ahead` for it (`passes.overlap`)."""


RingStep = Acquire | Publish | Wait | Release
OpStep = Fill | Issue | Run | Take
GroupStep = Join | GroupSync | FencedGroupSync | PanelSync | TurnWait | TurnPass
Step = RingStep | OpStep | GroupStep | Meet | Share | Send | Ahead


def start_of(op: Op) -> Issue | Run:
    """The step in which a consumer does an op."""
    return Issue(op) if op.kind == "mma" else Run(op)


def _lag(stage: int) -> str:
    return f" (iteration -{stage})" if stage else ""
