"""A kernel that was decided on, before it is compiled."""

from __future__ import annotations

from dataclasses import dataclass
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
    the compiler that are accepted (`build.ALLOWED`).
    """

    name: str
    config: Any
    program: Program
    schedule: KernelSchedule | SimtSchedule
    arch: str = HOPPER
    allow: tuple[str, ...] = ()
    tuned: bool = False

    def __str__(self) -> str:
        return f"the tuned table's variant {self.name}" if self.tuned else f"schedule {self.name}"

    @property
    def launch(self) -> LaunchPlan:
        """The launch plan of the schedule."""
        return self.schedule.launch

    def build(self) -> Built:
        """Compile it; raises what `build.build` raises."""
        return build(self.program, self.schedule, self.arch, self.allow)

    def emitted(self) -> CudaSource:
        """Its CUDA C++."""
        return emitted(self.program, self.schedule, self.arch)
