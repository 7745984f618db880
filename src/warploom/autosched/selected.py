"""A kernel that was decided on, before it is compiled."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from warploom.codegen.compile.build import Built, build, emitted
from warploom.codegen.ir.plan import KernelSchedule, LaunchPlan
from warploom.codegen.ir.source import CudaSource
from warploom.codegen.simt.schedule import SimtSchedule
from warploom.tile import Program

HOPPER = "sm_90a"


@dataclass(frozen=True)
class Selected:
    """The kernel to compile.

    `name` is the name of the tuned table's variant if `tuned`, otherwise of the schedule. `config`
    is the configuration of `program`: a variant sets tiles of its own. `allow` names the faults of
    the compiler that are accepted (`build.ALLOWED`). `after` is a second kernel, which goes on from
    what this one leaves in memory.
    """

    name: str
    config: Any
    program: Program
    schedule: KernelSchedule | SimtSchedule
    arch: str = HOPPER
    allow: tuple[str, ...] = ()
    tuned: bool = False
    after: Selected | None = None

    def __str__(self) -> str:
        return f"the tuned table's variant {self.name}" if self.tuned else f"schedule {self.name}"

    @property
    def launch(self) -> LaunchPlan:
        """The launch plan of the schedule."""
        return self.schedule.launch

    def before(self, second: tuple[Program, SimtSchedule] | None) -> Selected:
        """This one with a second kernel after it, if there is any."""
        if second is None:
            return self
        program, schedule = second
        after = replace(self, name=schedule.name, program=program, schedule=schedule, allow=())
        return replace(self, after=after)

    def build(self) -> Built:
        """Compile it, and what comes after it; raises what `build.build` raises."""
        made = build(self.program, self.schedule, self.arch, self.allow)
        return made if self.after is None else replace(made, after=self.after.build())

    def emitted(self) -> CudaSource:
        """Its CUDA C++."""
        return emitted(self.program, self.schedule, self.arch)
