"""The space of kernels of one program, as data: a point says all that is chosen.

settings   the values of the sizes that the program leaves open (`tile.tunable`)
rules      the rewrites applied, in order (`rewrites.rules`)
order      how its loops are pipelined, by the name of a schedule (`autosched.schedules`)
plan       how the grid is laid over the GPU, by the names of `PLANS`
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from warploom.autosched.schedules import NAMES, fitting_name, schedule_named
from warploom.autosched.solve import Search
from warploom.codegen.ir.plan import LaunchPlan
from warploom.errors import InputError
from warploom.kernels.library import configure, entry
from warploom.kernels.select import Selected
from warploom.kernels.user import UserKernel, free_sizes, load_kernel
from warploom.rewrites.check import check_meaning
from warploom.rewrites.rules import RULES, Form, applied, forms
from warploom.tile import Op, Program

CHAIN_ORDERS = ("pingpong", "pingpong-early", "overlapped", "overlapped-early")
PLAIN_ORDERS = ("inflight", "lcsf")
RESCALES = ("lazy_rescale", "optimistic_rescale")
WIDE = (40, 232)  # registers a thread, where the loading thread needs more than the usual 24
WIDE_GROUPS = 2  # compute groups beside which it has only 24
WHOLE_GRID = 1 << 20  # a super-group that takes in every row


@dataclass(frozen=True)
class Point:
    """One kernel of the space."""

    settings: tuple[tuple[str, str], ...] = ()
    rules: tuple[str, ...] = ()
    order: str = ""
    plan: tuple[str, ...] = ()

    def __str__(self) -> str:
        sizes = [f"{name}={value}" for name, value in self.settings]
        words = [*sizes, *self.rules, self.order, *self.plan]
        return " ".join(words)

    def to_json(self) -> dict[str, Any]:
        """The point as plain JSON data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Point:
        """A point back from JSON data."""
        settings = tuple((str(name), str(value)) for name, value in data["settings"])
        return cls(settings, tuple(data["rules"]), str(data["order"]), tuple(data["plan"]))


@dataclass(frozen=True)
class Space:
    """The points of a user's kernel under some settings; `seconds` are the solver's, a loop."""

    name: str
    given: Mapping[str, str]
    seconds: float = 10.0

    @cached_property
    def kernel(self) -> UserKernel:
        """The user's kernel."""
        return load_kernel(self.name)

    def sizes(self) -> Iterator[tuple[tuple[str, str], ...]]:
        """Every choice of the open sizes that the settings leave open, the author's first."""
        free = {n: c for n, c in free_sizes(self.kernel).items() if n not in self.given}
        for values in itertools.product(*free.values()):
            yield tuple((name, str(value)) for name, value in zip(free, values, strict=True))

    def config(self, settings: tuple[tuple[str, str], ...]) -> dict[str, Any]:
        """The settings of the program for a choice of sizes."""
        kernel = entry(self.name)
        known = {**self.given, **dict(settings)}
        own = {name: text for name, text in known.items() if name in kernel.settings}
        return configure(self.name, own)[0]

    def textbook(self, settings: tuple[tuple[str, str], ...]) -> Program:
        """The program as its author wrote it."""
        return self.kernel.trace(self.config(settings))

    def __getstate__(self) -> dict[str, Any]:
        """Without the kernel, which a worker process loads by itself."""
        return {"name": self.name, "given": dict(self.given), "seconds": self.seconds}

    def forms(self, settings: tuple[tuple[str, str], ...]) -> tuple[Form, ...]:
        """What the rules make of the program at these sizes."""
        return forms(self.textbook(settings))

    def programs(self) -> Iterator[tuple[dict[str, Any], Program]]:
        """Every configuration with every form of its program."""
        for settings in self.sizes():
            for form in self.forms(settings):
                yield self.config(settings), form.program

    def check(self, point: Point, sizes: Mapping[str, int]) -> float:
        """How far the rewritten program of a point is from the textbook in float64; raises
        `CheckFailed` where that is more than rounding."""
        textbook = self.textbook(point.settings)
        arrays = self.kernel.arrays(textbook, sizes, seed=0)
        rewritten = applied(textbook, point.rules)
        return check_meaning(textbook, rewritten, arrays, self.kernel.scalars)

    def selected(self, point: Point, gpu: str) -> Selected:
        """The program and schedule of a point; raises `InputError` where it is not legal."""
        program = applied(self.textbook(point.settings), point.rules)
        plan = self.kernel.launch or LaunchPlan()
        plan = plan.with_options(
            skip_unit=any(rule in RESCALES for rule in point.rules),
            skip_voted="optimistic_rescale" in point.rules,
        )
        for name in point.plan:
            plan = PLANS[name](program, plan)
        search = Search(seconds=self.seconds, replayed=True)
        schedule = schedule_named(program, point.order, plan, gpu, search)
        if plan.tile_scheduler == "dynamic" and len(schedule.compute) == WIDE_GROUPS:
            schedule = schedule_named(program, point.order, plan, gpu, search, WIDE)
        return Selected(str(point), self.config(point.settings), program, schedule)


