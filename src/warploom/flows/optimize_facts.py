"""What the first screen of a report says of a kernel: its time, what limits it, what was left.

Every sentence is made of figures: of the model of a launch (`perf.launch_time`), of the machine's
data, of what was measured. What is predicted is called so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import inf, prod
from typing import Any

from warploom.autosched.plans import values
from warploom.codegen.ir.block import BlockProgram
from warploom.codegen.ir.plan import KernelSchedule
from warploom.codegen.passes.lower import lower
from warploom.engine.explored import TIE
from warploom.errors import WarploomError
from warploom.flows.optimized import Optimized, Rival
from warploom.kernels.library import configure, entry
from warploom.kernels.select import full_sizes
from warploom.kernels.tuned.table import GPU, Row
from warploom.machine import Machine
from warploom.machine import load as load_machine
from warploom.perf.launch_time import NOTED, Launch, LaunchTime, why_slower
from warploom.perf.replay import Replay, Walk, of_walks, walked
from warploom.report.pages import sentence
from warploom.sass.decode.kernel import Kernel
from warploom.schedule.model.costs import costs

WORTH_A_TRY = 1.01  # times as long


@dataclass(frozen=True)
class Loss:
    """A part of the time: what it is, how many times longer all takes for it, what may help."""

    name: str
    factor: float
    advice: str


@dataclass(frozen=True)
class Facts:
    """A result with the machine code that was built."""

    result: Optimized
    kernel: Kernel

    @property
    def gpu(self) -> str:
        """The name of the machine."""
        return self.result.settings.gpu

    @cached_property
    def machine(self) -> Machine:
        """The machine's data."""
        return load_machine(self.gpu)

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """The sizes of the arrays for which times are given."""
        return full_sizes(self.result.settings.name, self.result.settings.settings)

    @cached_property
    def block(self) -> BlockProgram | None:
        """The block program; None for a kernel without a matmul."""
        selected = self.result.selected
        if not isinstance(selected.schedule, KernelSchedule):
            return None
        return lower(selected.program, selected.schedule)

    @cached_property
    def launch(self) -> Launch:
        """The program at its sizes."""
        selected = self.result.selected
        return Launch(selected.program, selected.launch, self.sizes, self.gpu)

    @cached_property
    def walks(self) -> list[Walk] | str:
        """The walk through the machine code of every loop, or why there is none."""
        selected = self.result.selected
        if self.block is None or not isinstance(selected.schedule, KernelSchedule):
            return "the model follows loops of matmuls, and this kernel has none"
        try:
            table, rates = costs(self.gpu), self.launch.rates()
            args = selected.program, selected.schedule, self.block, self.kernel, table, rates
            return list(walked(*args))
        except WarploomError as error:
            return str(error)

    @cached_property
    def replay(self) -> Replay | None:
        """The cycles that these walks give."""
        if isinstance(self.walks, str) or not self.walks or self.block is None:
            return None
        return of_walks(self.walks, self.block, self.kernel)

    @cached_property
    def predicted(self) -> LaunchTime | None:
        """The model's time; None where it has none."""
        return None if self.replay is None else self.launch.time(self.replay)

    @property
    def microseconds(self) -> float | None:
        """Measured, where it was; else predicted."""
        if self.result.measured is not None:
            return self.result.measured.microseconds
        return None if self.predicted is None else self.predicted.microseconds

    @cached_property
    def flops(self) -> float:
        """Operations of the matmuls: those asked for, or those that a user's loops do."""
        settings = self.result.settings
        config, _ = configure(settings.name, settings.settings)
        if asked := entry(settings.name).flops(config, self.sizes):
            return asked
        if self.replay is None:
            return 0.0
        trips = zip(self.launch.program.loops(), self.launch.trips, strict=True)
        done = {loop.index: int(each.sum()) for loop, each in trips}
        loops = self.replay.loops.values()
        return float(sum(done[one.loop] * one.flops for one in loops))

    @cached_property
    def bytes(self) -> float:
        """Bytes of the arrays that are read and of those that are written, each once."""
        touched = {(op.array, op.kind == "load") for op in self.launch.program.ops() if op.array}
        return float(
            sum(prod(self.sizes[dim] for dim in a.dims) * a.dtype.bytes for a, _ in touched)
        )

    @cached_property
    def limits(self) -> list[tuple[float, str]]:
        """(microseconds, of what) that no kernel of this work is below, the longest first."""
        found: list[tuple[float, str]] = []
        names = {op.srcs[0].type.dtype.rate for op in self.launch.program.ops() if op.kind == "mma"}
        peak = max((self.machine.value(f"peak.tensor_{name}") for name in names), default=0.0)
        if peak and self.flops:
            words = f"{self.flops / 1e9:,.1f} GFLOP at the tensor cores' {peak:,.0f} TFLOP/s"
            found.append((self.flops / peak * 1e-6, words))
        rate = self.machine.value("dram.bandwidth")
        words = f"{self.bytes / 1e6:,.1f} MB of arrays at DRAM's {rate / 1e12:.2f} TB/s"
        return sorted([*found, (self.bytes / rate * 1e6, words)], reverse=True)

    def losses(self) -> list[Loss]:
        """What stands between the limit and the predicted time, the largest first."""
        time, replay = self.predicted, self.replay
        if time is None or replay is None:
            return []
        boost, name = self.machine.value("clock.boost"), self.result.settings.name
        may_overlap = "overlap" in values(self.launch.program, "task")
        bound = sum(one.bound for one in replay.loops.values())
        if not bound or not time.busy:
            return []
        found = [
            Loss(
                f"loops above their bound: {replay.cycles:,.0f} cycles, bound {bound:,}",
                replay.cycles / bound,
                f"another order of the loop: `warploom optimize {name} --compare`",
            ),
            Loss(
                f"SMs without a task: {time.tasks:,} tasks for {self.launch.places} places",
                1.0 / time.busy,
                "tiles of another size, or dynamic scheduling of tasks",
            ),
            Loss(
                f"beginnings and ends of tasks: {time.overhead:.1%} of their time",
                1.0 / (1.0 - time.overhead) if time.overhead < 1.0 else inf,
                "the plan's option task=overlap"
                if may_overlap and not self.launch.plan.overlap_next_task
                else "larger tiles, so that tasks are longer",
            ),
            Loss(
                f"the clock: {time.mhz:,.0f} of {boost:,.0f} MHz fit the power limit",
                boost / time.mhz,
                "fewer bytes moved and fewer instructions for each matmul; narrower elements",
            ),
        ]
        kept = [one for one in found if one.factor > WORTH_A_TRY]
        return sorted(kept, key=lambda one: -one.factor)

    @cached_property
    def recorded(self) -> list[Row]:
        """Rows of the tuned table that measured the kernel at these sizes, the last one last."""
        settings, chosen = self.result.settings, self.result.chosen.name
        kernel = entry(settings.name)
        if kernel.table is None or not self.result.selected.tuned or self.gpu != GPU:
            return []
        config = configure(settings.name, settings.settings)[0]
        sizes = kernel.asked(config, self.sizes)
        rows = kernel.table.kind(config).rows
        return [row for row in rows if row.sizes == sizes and chosen in row.measured]

    @property
    def compared(self) -> Row | None:
        """The last of these rows that measured others beside it."""
        return next((row for row in reversed(self.recorded) if len(row.measured) > 1), None)

    @cached_property
    def rivals(self) -> list[Rival]:
        """Every point that has a time: those of a search, or of the tuned table at these sizes."""
        if self.result.space:
            return sorted(self.result.space, key=lambda one: one.rank)
        settings, selected = self.result.settings, self.result.selected
        kernel = entry(settings.name)
        if kernel.table is None or not selected.tuned or self.gpu != GPU:
            return []
        config, table = configure(settings.name, settings.settings)[0], kernel.table
        kind, sizes = table.kind(config), kernel.asked(config, self.sizes)
        names = [name for name in kind.replays if table.variants[name].takes(config)]
        measured: Mapping[str, float] = {}
        if self.compared is not None:
            measured = self.compared.measured
        times = {name: table.time(kind, name, config, sizes) for name in names}
        found = [
            Rival(name, time.microseconds, measured.get(name), vars(time), time.limits)
            for name, time in times.items()
        ]
        return sorted(found, key=lambda one: one.rank)

    def beats(self) -> str:
        """Why this one, beside the next."""
        name = self.result.chosen.name
        best = next((one for one in self.rivals if one.name == name), None)
        others = [one for one in self.rivals if one.name != name]
        if best is None or not others:
            return self._beats_by_cycles()
        after = others[0]
        ratio, how, left = after.predicted / best.predicted, "By the model,", ""
        if best.measured is not None and after.measured is not None:
            ratio, how = after.measured / best.measured, "Measured,"
        elif best.measured is not None or self.recorded:
            left = "; it was not measured at these sizes, this one was"
        share = f"{abs(ratio - 1.0):.1%} {'longer' if ratio >= 1.0 else 'less'}"
        if share.startswith("0.0%"):
            share = "as long"
        told = f"{how} the next of {len(self.rivals)} kernels, {after.name}, takes {share}{left}."
        if self.result.space and how == "By the model," and 1.0 > ratio >= 1.0 / TIE:
            return f"{told} It errs by more: of those that tie the plainest was built."
        slower = ratio > 1.0 + NOTED
        return f"{told} By the model {why_slower(after.told, best.told)}." if slower else told

    def _beats_by_cycles(self) -> str:
        """Where whole launches were not compared: by cycles of the loops, or measured."""
        tried = sorted(self.result.trials, key=lambda one: one.rank)
        refused = sum(bool(one.refused) for one in tried)
        others = [one for one in tried if one.name != self.result.chosen.name and one.rank[1] < inf]
        if self.block is None:
            return "A kernel without matmuls has one schedule: its tiles are laid over threads."
        if not others:
            return f"Schedules tried: {len(tried)}, of which {refused} were refused."
        return f"The next is {others[0]}; this one is {self.result.chosen}."

    def binds(self) -> str:
        """What limits the time."""
        if self.predicted is None or self.replay is None:
            least, words = self.limits[0]
            why = self.walks if isinstance(self.walks, str) else "it has no loop of matmuls"
            return f"Not predicted: {why}. At least {least:,.1f} us: {words}."
        loops = "; ".join(
            f"loop {one.loop} takes {one.cycles:,.0f} cycles an iteration; no schedule "
            f"takes fewer than {one.bound:,} ({one.reason})"
            for one in self.replay.loops.values()
        )
        return f"By the model, {self.predicted.limits}. {sentence(loops)}."

    def tries(self) -> list[str]:
        """What may help, for the largest losses first."""
        losses = self.losses()
        told: list[str] = []
        for one in losses[:3]:
            costs = f"This costs a factor of {one.factor:.2f}: try" if one.factor < inf else "Try"
            told.append(f"{sentence(one.name)}. {costs} {one.advice}.")
        if self.result.measured is None:
            told.append("Run the same command on a machine with this GPU: it then measures.")
        return told


def rival_json(one: Rival, built: str) -> dict[str, Any]:
    """A point of the plot as plain data."""
    told = {key: one.told[key] for key in ("work", "mhz", "busy") if key in one.told}
    return {
        "name": one.name,
        "predicted": round(one.predicted, 2),
        "measured": one.measured,
        "built": one.name == built,
        "limits": one.limits,
        **told,
    }
