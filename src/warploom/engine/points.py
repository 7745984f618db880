"""The space of kernels of one program, as data: a point says all that is chosen.

settings   the values of the sizes that the program leaves open (`tile.tunable`)
rules      the rewrites applied, in order (`rewrites.rules`)
order      how its loops are pipelined, by the name of a schedule (`autosched.schedules`)
plan       how the grid is laid over the GPU (`engine.plans`)
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
from warploom.engine.plans import CODE, choices, planned, plans, registers
from warploom.kernels.library import configure, entry
from warploom.kernels.select import Selected
from warploom.kernels.user import UserKernel, free_sizes, load_kernel, portable
from warploom.objects import hold, is_held
from warploom.rewrites.check import check_meaning
from warploom.rewrites.rules import RULES, Form, applied, forms
from warploom.tile import Program

CHAIN_ORDERS = ("pingpong", "pingpong-early", "overlapped", "overlapped-early")
PLAIN_ORDERS = ("inflight", "lcsf")
RESCALES = ("lazy_rescale", "optimistic_rescale")


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
        """Without the kernel, which a worker process loads by itself where it can."""
        state: dict[str, Any] = {
            "name": self.name,
            "given": dict(self.given),
            "seconds": self.seconds,
        }
        if is_held(self.name):
            configs = [{}, *map(self.config, self.sizes())]
            state["kernel"] = portable(self.kernel, configs)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "kernel" in state:
            hold(state["kernel"], state["name"])
        self.__dict__.update(state)

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
        plan = self.plan(program, point)
        search = Search(seconds=self.seconds, replayed=True)
        schedule = schedule_named(program, point.order, plan, gpu, search)
        split = registers(point.plan, len(schedule.compute), plan.resident)
        if split is not None:
            schedule = schedule_named(program, point.order, plan, gpu, search, split)
        return Selected(str(point), self.config(point.settings), program, schedule)

    def plan(self, program: Program, point: Point) -> LaunchPlan:
        """How a point lays out a program."""
        plan = (self.kernel.launch or LaunchPlan()).with_options(
            skip_unit=any(rule in RESCALES for rule in point.rules),
            skip_voted="optimistic_rescale" in point.rules,
        )
        return planned(program, plan, point.plan)


def orders(program: Program) -> tuple[str, ...]:
    """The named orders that suit a program's loops, the usual one first."""
    usual = fitting_name(program)
    if usual is None:
        return ()
    chain = usual in ("pingpong", "overlapped")
    others = CHAIN_ORDERS if chain else PLAIN_ORDERS
    return (usual, *(name for name in others if name != usual and name in NAMES))


def described(space: Space) -> str:
    """The space for people: what is open, which rules have a place, orders and plans."""
    first = next(iter(space.sizes()))
    made = space.forms(first)
    base = made[0]
    lines = [f"space of {space.name}"]
    for name, values in free_sizes(space.kernel).items():
        fixed = space.given.get(name)
        lines.append(f"  {name}: {fixed or ', '.join(map(str, values))}")
    lines.append("  rules, wherever they have a place:")
    names = list(dict.fromkeys(name for form in made for name in form.rules))
    for name in names:
        always = "always" if name in base.rules else "or not"
        lines.append(f"    {name} ({always}): keeps {RULES[name].told('keeps')}")
    usual = orders(base.program)
    lines.append(f"  orders: {', '.join(usual) or 'threads'}")
    lines.append("  plans, each option or none of its values:")
    open_ = choices(base.program)
    lines += [f"    {name}: {', '.join(values)}" for name, values in open_.items()]
    count = len(list(space.sizes())) * len(made) * max(1, len(usual)) * len(plans(base.program))
    for name in CODE:
        count *= 1 + len(open_.get(name, ()))
    lines.append(f"  {count:,} points")
    return "\n".join(lines)
