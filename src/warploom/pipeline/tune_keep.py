"""The best cubin so far, on disk with what is needed to go on from it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from warploom.errors import InputError
from warploom.files import write_bytes_atomically, write_text_atomically
from warploom.integrations.deploy import content_key
from warploom.pipeline.targets import Target
from warploom.pipeline.tuned import LEARNED, LEARNER, SCHEMA, TuneSettings
from warploom.sass.cubin import Cubin, parse
from warploom.search.game import Candidate


class Keeper:
    """Writes the best cubin so far with what is needed to go on from it."""

    def __init__(self, target: Target, settings: TuneSettings, folder: Path) -> None:
        self.folder = folder
        self.key = content_key(target.cubin.data)
        self.settings = settings
        self.best = self._state()["speedup"] if settings.resume and self._started() else 1.0

    def keep(self, candidate: Candidate, speedup: float) -> None:
        """Called for every new best of this run; kept when it beats an earlier run's too."""
        if speedup <= self.best:
            return
        self.best = speedup
        write_bytes_atomically(self.folder / "best.cubin", candidate.cubin)
        state = {"schema": SCHEMA, "key": self.key, "speedup": speedup, "seconds": time.time()}
        write_text_atomically(self.folder / "progress.json", json.dumps(state) + "\n")

    def resumed(self) -> Cubin | None:
        """The best of an earlier run in this folder, when asked for."""
        if not self.settings.resume:
            return None
        if not self._started():
            if self.settings.player in LEARNED and (self.folder / LEARNER).is_dir():
                return None  # stopped before its first improvement: only the learner's state
            raise InputError(f"{self.folder} holds no earlier search; leave out --resume")
        if self._state()["key"] != self.key:
            raise InputError(f"{self.folder} holds the search of another kernel; choose another -o")
        return parse((self.folder / "best.cubin").read_bytes(), str(self.folder / "best.cubin"))

    def _started(self) -> bool:
        return (self.folder / "progress.json").is_file()

    def _state(self) -> dict[str, Any]:
        path = self.folder / "progress.json"
        try:
            state = json.loads(path.read_text())
            return {"key": str(state["key"]), "speedup": float(state["speedup"])}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path}: not a search's progress ({error})") from None
