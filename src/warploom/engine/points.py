"""The space of kernels of one program: its points, and what a point is built from.

A kernel of the user leaves sizes open; one of the library has those of the points in its table.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from warploom.autosched.plans import (
    CODE,
    adding_up,
    choices,
    in_parts,
    planned,
    plans,
    sliced,
    values,
)
from warploom.autosched.points import Point
from warploom.autosched.schedules import NAMES, fitting_name
from warploom.autosched.selected import Selected
from warploom.autosched.solve import Search
from warploom.codegen.ir.plan import LaunchPlan
from warploom.codegen.simt.schedule import SimtSchedule
from warploom.errors import InputError
from warploom.kernels.library import Entry, configure, entry
from warploom.kernels.tuned.variant import Template, Variant
from warploom.kernels.user import load_kernel, portable
from warploom.objects import hold, is_held
from warploom.rewrites.check import check_meaning
from warploom.rewrites.rules import RULES, Form, applied, forms
from warploom.rewrites.split_sums import PARTS, SLICES
from warploom.tile import Program

CHAIN_ORDERS = ("pingpong", "pingpong-early", "overlapped", "overlapped-early", "lcsf")
PLAIN_ORDERS = ("inflight", "lcsf", "lcsf-early")


@dataclass(frozen=True)
class Space:
    """The points of a kernel under some settings; `seconds` are the solver's, a loop."""

    name: str
    given: Mapping[str, str]
    seconds: float = 10.0

    @cached_property
    def entry(self) -> Entry:
        """The kernel."""
        return entry(self.name)

    @property
    def template(self) -> Template:
        """What its points choose from; raises `InputError` for a kernel that leaves no choice."""
        if self.entry.template is None:
            raise InputError(f"{self.name}: a kernel without a table has no space to choose from")
        return self.entry.template

    @cached_property
    def base(self) -> Any:
        """Its configuration under the settings, before a point's choices."""
        own = {name: text for name, text in self.given.items() if name in self.entry.settings}
        return configure(self.name, own)[0]

    @cached_property
    def free(self) -> Mapping[str, tuple[str, ...]]:
        """The sizes left open, with their choices: those given have one."""
        found = self.template.free(self.base)
        return {
            name: (self.given[name],) if name in self.given else tuple(open_)
            for name, open_ in found.items()
        }

    def sizes(self) -> Iterator[tuple[tuple[str, str], ...]]:
        """Every choice of the open sizes that the settings leave open, the author's first."""
        open_ = {name: found for name, found in self.free.items() if name not in self.given}
        for chosen in itertools.product(*open_.values()):
            yield tuple(zip(open_, chosen, strict=True))

    def config(self, point: Point) -> Any:
        """The configuration of a point."""
        return self.template.config(self.base, point)

    def textbook(self, settings: tuple[tuple[str, str], ...]) -> Program:
        """The program as its author wrote it, at a choice of sizes."""
        if settings not in self._textbooks:
            self._textbooks[settings] = self.template.textbook(self.config(Point(settings)))
        return self._textbooks[settings]

    @cached_property
    def _textbooks(self) -> dict[tuple[tuple[str, str], ...], Program]:
        """By choice of sizes: a search asks for the same ones again."""
        return {}

    def rewritten(self, point: Point) -> Program:
        """The textbook at the point's sizes, by its rules, before it is laid out."""
        key = point.settings, point.rules
        if key not in self._rewritten:
            self._rewritten[key] = applied(self.textbook(point.settings), point.rules)
        return self._rewritten[key]

    @cached_property
    def _rewritten(self) -> dict[tuple[object, object], Program]:
        """By choice of sizes and rules."""
        return {}

    def laid_out(self, program: Program, point: Point) -> tuple[Program, LaunchPlan]:
        """A program that `rewritten` gave, and the point's launch plan for it."""
        return planned(program, self.template.plan(self.config(point), point), point.plan)

    def __getstate__(self) -> dict[str, Any]:
        """Without the kernel, which a worker process loads by itself where it can."""
        state: dict[str, Any] = {
            "name": self.name,
            "given": dict(self.given),
            "seconds": self.seconds,
        }
        if is_held(self.name):
            configs: list[dict[str, Any]] = [
                {},
                *(self.config(Point(sizes)) for sizes in self.sizes()),
            ]
            state["kernel"] = portable(load_kernel(self.name), configs)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "kernel" in state:
            hold(state["kernel"], state["name"])
        self.__dict__.update(state)

    def forms(self, settings: tuple[tuple[str, str], ...]) -> tuple[Form, ...]:
        """What the rules make of the program at these sizes."""
        if settings not in self._forms:
            self._forms[settings] = forms(self.textbook(settings))
        return self._forms[settings]

    @cached_property
    def _forms(self) -> dict[tuple[tuple[str, str], ...], tuple[Form, ...]]:
        """By choice of sizes."""
        return {}

    def __contains__(self, point: Point) -> bool:
        """Whether a search may come to a point: its sizes are open ones (the usual one where it
        says none), its rules a form, its order one that suits the loops, and each option of its
        plan has a meaning."""
        usual = {name: found[0] for name, found in self.free.items()}
        chosen = usual | dict(point.settings)
        if chosen.keys() != usual.keys() or any(chosen[x] not in self.free[x] for x in usual):
            return False
        form = next((one for one in self.forms(point.settings) if one.rules == point.rules), None)
        if form is None or point.order not in orders(form.program):
            return False
        options = point.options.items()
        return all(value in values(form.program, name) for name, value in options)

    def programs(self) -> Iterator[tuple[Any, Program, tuple[Program, SimtSchedule] | None]]:
        """Every configuration with every form of its program, whole and in slices, or in parts and
        what adds these up."""
        for settings in self.sizes():
            for form in self.forms(settings):
                config = self.config(Point(settings, form.rules))
                yield config, form.program, None
                for number in values(form.program, "slices"):
                    yield config, sliced(form.program, int(number)), None
                for number in values(form.program, "parts"):
                    second = adding_up(self.textbook(settings), (f"parts={number}",))
                    yield config, in_parts(form.program, int(number)), second

    def check(self, point: Point, sizes: Mapping[str, int]) -> float:
        """How far the program of a point, rewritten and in slices, is from the textbook in float64;
        raises `CheckFailed` where that is more than rounding."""
        textbook, kernel = self.textbook(point.settings), self.entry
        arrays = kernel.arrays(textbook, sizes, 0)
        program, _ = self.laid_out(self.rewritten(point), point)
        second = adding_up(textbook, point.plan)
        if second is None:
            return check_meaning(textbook, program, arrays, kernel.scalars)
        lengths = {**sizes, SLICES: point.number("parts", 1)}
        sums = next(one for one in program.arrays if one.name == PARTS)
        arrays = {**arrays, PARTS: np.zeros([lengths[dim] for dim in sums.dims])}
        return check_meaning(textbook, [program, second[0]], arrays, kernel.scalars)

    def selected(self, point: Point, gpu: str) -> Selected:
        """The program and schedule of a point; raises `InputError` where it is not legal."""
        variant = Variant(str(point), point, self.template)
        search = Search(seconds=self.seconds, replayed=True)
        return replace(variant.selected(self.base, gpu, search), tuned=False)


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
    lines += [f"  {name}: {', '.join(values)}" for name, values in space.free.items()]
    names = list(dict.fromkeys(name for form in made for name in form.rules))
    if names:
        lines.append("  rules, wherever they have a place:")
    for name in names:
        always = "always" if name in base.rules else "or not"
        lines.append(f"    {name} ({always}): keeps {RULES[name].told('keeps')}")
    usual = orders(base.program)
    if not usual:
        return "\n".join([*lines, "  no orders and plans: without matmuls tiles lie over threads"])
    lines.append(f"  orders: {', '.join(usual)}")
    lines.append("  plans, each option or none of its values:")
    open_ = choices(base.program)
    lines += [f"    {name}: {', '.join(values)}" for name, values in open_.items()]
    count = len(list(space.sizes())) * len(made) * len(usual) * len(plans(base.program))
    for name in CODE:
        count *= 1 + len(open_.get(name, ()))
    lines.append(f"  {count:,} points")
    return "\n".join(lines)
