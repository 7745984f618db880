"""The answer: when each operation issues, in which warp group, with how deep rings, how proved."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from warploom.errors import InputError
from warploom.files import read_json
from warploom.schedule.model.graph import expect_schema, part_of, refuse_unknown
from warploom.schedule.model.rules import OURS, Rules

SCHEMA = "warploom.schedule"
VERSION = 1


@dataclass(frozen=True)
class Group:
    """A launched warp group; `registers` per thread is what setmaxnreg would give it."""

    name: str
    warps: int
    registers: int


@dataclass(frozen=True)
class Objective:
    """One stage of the lexicographic objective: its value and how low it could still be."""

    name: str
    value: int
    bound: int
    unit: str
    seconds: float = 0.0

    @property
    def proved(self) -> bool:
        """Whether no schedule under the same rules does better."""
        return self.bound >= self.value

    @property
    def gap(self) -> float:
        """How far the bound is below the value, as a fraction of the value."""
        return 0.0 if self.proved else (self.value - self.bound) / max(1, abs(self.value))

    def __str__(self) -> str:
        verdict = "proved" if self.proved else f"unproved, bound {self.bound}, gap {self.gap:.1%}"
        return f"{self.name} {self.value} {self.unit} ({verdict})"


@dataclass(frozen=True)
class Proof:
    """Why no smaller initiation interval exists under the model.

    lower_bound     largest interval below which none exists: analytic, or the solver's
    status          "analytic" (the interval meets a resource or recurrence bound), "infeasible"
                    (the solver refuted every smaller one), "second search" (it was open, and
                    `refute.refute` refuted them), "unproved", or "written" (by a person)
    reason          the binding resource in words
    stages          most overlapped iterations the refutation allowed; 0: any number
    objective_stages    the same for the bounds of the objectives
    unreached       objectives that time did not reach: nothing is known of how low they could be
    confirmed       what code that shares nothing with the solver's model says of the lower bound
                    (`refute.refute`): "" where it was not asked, "confirmed", or why not
    """

    lower_bound: int
    status: str
    reason: str
    solver: str = ""
    seconds: float = 0.0
    stages: int = 0
    objective_stages: int = 0
    unreached: tuple[str, ...] = ()
    confirmed: str = ""


@dataclass(frozen=True)
class Schedule:
    """A modulo schedule: iteration i issues `node` at time[node] + i * initiation_interval.

    Ring `r` has ring_depth[r] slots; `group` maps nodes to the names in `groups`.
    """

    graph: str
    target: str
    initiation_interval: int
    length: int
    time: Mapping[str, int]
    group: Mapping[str, str]
    ring_depth: Mapping[str, int]
    groups: tuple[Group, ...]
    objectives: tuple[Objective, ...] = ()
    proof: Proof = Proof(0, "written", "")
    rules: Rules = OURS
    params: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        if self.initiation_interval < 1:
            raise InputError(
                f"schedule of {self.graph}: initiation interval {self.initiation_interval}, "
                "expected >= 1"
            )
        if set(self.time) != set(self.group):
            odd = sorted(set(self.time) ^ set(self.group))
            raise InputError(f"schedule of {self.graph}: node {odd[0]} lacks a time or a group")
        names = {group.name for group in self.groups}
        for node, group in self.group.items():
            if group not in names:
                raise InputError(
                    f"schedule of {self.graph}: node {node} is in group {group!r}, "
                    f"expected one of {', '.join(sorted(names))}"
                )

    @property
    def stages(self) -> int:
        """Iterations in flight at once: ceil(length / II)."""
        return -(-self.length // self.initiation_interval)

    @property
    def proved(self) -> bool:
        """Whether the interval and every stage of the objective are proved optimal."""
        return (
            self.proof.status in ("analytic", "infeasible", "second search")
            and not self.proof.unreached
            and all(objective.proved for objective in self.objectives)
        )

    def stage(self, node: str) -> int:
        """In which overlapped iteration the node issues, counted from the oldest start."""
        return self.time[node] // self.initiation_interval

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def __str__(self) -> str:
        lines = [
            f"{self.graph} on {self.target}: II {self.initiation_interval}, length {self.length}, "
            f"{self.stages} stages, rings "
            + (", ".join(f"{name} x{depth}" for name, depth in self.ring_depth.items()) or "none")
        ]
        for group in self.groups:
            own = sorted((self.time[n], n) for n in self.time if self.group[n] == group.name)
            body = " ".join(f"{node}@{start}" for start, node in own)
            lines.append(f"  {group.name} ({group.warps} warps, {group.registers} regs): {body}")
        lines += [f"  {objective}" for objective in self.objectives]
        lines += [f"  {name} not reached in time" for name in self.proof.unreached]
        lines.append(f"  proof: {self.proof.status}: {self.proof.reason}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The schedule as plain JSON data."""
        return {
            "schema": SCHEMA,
            "version": VERSION,
            "graph": self.graph,
            "target": self.target,
            "initiation_interval": self.initiation_interval,
            "length": self.length,
            "time": dict(self.time),
            "group": dict(self.group),
            "ring_depth": dict(self.ring_depth),
            "groups": [asdict(group) for group in self.groups],
            "objectives": [asdict(objective) for objective in self.objectives],
            "proof": asdict(self.proof),
            "rules": self.rules.to_json(),
            "params": dict(self.params),
        }

    @classmethod
    def from_json(cls, data: Any, origin: str = "schedule") -> Schedule:
        """A schedule back from JSON data, or from what `warploom schedule --json` wrote.

        Raises `InputError` naming what is wrong.
        """
        table = dict(expect_schema(part_of(data, "schedule"), SCHEMA, VERSION, origin))
        del table["schema"], table["version"]
        refuse_unknown(table, cls.__dataclass_fields__, origin)
        try:
            table["groups"] = tuple(Group(**item) for item in _tables(table["groups"]))
            table["objectives"] = tuple(
                Objective(**item) for item in _tables(table.get("objectives", []))
            )
            if "proof" in table:
                proof = Proof(**table["proof"])
                table["proof"] = replace(proof, unreached=tuple(proof.unreached))
            table["rules"] = Rules.from_json(table.get("rules", {}))
            return cls(**table)
        except (KeyError, TypeError) as error:
            raise InputError(f"{origin}: incomplete schedule: {error}") from None

    @classmethod
    def read(cls, path: Path) -> Schedule:
        """Read a schedule from a JSON file."""
        return cls.from_json(read_json(path), str(path))


def _tables(items: Any) -> list[dict[str, Any]]:
    return cast("list[dict[str, Any]]", items)
