"""What `optimize` is asked and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from warploom.autosched.schedules import NAMES
from warploom.autosched.selected import Selected
from warploom.codegen.compile.build import GPU_ARCHITECTURES, Built
from warploom.codegen.simt.schedule import SimtSchedule
from warploom.engine.search import EFFORTS
from warploom.errors import InputError
from warploom.flows.optimize_measure import Measured
from warploom.flows.static_verdict import StaticVerdict
from warploom.flows.traced import Traced
from warploom.kernels.check import CheckResult
from warploom.objects import names_object
from warploom.perf.replay import Prediction, cycles_of
from warploom.runtime.kernel import Kernel
from warploom.tables import html_table

SCHEMA, VERSION = "warploom.optimize", 2
BEST, SOLVE = "best", "solve"  # schedules to ask for: the best of several, the solver's
WRITTEN = "written"  # status of a proof: the order is a person's, its times are no cycles
Say = Callable[[str], None]


@dataclass(frozen=True)
class OptimizeSettings:
    """What to optimise and how hard to look.

    settings    configuration fields and array sizes of the kernel, as texts
    schedule    "best": the tuned table's entry, where the kernel has a table; else the better of
                the named schedule that suits its loops and the solver's. Or one by name
    measure     "gpu", "none", or "auto": the GPU when there is one
    seconds     of the solver, a loop
    compare     compile the other named schedules too: the fastest measured is kept, or without a
                GPU the one whose machine code replays fastest
    effort      of the search for a user's own program (`engine.search`); "": normal
    trace       write when each warp group does each step (`flows.traced`)
    """

    name: str
    gpu: str = "h200"
    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    schedule: str = BEST
    measure: str = "auto"
    seconds: float = 10.0
    compare: bool = False
    effort: str = ""
    trace: bool = False

    @property
    def searches(self) -> bool:
        """Whether the kernel is looked for by `engine.search`: a user's own program, unless told
        which schedule it is to have."""
        own = names_object(self.name) and self.schedule == BEST
        return own and not self.compare

    def __post_init__(self) -> None:
        if self.compare and self.schedule != BEST:
            raise InputError(f"--compare goes with --schedule {BEST}, not {self.schedule}")
        if self.gpu not in GPU_ARCHITECTURES:
            raise InputError(
                f"--gpu {self.gpu!r}: code is emitted for {', '.join(GPU_ARCHITECTURES)}"
            )
        if self.schedule not in (BEST, *NAMES):
            known = ", ".join((BEST, *NAMES))
            raise InputError(f"--schedule {self.schedule!r}: expected one of {known}")
        if self.effort and not self.searches:
            raise InputError(
                "--effort is of the search for your own program: FILE.py:OBJECT without --schedule"
            )
        if self.effort not in ("", *EFFORTS):
            raise InputError(f"--effort {self.effort!r}: expected one of {', '.join(EFFORTS)}")
        if self.measure not in ("auto", "gpu", "none"):
            raise InputError(f"--measure {self.measure!r}: expected auto, gpu or none")
        if not 0 < self.seconds < float("inf"):
            raise InputError(f"--time-limit {self.seconds:g}: expected seconds above 0")


@dataclass(frozen=True)
class Trial:
    """One schedule: predictions by loop, microseconds measured (None without a GPU), why refused.

    `unpredicted` says why a schedule that compiled has no prediction; `launch` are the microseconds
    that a search predicted for the whole launch, `limits` what limits it.
    """

    name: str
    predicted: Mapping[str, Prediction] = field(default_factory=dict[str, Prediction])
    microseconds: float | None = None
    refused: str = ""
    unpredicted: str = ""
    tuned: bool = False
    launch: float | None = None
    limits: str = ""

    @property
    def rank(self) -> tuple[int, float]:
        """Less is better: measured time; else the tuned table's entry before any prediction."""
        if self.microseconds is not None:
            return 0, self.microseconds
        if self.launch is not None:
            return 1, self.launch
        return (1, 0.0) if self.tuned else (2, cycles_of(self.predicted) or inf)

    def __str__(self) -> str:
        if self.refused:
            return f"{self.name}: not of use: {self.refused}"
        told = self.unpredicted or ", ".join(
            f"{one.cycles:.0f} cycles an iteration of loop {loop} predicted, bound {one.bound}"
            for loop, one in self.predicted.items()
        )
        if self.launch is not None:
            launch = f"{self.launch:.1f} us predicted, limited by {self.limits}"
            told = f"{launch}; {told}" if told else launch
        time = "" if self.microseconds is None else f"; {self.microseconds:.1f} us measured"
        return f"{self.name}: {told}{time}"

    def to_json(self) -> dict[str, Any]:
        """The trial as plain JSON data; `predicted`: loop -> [cycles an iteration, bound]."""
        return {
            "name": self.name,
            "predicted": {loop: [p.cycles, p.bound] for loop, p in self.predicted.items()},
            "microseconds": self.microseconds,
            "refused": self.refused,
            "unpredicted": self.unpredicted,
            "tuned": self.tuned,
            "launch": self.launch,
            "limits": self.limits,
        }


