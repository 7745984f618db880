"""What `optimize` is asked and what comes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from warploom.codegen.build import GPU_ARCHITECTURES
from warploom.codegen.plan import KernelSchedule
from warploom.codegen.predict import Prediction
from warploom.codegen.schedules import NAMES
from warploom.errors import InputError
from warploom.pipeline.optimize_measure import Measured
from warploom.pipeline.static_verdict import StaticVerdict

SCHEMA, VERSION = "warploom.optimize", 1
MOST_CANDIDATES = 32


@dataclass(frozen=True)
class OptimizeSettings:
    """What to optimise and how hard to look.

    settings    configuration fields and array sizes of the kernel, as texts
    schedule    the schedule that is built; the others are predicted beside it
    measure     "gpu", "none", or "auto": the GPU when there is one
    seconds     of the solver, a loop
    candidates  distinct schedules to build (`codegen.portfolio`): the fastest measured is kept, or
                without a GPU the one whose machine code replays fastest
    """

    name: str
    gpu: str = "h200"
    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    schedule: str = "solve"
    measure: str = "auto"
    seconds: float = 10.0
    candidates: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.candidates <= MOST_CANDIDATES:
            raise InputError(f"--candidates {self.candidates}: expected 1 to {MOST_CANDIDATES}")
        if self.candidates > 1 and self.schedule != "solve":
            raise InputError(f"--candidates goes with --schedule solve, not {self.schedule}")
        if self.gpu not in GPU_ARCHITECTURES:
            raise InputError(
                f"--gpu {self.gpu!r}: code is emitted for {', '.join(GPU_ARCHITECTURES)}"
            )
        if self.schedule not in NAMES:
            raise InputError(f"--schedule {self.schedule!r}: expected one of {', '.join(NAMES)}")
        if self.measure not in ("auto", "gpu", "none"):
            raise InputError(f"--measure {self.measure!r}: expected auto, gpu or none")
        if not 0 < self.seconds < float("inf"):
            raise InputError(f"--time-limit {self.seconds:g}: expected seconds above 0")


@dataclass(frozen=True)
class Trial:
    """One candidate: cycles predicted, microseconds measured (None without a GPU), why refused."""

    name: str
    cycles: float
    microseconds: float | None = None
    refused: str = ""

    def __str__(self) -> str:
        told = self.refused[:90] if self.refused else "built"
        if self.microseconds is not None:
            told = f"{self.microseconds:.1f} us"
        return f"candidate {self.name}: {self.cycles:.0f} cycles predicted, {told}"


@dataclass(frozen=True)
class Optimized:
    """The result: what was built, what the model says of it and of the others, the verdicts."""

    settings: OptimizeSettings
    schedule: KernelSchedule
    predictions: Mapping[str, Mapping[str, Prediction] | str]
    verdict: StaticVerdict
    measured: Measured | None
    seconds: Mapping[str, float]
    folder: Path
    trials: tuple[Trial, ...] = ()

    @property
    def chosen(self) -> Mapping[str, Prediction]:
        """The prediction of the schedule that was built."""
        found = self.predictions[self.settings.schedule]
        assert not isinstance(found, str)
        return found

    def to_json(self) -> dict[str, Any]:
        """The result as plain JSON data."""
        return {
            "schema": SCHEMA,
            "version": VERSION,
            "kernel": self.settings.name,
            "gpu": self.settings.gpu,
            "settings": dict(self.settings.settings),
            "schedule": self.settings.schedule,
            "turns": self.schedule.turns,
            "candidates": [asdict(trial) for trial in self.trials],
            "proof": {name: str(s.proof.status) for name, s in self.schedule.loops.items()},
            "predicted": {
                name: found
                if isinstance(found, str)
                else {loop: [p.cycles, p.bound] for loop, p in found.items()}
                for name, found in self.predictions.items()
            },
            "verdict": {"passed": self.verdict.passed, "faults": list(self.verdict.faults)},
            "measured": None if self.measured is None else self.measured.to_json(),
            "seconds": dict(self.seconds),
        }


def proofs(schedule: KernelSchedule) -> str:
    """What is proved of every loop of a schedule, for people."""
    return "; ".join(
        f"loop {name} II {one.initiation_interval}, {one.proof.status}"
        + (f" ({one.proof.reason})" if one.proof.reason else "")
        for name, one in schedule.loops.items()
    )
