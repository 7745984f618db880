"""The process that owns one GPU: it scores candidates for all runs of one kernel and logs each.

Runs play in processes of their own (editing and verifying is CPU work); their candidates are
measured one at a time, in order of arrival, so that no two measurements disturb each other. Every
score is a line of a JSON-lines file at once: what was measured is never lost.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from bench.comparison.runs import Run, play
from warploom.files import write_bytes_atomically
from warploom.runtime import LocalMeasurer
from warploom.sass.decode.cubin import Cubin
from warploom.sass.flow.aliasing import AliasMode
from warploom.sass.rules.verdict import Verdict
from warploom.search.evaluate import ModelEvaluator
from warploom.search.game import Candidate

IN_FLIGHT = 3
PATIENCE_S = 0.02
CONFIRMED = 3


class Scorer(Protocol):
    """What scores images, one at a time, asynchronously."""

    def submit(self, image: bytes) -> int:
        """Hand over an image; returns its ticket."""
        ...

    def poll(self, timeout_s: float) -> list[tuple[int, float, str]]:
        """Finished (ticket, speed-up, outcome)."""
        ...


class GpuScorer:
    """A GPU: speed-up over the original in an interleaved measurement."""

    def __init__(self, measurer: LocalMeasurer) -> None:
        self.measurer = measurer

    def submit(self, image: bytes) -> int:
        """Queue an image for the worker."""
        return self.measurer.submit(image)

    def poll(self, timeout_s: float) -> list[tuple[int, float, str]]:
        """Finished measurements; a failure scores 0."""
        return [
            (ticket, result.speedup if result.outcome == "ok" else 0.0, result.outcome)
            for ticket, result in self.measurer.poll(timeout_s)
        ]


class ModelScorer:
    """The timing model, for runs with no GPU: the same plumbing, nothing measured."""

    def __init__(self, original: Cubin, kernel: str) -> None:
        self.evaluator = ModelEvaluator(original, kernel)

    def submit(self, image: bytes) -> int:
        """Score an image at once."""
        unused = Verdict(True, AliasMode.TRITON, (), 0, 0)
        return self.evaluator.submit(Candidate(image, "", unused))

    def poll(self, timeout_s: float) -> list[tuple[int, float, str]]:
        """What was submitted since the last call."""
        return [(t, s.speedup, s.outcome) for t, s in self.evaluator.poll(timeout_s).items()]


@dataclass
class _State:
    """One run as the broker sees it."""

    run: Run
    process: Any
    replies: Any
    measured: int = 0
    finished: bool = False
    scores: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    images: dict[str, bytes] = field(default_factory=dict[str, bytes])

    def note(self, digest: str, image: bytes, speedup: float) -> None:
        """Keep the image of the best confirmed candidate and of those that may become it."""
        scores = self.scores.setdefault(digest, [])
        scores.append(speedup)
        self.images[digest] = image
        if len(self.images) > 64:
            keep = sorted(self.images, key=self.mean, reverse=True)[:16]
            self.images = {name: self.images[name] for name in {*keep, digest}}

    def mean(self, digest: str) -> float:
        """The mean score of a candidate."""
        scores = self.scores[digest]
        return sum(scores) / len(scores)

    def best(self) -> tuple[str, float] | None:
        """The best candidate with enough measurements, when it beats the original."""
        sure = [d for d in self.images if len(self.scores[d]) >= CONFIRMED and self.mean(d) > 1.0]
        found = max(sure, key=self.mean, default=None)
        return None if found is None else (found, self.mean(found))


class Broker:
    """Plays all runs of one kernel against one scorer."""

    def __init__(self, scorer: Scorer, log: Path, folder: Path, parallel: int) -> None:
        self.scorer, self.log, self.folder, self.parallel = scorer, log, folder, parallel
        # Modules are imported once and every run is forked from there: 30 runs that import for
        # themselves take as long to start as to measure.
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["bench.comparison.runs", "warploom.rl.player"])
        self.requests: Any = self.context.Queue()
        self.states: dict[int, _State] = {}
        self.began = time.monotonic()

    def play(
        self, runs: Sequence[Run], image: bytes, kernel: str, seconds: float
    ) -> dict[str, bytes]:
        """Play every run, `parallel` at a time, for at most `seconds`; {run key: best image}.

        A run that is cut short keeps what it had; its `done` line says so.
        """
        waiting = list(enumerate(runs))
        flying: dict[int, tuple[int, int, bytes]] = {}
        best: dict[str, bytes] = {}
        while waiting or any(not state.finished for state in self.states.values()):
            running = sum(not state.finished for state in self.states.values())
            while waiting and running < self.parallel:
                number, run = waiting.pop(0)
                self._start(number, run, image, kernel)
                running += 1
            if time.monotonic() - self.began > seconds:
                self._cut_short(waiting)
                break
            self._take_requests(flying)
            for ticket, speedup, outcome in self.scorer.poll(0.0 if not flying else PATIENCE_S):
                if ticket in flying:
                    self._deliver(*flying.pop(ticket), speedup, outcome)
            self._reap()
        # What was cut short may still be on the GPU: the comparison must find it idle.
        while flying:
            for ticket, _, _ in self.scorer.poll(PATIENCE_S):
                flying.pop(ticket, None)
        for state in self.states.values():
            found = state.best()
            if found is not None:
                best[state.run.key] = state.images[found[0]]
                write_bytes_atomically(
                    self.folder / f"{state.run.key}.cubin", state.images[found[0]]
                )
        return best

    def _start(self, number: int, run: Run, image: bytes, kernel: str) -> None:
        replies: Any = self.context.Queue()
        process: Any = self.context.Process(
            target=play, args=(run, image, kernel, number, self.requests, replies), daemon=True
        )
        process.start()
        self.states[number] = _State(run, process, replies)

    def _take_requests(self, flying: dict[int, tuple[int, int, bytes]]) -> None:
        while len(flying) < IN_FLIGHT:
            try:
                kind, number, ticket, value = self.requests.get(
                    timeout=0.0005 if flying else PATIENCE_S
                )
            except queue.Empty:
                return
            if kind == "done":
                self._finish(number, value)
                continue
            flying[self.scorer.submit(value)] = (number, ticket, value)

    def _deliver(
        self, number: int, ticket: int, image: bytes, speedup: float, outcome: str
    ) -> None:
        state = self.states[number]
        if state.finished:
            return
        state.measured += 1
        digest = hashlib.sha256(image).hexdigest()[:16]
        if outcome == "ok":
            state.note(digest, image, speedup)
        self.write(
            {
                "run": state.run.key,
                "n": state.measured,
                "speedup": round(speedup, 6),
                "outcome": outcome,
                "digest": digest,
                "t": round(time.monotonic() - self.began, 3),
            }
        )
        state.replies.put((ticket, speedup, outcome))

    def _finish(self, number: int, summary: dict[str, Any]) -> None:
        state = self.states[number]
        state.finished = True
        found = state.best()
        self.write(
            {
                "run": state.run.key,
                "done": True,
                "kernel": state.run.kernel,
                "method": state.run.method,
                "seed": state.run.seed,
                "measurements": state.measured,
                "best": round(found[1], 6) if found else 1.0,
                "digest": found[0] if found else None,
                **summary,
            }
        )
        print(f"{state.run.key}: {found[1] if found else 1.0:.4f} {summary}", flush=True)

    def _reap(self) -> None:
        """A run that died without a word is finished all the same."""
        for number, state in self.states.items():
            died = not state.finished and not state.process.is_alive()
            if died and self.requests.empty():
                self._finish(number, {"error": f"died with {state.process.exitcode}"})

    def _cut_short(self, waiting: Sequence[tuple[int, Run]]) -> None:
        for number, state in self.states.items():
            if not state.finished:
                state.process.kill()
                self._finish(number, {"cut_short": True})
        for _, run in waiting:
            self.write({"run": run.key, "not_started": True})

    def write(self, line: dict[str, Any]) -> None:
        """Append one line to the log."""
        with self.log.open("a") as file:
            file.write(json.dumps(line) + "\n")