@dataclass(frozen=True)
class Rival:
    """A point that was chosen from, in microseconds; `told` has `work`, `busy` and `mhz`."""

    name: str
    predicted: float
    measured: float | None
    told: Mapping[str, Any]
    limits: str = ""

    @property
    def rank(self) -> tuple[bool, float]:
        """What was measured comes before what was predicted only."""
        return self.measured is None, self.predicted if self.measured is None else self.measured


@dataclass(frozen=True)
class Optimized:
    """The result: what was built, what the model says of it and of the others, the verdicts.

    trials      every schedule that was tried; `chosen` is the one that was built
    check       what the interpreter showed of the program
    space       of a search, every point with a time
    headline    its time, rate and share of the limit in a line, each with where it is from
    """

    settings: OptimizeSettings
    selected: Selected
    chosen: Trial
    trials: tuple[Trial, ...]
    verdict: StaticVerdict
    check: CheckResult
    measured: Measured | None
    seconds: Mapping[str, float]
    folder: Path
    traced: Traced | None = None
    space: tuple[Rival, ...] = ()
    headline: str = ""

    def kernel(self, device: int = 0) -> Kernel:
        """What was built, on a GPU; raises what `Kernel` raises."""
        return Built.read(self.folder).kernel(device)

    def __repr__(self) -> str:
        return (
            f"{self.settings.name} for {self.settings.gpu}: {self.selected}, {self.verdict}; "
            f"in {self.folder}"
        )

    def _repr_html_(self) -> str:
        """The kernel and what it was chosen from, for notebooks."""
        rows = [["", "point", "us predicted", "us measured", "limited by"]]
        for one in self.trials:
            times = (one.launch, one.microseconds)
            told = ["" if time is None else f"{time:.1f}" for time in times]
            built = "built" if one.name == self.chosen.name else ""
            rows.append([built, one.name, *told, one.refused or one.limits])
        title = f"{self.settings.name} for {self.settings.gpu}: {self.verdict}"
        return html_table(title, rows)

    def to_json(self) -> dict[str, Any]:
        """The result as plain JSON data."""
        return {
            "schema": SCHEMA,
            "version": VERSION,
            "kernel": self.settings.name,
            "gpu": self.settings.gpu,
            "settings": dict(self.settings.settings),
            "schedule": self.selected.name,
            "tuned": self.selected.tuned,
            "schedules": [trial.to_json() for trial in self.trials],
            "order": order_of(self.selected),
            "headline": self.headline,
            "verdict": {"passed": self.verdict.passed, "faults": list(self.verdict.faults)},
            "interpreted": self.check.to_json(),
            "measured": None if self.measured is None else self.measured.to_json(),
            "seconds": dict(self.seconds),
        }


def order_of(selected: Selected) -> str:
    """Where the order of every loop comes from, and what is proved of it, for people."""
    if isinstance(selected.schedule, SimtSchedule):
        return "laid over threads, with no order to choose"
    told: list[str] = []
    for name, one in selected.schedule.loops.items():
        proof = one.proof
        if proof.status == WRITTEN:
            told.append(f"loop {name} in the named order {selected.schedule.name}")
            continue
        shorter = "none is shorter" if proof.status != "unproved" else "not proved the shortest"
        told.append(
            f"loop {name} solved for {one.initiation_interval} cycles an iteration at the costs "
            f"it was solved with, {shorter} ({proof.status}: {proof.reason}; "
            f"{proof.confirmed or 'not confirmed'})"
        )
    return "; ".join(told)
