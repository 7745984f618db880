"""One search over several bases: a first round plays on all of them, a second on the best.

Each base is a program of its own to the game (see `lineage`). The first half of the budget goes to
all of them evenly, the original included; the second half to those whose best scored highest, from
there on. What wins carries its lineage, so that it can be proved from the original's bytes alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from warploom.sass.decode.cubin import Cubin, parse
from warploom.search.driver import Budget, SearchOptions, SearchResult, run_search
from warploom.search.evaluate import Evaluator, ModelEvaluator
from warploom.search.game import Candidate
from warploom.search.lineage import Base, Step, ordered
from warploom.search.play import Player, Score

FINALISTS = 2


@dataclass(frozen=True)
class Entry:
    """A base, what was found on it, and its score; `image` is the best candidate's cubin."""

    base: Base
    score: float
    image: bytes
    result: SearchResult

    @classmethod
    def of(cls, base: Base, found: SearchResult) -> Entry:
        """The best of a search on a base; the base itself, scored 0, when nothing was right."""
        if not found.best:
            return cls(base, 0.0, base.cubin.data, found)
        score, candidate = found.best[0]
        return cls(base, score, candidate.cubin, found)

    @property
    def steps(self) -> tuple[Step, ...]:
        """How the image came from the original."""
        return (*self.base.steps, ordered(self.image))


class BaseModel:
    """The timing model on a base, relative to the original it came from."""

    name = "model"

    def __init__(self, original: Cubin, base: Cubin, kernel: str) -> None:
        self._inner = ModelEvaluator(base, kernel)
        whole = ModelEvaluator(original, kernel).original_cycles
        self._share = whole / self._inner.original_cycles

    def submit(self, candidate: Candidate) -> int:
        """Score a candidate at once."""
        return self._inner.submit(candidate)

    def poll(self, timeout_s: float) -> Mapping[int, Score]:
        """Everything submitted since the last call, relative to the original."""
        found = self._inner.poll(timeout_s)
        return {
            ticket: Score(score.speedup * self._share, score.outcome)
            for ticket, score in found.items()
        }


def tournament(
    bases: Sequence[Base],
    player: Player,
    evaluator_of: Callable[[Base], Evaluator],
    budget: Budget,
    options: SearchOptions,
    starts: Mapping[int, Cubin] | None = None,
    on_best: Callable[[Candidate, float, Base], None] | None = None,
) -> list[Entry]:
    """Entries of every round, best first. `starts` {place in `bases`: an earlier result on it}.

    Of one base alone the whole budget goes to that one. Ctrl-C ends the search that runs and all
    that would follow; what the clock leaves no time for is not begun.
    """

    def play(base: Base, share: float, start: Cubin | None, turn: int) -> Entry:
        began = time.monotonic()
        evaluator = evaluator_of(base)
        found = run_search(
            base.cubin,
            player,
            evaluator,
            Budget(
                budget.seconds * share - (time.monotonic() - began),
                None if budget.candidates is None else max(1, int(budget.candidates * share)),
                None if budget.measurements is None else max(1, int(budget.measurements * share)),
            ),
            replace(
                options,
                seed=options.seed + turn,
                start=start,
                elsewhere=bool(base.steps),
                on_best=on_best and partial(_on_base, on_best, base),
            ),
        )
        return Entry.of(base, found)

    known = starts or {}
    if len(bases) == 1:
        return [play(bases[0], 1.0, known.get(0), 0)]
    end = time.monotonic() + budget.seconds
    entries: list[Entry] = []
    for number, base in enumerate(bases):
        if number and time.monotonic() >= end:
            break
        entries.append(play(base, 0.5 / len(bases), known.get(number), number))
        if entries[-1].result.interrupted:
            return sorted(entries, key=lambda entry: -entry.score)
    entries.sort(key=lambda entry: -entry.score)
    finalists = entries[:FINALISTS]
    second: list[Entry] = []
    for number, entry in enumerate(finalists):
        if time.monotonic() >= end:
            break
        start = parse(entry.image, options.kernel or "cubin")
        second.append(play(entry.base, 0.5 / len(finalists), start, len(bases) + number))
        if second[-1].result.interrupted:
            break
    return sorted([*second, *entries], key=lambda entry: -entry.score)


def _on_base(
    on_best: Callable[[Candidate, float, Base], None],
    base: Base,
    candidate: Candidate,
    speedup: float,
) -> None:
    on_best(candidate, speedup, base)
