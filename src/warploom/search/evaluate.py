"""Who scores candidates: the static timing model, or a GPU behind a `LocalMeasurer`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from warploom.runtime import LocalMeasurer
from warploom.sass.decode.cubin import Cubin
from warploom.sass.edit.edit import Editor
from warploom.sass.timing.timing_model import ModelSettings, TimingModel
from warploom.search.game import Candidate
from warploom.search.play import Score


class Evaluator(Protocol):
    """Scores candidates; `submit` returns at once, `poll` hands back what is finished."""

    name: str

    def submit(self, candidate: Candidate) -> int:
        """Hand a candidate over; returns its ticket."""
        ...

    def poll(self, timeout_s: float) -> Mapping[int, Score]:
        """Finished tickets, waiting up to `timeout_s` for the first."""
        ...


class ModelEvaluator:
    """The timing model. It is a model: it ranks schedules and measures nothing."""

    name = "model"

    def __init__(self, original: Cubin, kernel: str, settings: ModelSettings | None = None) -> None:
        self._editor = Editor(original, kernel)
        self._model = TimingModel(self._editor.kernel, settings)
        self._original = self._model.kernel_cycles(self._editor.signature())
        self._finished: dict[int, Score] = {}
        self._next = 0

    @property
    def original_cycles(self) -> float:
        """Modelled cycles of the original."""
        return self._original

    def cycles(self, candidate: Candidate) -> float:
        """Modelled cycles of a candidate."""
        return self.cycles_of(candidate.cubin)

    def cycles_of(self, image: bytes) -> float:
        """Modelled cycles of a candidate's cubin."""
        section = self._editor.original.kernel(self._editor.kernel.name).text
        code = image[section.offset : section.offset + section.size]
        words = [
            (
                int.from_bytes(code[place : place + 8], "little"),
                int.from_bytes(code[place + 8 : place + 16], "little"),
            )
            for place in range(0, len(code), 16)
        ]
        self._editor.adopt(words)
        return self._model.kernel_cycles(self._editor.signature())

    def submit(self, candidate: Candidate) -> int:
        """Score a candidate at once."""
        self._next += 1
        self._finished[self._next] = Score(self._original / self.cycles(candidate))
        return self._next

    def poll(self, timeout_s: float) -> Mapping[int, Score]:
        """Everything submitted since the last call."""
        finished, self._finished = self._finished, {}
        return finished


class DeviceEvaluator:
    """A GPU: each candidate is run, compared bit for bit with the original and timed."""

    name = "gpu"

    def __init__(self, measurer: LocalMeasurer) -> None:
        self._measurer = measurer

    def submit(self, candidate: Candidate) -> int:
        """Queue a candidate for the worker."""
        return self._measurer.submit(candidate.cubin)

    def poll(self, timeout_s: float) -> Mapping[int, Score]:
        """Finished measurements as scores; a failed candidate scores 0."""
        return {
            ticket: Score(result.speedup, result.outcome)
            if result.outcome == "ok"
            else Score(0.0, result.outcome)
            for ticket, result in self._measurer.poll(timeout_s)
        }