def orders(program: Program) -> tuple[str, ...]:
    """The named orders that suit a program's loops, the usual one first."""
    usual = fitting_name(program)
    if usual is None:
        return ()
    chain = usual in ("pingpong", "overlapped")
    others = CHAIN_ORDERS if chain else PLAIN_ORDERS
    return (usual, *(name for name in others if name != usual and name in NAMES))


def _dynamic(program: Program, plan: LaunchPlan) -> LaunchPlan:
    return plan.with_options(tile_scheduler="dynamic", reverse=_growing(program) or plan.reverse)


def _longest_first(program: Program, plan: LaunchPlan) -> LaunchPlan:
    reverse = _growing(program)
    if not reverse:
        raise InputError("no loop grows along the last axis of the grid")
    return plan.with_options(reverse=reverse)


def _growing(program: Program) -> tuple[str, ...]:
    """The last grid axis, where later tasks along it have more iterations."""
    axis = program.grid[-1][0]
    symbols = [loop.stop.symbols() | loop.start.symbols() for loop in program.loops()]
    return (axis,) if any(axis in names for names in symbols) else ()


def _prefetch(program: Program, plan: LaunchPlan) -> LaunchPlan:
    rings = dict.fromkeys(_loaded_once(program), 2)
    if not rings:
        raise InputError("no operand is loaded once a task")
    return plan.with_options(task_rings=rings, store_panels=1)


def _overlap(program: Program, plan: LaunchPlan) -> LaunchPlan:
    return _prefetch(program, plan).with_options(overlap_next_task=True)


def _multicast(program: Program, plan: LaunchPlan) -> LaunchPlan:
    axis = _shared_along(program)
    if not axis:
        raise InputError("every operand is another one in neighbouring tasks")
    return plan.with_options(cluster=(axis, 2), supergroup=8)


def _shared_along(program: Program) -> str:
    """One of the last two grid axes, along which neighbours take one operand in common."""
    operands = {src.name for op in program.ops() if op.kind == "mma" for src in op.srcs[:2]}
    inside = [op for loop in program.loops() for op in loop.body if isinstance(op, Op)]
    loads = [op for op in inside if op.kind == "load" and op.dst and op.dst.name in operands]
    if _growing(program):
        return ""  # their loops end at different iterations
    for axis, _ in program.grid[-2:]:
        if any(all(axis not in span.start.symbols() for span in op.spans) for op in loads):
            return axis
    return ""


def _loaded_once(program: Program) -> list[str]:
    """Tiles loaded outside of loops that a matmul reads."""
    operands = {src.name for op in program.ops() if op.kind == "mma" for src in op.srcs[:2]}
    outside = [item for item in program.body if isinstance(item, Op) and item.kind == "load"]
    return [op.dst.name for op in outside if op.dst is not None and op.dst.name in operands]


PLANS = {
    "longest_first": _longest_first,
    "dynamic": _dynamic,
    "prefetch": _prefetch,
    "overlap": _overlap,
    "multicast": _multicast,
}


def plans(program: Program) -> tuple[tuple[str, ...], ...]:
    """The plans that have a meaning for a program; () is the plain one."""
    balance = [(), ("longest_first",), ("dynamic",)] if _growing(program) else [()]
    ahead: list[tuple[str, ...]] = [()]
    if _loaded_once(program):
        ahead += [("prefetch",)] + [("overlap",)] * (len(program.loops()) == 1)
    found = [(*one, *other) for one in balance for other in ahead]
    return (*found, *([("multicast",)] if _shared_along(program) else []))


def described(space: Space) -> str:
    """The space for people: what is open, which rules have a place, orders and plans."""
    first = next(iter(space.sizes()))
    made = space.forms(first)
    base = made[0]
    lines = [f"space of {space.name}"]
    for name, choices in free_sizes(space.kernel).items():
        fixed = space.given.get(name)
        lines.append(f"  {name}: {fixed or ', '.join(map(str, choices))}")
    lines.append("  rules, wherever they have a place:")
    names = list(dict.fromkeys(name for form in made for name in form.rules))
    for name in names:
        always = "always" if name in base.rules else "or not"
        lines.append(f"    {name} ({always}): keeps {RULES[name].told('keeps')}")
    usual = orders(base.program)
    lines.append(f"  orders: {', '.join(usual) or 'threads'}")
    told = [" and ".join(plan) or "plain" for plan in plans(base.program)]
    lines.append(f"  plans: {', '.join(told)}")
    count = len(list(space.sizes())) * len(made) * max(1, len(usual)) * len(told)
    lines.append(f"  {count:,} points")
    return "\n".join(lines)
