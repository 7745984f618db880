"""Why is there no schedule at an interval? The families of constraints that forbid it.

Each family is first asked alone (with dependences and units): those that are impossible by
themselves are causes, independent of each other. If none is, families are dropped from the full
set one by one while it stays impossible: what is left is a core, impossible only together. Every
answer is INFEASIBLE, SAT or UNKNOWN (time limit), never a guess.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from warploom.schedule.model.bounds import lower_bounds
from warploom.schedule.solve.encoding import FAMILIES
from warploom.schedule.solve.solve import Problem, joint_encoding
from warploom.schedule.solve.solver import run

WORDS = {
    "registers": "registers of a warp group",
    "waits": "blocking waits: an operation would wait at a barrier under another of its group",
    "handoffs": "the time to hand values between groups",
    "memory": "shared or tensor memory over time",
    "issue": "the instruction stream of a warp group",
    "carried": "register values carried to the next iteration stay in one group",
}


@dataclass(frozen=True)
class Explanation:
    """causes: families impossible alone; core: families impossible together (may be empty)."""

    interval: int
    stages: int
    status: str
    causes: tuple[str, ...]
    core: tuple[str, ...]
    asked: dict[str, str]

    def __str__(self) -> str:
        head = f"II {self.interval} with up to {self.stages} stages: {self.status}"
        if self.status != "INFEASIBLE":
            return head
        if self.causes:
            return f"{head}; each alone forbids it: " + "; ".join(WORDS[c] for c in self.causes)
        if self.core:
            return f"{head}; together they forbid it: " + "; ".join(WORDS[c] for c in self.core)
        return f"{head}; units and dependences alone forbid it"


def explain(problem: Problem, interval: int, stages: int, seconds: float = 10.0) -> Explanation:
    """Ask which families forbid `interval`, at most `seconds` a question."""
    minimum = lower_bounds(problem.graph, problem.target).minimum
    if interval < minimum:
        return Explanation(interval, stages, "INFEASIBLE", (), (), {"units": "INFEASIBLE"})
    effort = replace(problem.effort, seconds=seconds)
    asked: dict[str, str] = {}

    def ask(families: tuple[str, ...]) -> str:
        label = "+".join(families) or "units"
        if label not in asked:
            without = frozenset(FAMILIES) - set(families)
            it = joint_encoding(problem, interval, stages, without)
            status = run(it.model, effort, []).status
            asked[label] = "SAT" if status == "OPTIMAL" else status
        return asked[label]

    status = ask(FAMILIES)
    if status != "INFEASIBLE" or ask(()) == "INFEASIBLE":
        return Explanation(interval, stages, status, (), (), asked)
    causes = tuple(family for family in FAMILIES if ask((family,)) == "INFEASIBLE")
    core = FAMILIES if not causes else ()
    for family in core:
        rest = tuple(other for other in core if other != family)
        if ask(rest) == "INFEASIBLE":
            core = rest
    return Explanation(interval, stages, status, causes, core, asked)
