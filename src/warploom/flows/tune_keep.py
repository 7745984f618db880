"""A tuning folder: whose it is, and the best cubin so far with what is needed to go on from it.

`original.cubin` and `progress.json` are written before the search begins, so that the folder names
its kernel from then on; `best.cubin` is written at every improvement. Each file is written whole or
not at all, in an order that lets a search go on if its process is killed between two of them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from warploom.errors import InputError
from warploom.files import write_bytes_atomically, write_text_atomically
from warploom.flows.targets import Target
from warploom.flows.tuned import CHAINS, SCHEMA, TuneSettings
from warploom.integrations.deploy import content_key
from warploom.runtime import LocalMeasurer
from warploom.sass.decode.cubin import Cubin, load
from warploom.sass.rules.verify import Verifier
from warploom.search.driver import Progress, SearchOptions
from warploom.search.evaluate import DeviceEvaluator, ModelEvaluator
from warploom.search.game import Candidate
from warploom.search.players import Player

ORIGINAL: Final = "original.cubin"
PROGRESS: Final = "progress.json"
BEST: Final = "best.cubin"


@dataclass(frozen=True)
class Earlier:
    """A search that the folder holds already: of which kernel, how far it got, and who scored."""

    key: str
    kernel: str
    speedup: float
    measure: str

    def __str__(self) -> str:
        return f"{self.speedup:.4f}x " + ("measured" if self.measure == "gpu" else "modelled")


class Keeper:
    """The folder of one kernel's search.

    Raises `InputError` when the folder holds something else, or nothing to `--resume`.
    """

    def __init__(self, target: Target, settings: TuneSettings, folder: Path) -> None:
        self.target, self.settings, self.folder = target, settings, folder
        self.key = content_key(target.cubin.data)
        self.earlier = self._earlier()
        same = self.earlier is not None and self.earlier.measure == settings.measure
        # What the model calls a gain is none on the GPU, and the reverse.
        self.best = self.earlier.speedup if self.earlier is not None and same else 1.0

    def begin(self) -> None:
        """Say whose folder this is, before the first candidate."""
        if self.earlier is None:
            self._write_progress()
        if not (self.folder / ORIGINAL).is_file():
            write_bytes_atomically(self.folder / ORIGINAL, self.target.cubin.data)

    def keep(self, candidate: Candidate, speedup: float) -> None:
        """Called for every new best of this run; kept when it beats an earlier run's too."""
        if speedup <= self.best:
            return
        self.best = speedup
        write_bytes_atomically(self.folder / BEST, candidate.cubin)
        self._write_progress()

    def resumed(self, verifier: Verifier) -> Cubin | None:
        """The best of an earlier run; None when there was none, or it found nothing faster.

        Raises `InputError` when it is no reordering of the original under what is assumed now.
        """
        if self.earlier is None or not (self.folder / BEST).is_file():
            return None
        best = load(self.folder / BEST)
        verdict = verifier.check_file(best)
        if not verdict.legal:
            raise InputError(
                f"{best.origin}: an earlier search with other --moves or --alias found it, and "
                f"here it is {verdict}; choose another -o"
            )
        return best

    def _write_progress(self) -> None:
        state = {
            "schema": SCHEMA,
            "key": self.key,
            "kernel": self.target.kernel,
            "speedup": self.best,
            "measure": self.settings.measure,
            "seconds": time.time(),
        }
        write_text_atomically(self.folder / PROGRESS, json.dumps(state) + "\n")

    def _earlier(self) -> Earlier | None:
        if not (self.folder / PROGRESS).is_file():
            for name in (ORIGINAL, "manifest.json"):
                if (self.folder / name).exists():
                    raise InputError(
                        f"{self.folder} holds {name} and no search to go on from; choose another -o"
                    )
            if self.settings.resume:
                raise InputError(f"{self.folder} holds no earlier search; leave out --resume")
            return None
        earlier = self._read_progress()
        if earlier.key != self.key:
            raise InputError(
                f"{self.folder} holds the search of another kernel, {earlier.kernel}; choose "
                "another -o"
            )
        return earlier

    def _read_progress(self) -> Earlier:
        path = self.folder / PROGRESS
        try:
            state = json.loads(path.read_text())
            return Earlier(
                str(state["key"]),
                str(state["kernel"]),
                float(state["speedup"]),
                str(state["measure"]),
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path}: not a search's progress ({error})") from None


@dataclass(frozen=True)
class Run:
    """One run of a search: what it keeps, who plays, who scores and who is told.

    `measurer` is the GPU that scores; None under the timing model.
    """

    keeper: Keeper
    player: Player
    evaluator: ModelEvaluator | DeviceEvaluator
    measurer: LocalMeasurer | None
    on_progress: Callable[[Progress], None] | None
    say: Callable[[str], None]

    def options(self, **given: Any) -> SearchOptions:
        """The search's options: those of the settings, and what is `given`."""
        settings = self.keeper.settings
        return SearchOptions(
            self.keeper.target.kernel,
            settings.mode,
            seed=settings.seed,
            chains=CHAINS[settings.measure],
            confirmations=0 if self.measurer is None else 2,
            moves=settings.moves,
            on_progress=self.on_progress,
            **given,
        )
