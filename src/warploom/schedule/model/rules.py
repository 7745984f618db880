"""What the paper leaves open, decided: the rules a schedule is legal under, and its prices.

The encoding, the checker and the simulator each read these tables; they share no other code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from warploom.errors import InputError
from warploom.schedule.model.graph import refuse_unknown


@dataclass(frozen=True)
class Rules:
    """The decided ambiguities.

    window      cycles before a blocking wait in which its group may run nothing else (the paper's
                CONCUR): "issue" counts an asynchronous operation's issue only; "literal" its span
    lifetime    a value dies at the "issue" of its last reader (the paper), or at its "completion"
                (what the hardware needs): a ring slot when the reader's release arrives, an operand
                in registers when an asynchronous reader completes, one in memory when its
                reader's reservations end (the tensor core reads in order) or, if the reader is
                synchronous, when it ends
    unroll      copies of the loop body in the emitted code: a register value may live at most
                unroll x II, because registers cannot be indexed; 0 means unlimited (the paper)
    carried_in_group    a register value carried to the next iteration stays in one group
    spill_memory        a hand-off between groups takes a buffer of shared memory, not only time
    """

    window: str = "issue"
    lifetime: str = "completion"
    unroll: int = 1
    carried_in_group: bool = True
    spill_memory: bool = True

    def __post_init__(self) -> None:
        if self.window not in ("issue", "literal"):
            raise InputError(f"rules: window {self.window!r}, expected 'issue' or 'literal'")
        if self.lifetime not in ("issue", "completion"):
            raise InputError(f"rules: lifetime {self.lifetime!r}, expected 'issue' or 'completion'")
        if self.unroll < 0:
            raise InputError(f"rules: unroll {self.unroll}, expected 0 (unlimited) or more")

    def to_json(self) -> dict[str, Any]:
        """The rules as plain JSON data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Rules:
        """Rules back from JSON data."""
        refuse_unknown(data, cls.__dataclass_fields__, "rules")
        return cls(**data)


OURS = Rules()
PAPER = Rules(lifetime="issue", unroll=0, carried_in_group=False, spill_memory=False)


@dataclass(frozen=True)
class Prices:
    """Weights of the traffic objective, in points; one point is one cross-group edge.

    A value that crosses groups costs its registers // words_per_point plus `edge`. A wait costs
    `wait_per_warp` for each warp that performs it. With `local_waits` every blocking edge counts,
    since it is a barrier wherever its ends sit; without, only those that cross. A warp that is
    launched costs `warp` (24 registers, the floor of setmaxnreg, would be 24 * 32 / 64 = 12): 0,
    because the number of groups is an objective of its own, the last.

    In all regs // 64 + 1 a crossing value and 20 a wait: 5 for each of a warp group's 4 warps.
    The weights are ours.
    """

    edge: int = 1
    words_per_point: int = 64
    wait_per_warp: int = 5
    local_waits: bool = True
    warp: int = 0

    def to_json(self) -> dict[str, Any]:
        """The prices as plain JSON data."""
        return asdict(self)


CROSSING_PRICES = Prices(local_waits=False, warp=0)
