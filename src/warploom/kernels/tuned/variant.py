"""Variants of a kernel: points that are told by a name, and what a kernel makes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from warploom.autosched.plans import adding_up, planned, policy, registers
from warploom.autosched.points import Point
from warploom.autosched.schedules import schedule_for
from warploom.autosched.selected import Selected
from warploom.autosched.solve import Search
from warploom.codegen.ir.fuse import turned_operands
from warploom.codegen.ir.plan import KernelSchedule, LaunchPlan
from warploom.perf.frame import Frame
from warploom.perf.launch_tasks import Numbers
from warploom.perf.launch_time import Launch
from warploom.tile import Program

Sizes = Mapping[str, Any]  # a length may be a list of those of packed sequences
Arrays = Mapping[str, Numbers]


@dataclass(frozen=True)
class Template:
    """What the points of a kernel choose from; configurations are the kernel's own.

    textbook   the program of a configuration, as its author wrote it
    free       the sizes that a configuration leaves open, with their choices, the usual one first
    config     the configuration of a point, from one that says nothing of what a point chooses
    program    the program of such a configuration, rewritten by the rules of the point
    plan       its launch plan before the point's options
    fit        the point as another configuration than it was found for can have it
    takes      whether there is a kernel of a point for a configuration
    sizes      dimensions of the arrays for sizes as a table has them, and the arrays that tasks
               read
    """

    textbook: Callable[[Any], Program]
    free: Callable[[Any], Mapping[str, Sequence[str]]]
    config: Callable[[Any, Point], Any]
    program: Callable[[Any, Point], Program]
    plan: Callable[[Any, Point], LaunchPlan]
    fit: Callable[[Any, Point], Point] = lambda config, point: point
    takes: Callable[[Any, Point], bool] = lambda config, point: True
    sizes: Callable[[Any, Sizes], tuple[Mapping[str, int], Arrays]] = lambda config, sizes: (
        sizes,
        {},
    )


@dataclass(frozen=True)
class Variant:
    """An entry of a tuned table: a point under a name."""

    name: str
    point: Point
    template: Template

    @property
    def allow(self) -> tuple[str, ...]:
        """Faults of the compiler that are accepted."""
        return self.point.allow

    def having(self, name: str, *words: str, order: str = "") -> Variant:
        """Another one under a name, with other options of its plan, or in another order."""
        point = self.point.having(*words)
        return replace(self, name=name, point=replace(point, order=order or point.order))

    @property
    def whole(self) -> bool:
        """Whether it is one kernel, without a workspace."""
        return "parts" not in self.point.options

    def takes(self, base: Any) -> bool:
        """Whether there is a kernel of it for a configuration."""
        return self.template.takes(base, self.template.fit(base, self.point))

    def config(self, base: Any) -> Any:
        """The configuration with what the point chooses."""
        return self.template.config(base, self.template.fit(base, self.point))

    def laid_out(self, config: Any) -> tuple[Program, LaunchPlan]:
        """The program of a configuration that `config` gave, and its launch plan."""
        key = str(config)
        if key not in self._laid_out:
            point = self.template.fit(config, self.point)
            program = self.template.program(config, point)
            plan = self.template.plan(config, point)
            self._laid_out[key] = planned(program, plan, point.plan)
        return self._laid_out[key]

    @cached_property
    def _laid_out(self) -> dict[str, tuple[Program, LaunchPlan]]:
        """By configuration: a choice among many variants asks for the same ones again."""
        return {}

    def program(self, config: Any) -> Program:
        """The program of a configuration that `config` gave."""
        return self.laid_out(config)[0]

    def schedule(
        self, config: Any, gpu: str = "h200", search: Search | None = None
    ) -> KernelSchedule:
        """Its schedule; raises `InputError` where the point is not legal."""
        point = self.template.fit(config, self.point)
        program, plan = self.laid_out(config)
        asked = policy(point.order, plan, point.plan, search)
        made = schedule_for(program, asked, gpu)
        assert isinstance(made, KernelSchedule)  # a point has the name of an order
        turns = bool(turned_operands(program))
        split = registers(point.plan, len(made.compute), plan.resident, turns)
        if split is not None:
            made = schedule_for(program, replace(asked, registers=split), gpu)
            assert isinstance(made, KernelSchedule)
        return made

    def selected(self, base: Any, gpu: str = "h200", search: Search | None = None) -> Selected:
        """The kernel of a configuration that says nothing of what a point chooses."""
        config = self.config(base)
        schedule = self.schedule(config, gpu, search)
        program = self.program(config)
        made = Selected(self.name, config, program, schedule, allow=self.allow, tuned=True)
        return made.before(adding_up(self.template.textbook(config), self.point.plan))

    def launch(self, config: Any, sizes: Sizes, gpu: str) -> Launch:
        """At sizes as a table has them."""
        program, plan = self.laid_out(config)
        frame = self._frames.setdefault(id(program), Frame(program, plan))
        dims, arrays = self.template.sizes(config, sizes)
        return Launch(program, plan, dims, gpu, arrays, frame)

    @cached_property
    def _frames(self) -> dict[int, Frame]:
        """Of the programs in `_laid_out`, which live as long."""
        return {}
