"""What `tune` is asked and what comes of it."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from warploom.errors import InputError
from warploom.flows.targets import Target
from warploom.runtime import CheckReport, Timing
from warploom.sass.decode.cubin import Cubin
from warploom.sass.flow.aliasing import AliasMode
from warploom.sass.rules.verdict import Verdict
from warploom.search.actions import STEPS, moves_of
from warploom.search.driver import SearchResult
from warploom.search.players import PLAYERS

SCHEMA: Final = 1
LEADERS: Final = 5
LEARNER: Final = "ppo"  # the folder of a learned player's checkpoint, logs and replay
CHAINS: Final = {"gpu": 6, "model": 1}
# Learned players by the name of `--search`, with their profile; they need the extra `rl`.
LEARNED: Final = {"ppo": "wide", "ppo-guided": "guided", "ppo-cuasmrl": "cuasmrl"}


@dataclass(frozen=True)
class TuneSettings:
    """What to spend and how.

    `measure` is `gpu` or `model`; `resume` insists on an earlier search in the folder (one of the
    same kernel is gone on from anyway).
    """

    player: str = "guided"
    measure: str = "model"
    seconds: float = 60.0
    candidates: int | None = None
    mode: AliasMode = AliasMode.STRICT
    seed: int = 0
    samples: int = 0
    resume: bool = False
    policy: Path | None = None
    steps: int | None = None
    moves: frozenset[str] = frozenset(STEPS)

    def __post_init__(self) -> None:
        """Refuse unknown names and an empty budget."""
        moves_of(self.moves)
        if self.player in LEARNED and self.moves != frozenset(STEPS):
            raise InputError("--moves: learned players have the moves of their profile")
        if self.player not in PLAYERS and self.player not in LEARNED:
            known = ", ".join((*PLAYERS, *LEARNED))
            raise InputError(f"--search {self.player!r}, expected one of {known}")
        if self.player not in LEARNED and (self.policy is not None or self.steps is not None):
            raise InputError("--policy and --steps are of learned players: --search ppo")
        if self.measure not in CHAINS:
            raise InputError(f"--measure {self.measure!r}, expected gpu or model")
        if self.seconds <= 0:
            raise InputError(f"--budget {self.seconds} s, expected more than 0")
        if self.samples < 0:
            raise InputError(f"--samples {self.samples}, expected 0 or more")
        for option, count in (("--candidates", self.candidates), ("--steps", self.steps)):
            if count is not None and count < 1:
                raise InputError(f"{option} {count}, expected at least 1")


@dataclass(repr=False)
class TuneReport:
    """What came of it. `speedup` is measured on the GPU, or modelled (`measure` says which).

    `errors`: relative error of each output against float64, of a build folder's kernel on a GPU.
    """

    target: Target
    settings: TuneSettings
    search: SearchResult
    cubin: Cubin
    verdict: Verdict
    speedup: float
    timing: Timing | None = None
    check: CheckReport | None = None
    errors: Mapping[str, float] = field(default_factory=dict[str, float])
    folder: Path = Path()
    files: dict[str, Path] = field(default_factory=dict[str, Path])

    @property
    def changed(self) -> bool:
        """True when the result is not the original."""
        return self.cubin.data != self.target.cubin.data

    def __str__(self) -> str:
        """The result in a few lines, with where it lies."""
        search = self.search
        measured = self.settings.measure == "gpu"
        failed = search.scored - search.outcomes["ok"]
        refused = search.tally["refused by the editor"] + search.tally["refused by the verifier"]
        lines = [
            f"{search.scored} candidates scored in {search.seconds:.1f} s, {refused} refused by "
            f"the static rules, {failed} failed"
            + (
                " (interrupted: the best so far was kept, the same command goes on)"
                if search.interrupted
                else ""
            ),
            f"static verdict: {self.verdict}",
        ]
        if self.check is not None:
            lines.append(f"tested verdict: {'pass' if self.check.passed else self.check.detail}")
        if self.errors:
            worst = ", ".join(f"{name} {error:.1e}" for name, error in self.errors.items())
            lines.append(f"error against float64: {worst}")
        if self.timing is not None:
            lines.append(f"A/A control: {self.timing.control}")
        if not self.changed:
            lines.append("no win: nothing was faster than the original")
        else:
            kind = "measured" if measured else "modelled (not a measurement)"
            lines.append(f"speed-up: {self.speedup:.4f}x {kind}")
        lines.append(f"result: {self.files['cubin']}, {self.files['diff']}")
        if "kernel" in self.files:
            lines.append(f"the kernel with this machine code: {self.files['kernel']}")
        if "store" in self.files:
            lines.append(f"deploy: warploom.install({str(self.files['store'])!r})")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"
