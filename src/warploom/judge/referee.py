"""The judge: a plan of calls, each result compared here with float64, away from the candidate.

For each of the problem's sizes:

* every pattern once, in memory of its own;
* then at the same addresses: other values, one element changed, the first values again, which must
  give the same bits, and a burst of calls with nothing in between;
* where two inputs have one shape and type, one tensor for both.

A call that is wrong is made again alone in a fresh process. Right there, the candidate keeps state.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from warploom import machine
from warploom.errors import DeviceError, InputError
from warploom.judge.candidate import check_form, emulates
from warploom.judge.problem import Problem, Sizes, Values, load_problem
from warploom.judge.session import Called, Complaint, Session
from warploom.judge.verdict import CHECKS, Finding, TimedAt, Verdict
from warploom.kernels.check import ELEMENT_DEVIATIONS, norm_bound, off_by_more, relative_error
from warploom.runtime.encoding import Bits, decode
from warploom.runtime.worker import Worker
from warploom.tile.rounding import Spread, limits

PLACES = ("cpu", "gpu")
BURST_CALLS = 40
EMULATED_CALLS = 2
CALL_LIMIT_S = 60.0
# How a call is made.
NEW, SAME, CHANGED = "new memory", "same memory", "one element changed"
REPEATED, BURST, TWINS = "same inputs again", "burst", "one tensor for two inputs"
TIMED = "timed"
PRELOAD = ("warploom.judge.interpreted", "torch._dynamo", "warploom.judge.session")


@dataclass(frozen=True)
class Step:
    """One call, or a burst of them: how it is made, at which sizes, on which inputs."""

    kind: str
    sizes: Sizes
    pattern: str
    seed: int

    def __str__(self) -> str:
        dims = ", ".join(f"{name}={length}" for name, length in self.sizes.items())
        return f"{dims}; {self.pattern} inputs, seed {self.seed}; {self.kind}"


@dataclass
class Referee:
    """A problem with what it expects, kept for all candidates.

    Raises `InputError` for a problem that accepts zeros, or the results of other inputs.
    """

    problem: Problem
    file: Path
    name: str
    seed: int = 0
    _known: dict[Step, tuple[Values, dict[str, Spread]]] = field(default_factory=dict[Any, Any])

    def __post_init__(self) -> None:
        """See that the comparison refuses what it must."""
        for sizes in self.problem.sizes:
            steps = list(self.steps(sizes))
            first, other = (self.expected(step)[1] for step in (steps[0], _other(steps)))
            for given, what in (
                ({name: np.zeros(one.exact.shape) for name, one in first.items()}, "zeros"),
                ({name: one.exact for name, one in other.items()}, "the results of other inputs"),
            ):
                if not any(_compared(given, first, {})):
                    raise InputError(
                        f"{self.name}: its tolerance accepts {what} at {dict(sizes)}: give it "
                        "sizes, patterns or a reference whose results differ"
                    )

    def steps(self, sizes: Sizes) -> Iterator[Step]:
        """The calls at some sizes, in their order."""
        for number, pattern in enumerate(self.problem.patterns):
            yield Step(NEW, _Frozen(sizes), pattern, self.seed + number)
        pattern, after = self.problem.patterns[0], self.seed + len(self.problem.patterns)
        for kind in (SAME, CHANGED, REPEATED, BURST):
            yield Step(kind, _Frozen(sizes), pattern, after)
        if self._twins():
            yield Step(TWINS, _Frozen(sizes), pattern, after + 1)

    def expected(self, step: Step) -> tuple[Values, dict[str, Spread]]:
        """The inputs of a call and the right outputs."""
        own = step.kind if step.kind in (CHANGED, TWINS) else ""
        key = replace(step, kind=own)
        if key not in self._known:
            values = self.problem.values(step.sizes, step.pattern, step.seed)
            if step.kind == CHANGED:
                _change(values, self.problem, step.sizes)
            if step.kind == TWINS:
                for name, twin in self._twins().items():
                    values[twin] = values[name]
            self._known[key] = values, self.problem.expected(values, step.sizes, step.seed)
        return self._known[key]

    def judge(
        self,
        candidate: str,
        place: str = "cpu",
        gpu: str = "h200",
        say: Callable[[str], None] = lambda _: None,
    ) -> Verdict:
        """The verdict on one candidate.

        Raises `InputError` for a candidate that is not there or a place that is none, `ToolMissing`
        for what this computer lacks.
        """
        check_form(candidate)
        if place not in PLACES:
            raise InputError(f"--on {place!r}: expected {' or '.join(PLACES)}")
        return _Trial(self, candidate, place == "gpu", say).verdict(gpu)

    def _twins(self) -> dict[str, str]:
        """Inputs by name, and another one that may be the same tensor."""
        floats = [one for one in self.problem.signature.inputs if one.dtype.is_float]
        return {
            one.name: other.name
            for one, other in pairwise(floats)
            if (one.dims, one.dtype) == (other.dims, other.dtype)
        }


class _Frozen(dict[str, int]):
    """Sizes that may be a key."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))


class _Trial:
    """One candidate before the judge."""

    def __init__(
        self, referee: Referee, candidate: str, on_gpu: bool, say: Callable[[str], None]
    ) -> None:
        self._referee, self._candidate, self._on_gpu, self._say = referee, candidate, on_gpu, say
        self._slow = emulates(candidate) and not on_gpu
        self._found: dict[str, Finding] = {}
        self._errors: dict[str, tuple[float, float]] = {}
        self._calls = 0

    def verdict(self, gpu: str) -> Verdict:
        """All calls, then the times."""
        began = time.perf_counter()
        problem = self._referee.problem
        sizes = [*problem.sizes, *(problem.timed if self._on_gpu else ())]
        timed: list[TimedAt] = []
        worker = self._worker()
        try:
            trouble = self._trouble(worker)
            self._note([("loads", trouble)] if trouble else [], "")
            if not trouble:
                for one in sizes:
                    self._all(worker, one)
                    if self._found:
                        break
                if self._on_gpu and not self._found:
                    timed = [self._timed(worker, one, gpu) for one in problem.timed]
        finally:
            worker.close()
        notes = () if self._on_gpu else ("not timed: times need --on gpu",)
        place = "gpu" if self._on_gpu else "emulated" if self._slow else "cpu"
        findings = sorted(self._found.values(), key=lambda one: list(CHECKS).index(one.check))
        return Verdict(
            self._candidate, self._referee.name, place, self._referee.seed, tuple(findings),
            self._calls, self._errors, tuple(timed), time.perf_counter() - began, notes,
        )  # fmt: skip

    def _worker(self) -> Worker:
        # On a GPU nothing of an earlier verdict on the CPU may be left: there Triton interprets.
        return Worker(Session, self._candidate, preload=() if self._on_gpu else PRELOAD)

    def _trouble(self, worker: Worker) -> str:
        """Why the candidate cannot be loaded; "" where it is."""
        referee = self._referee
        wanted = referee.problem.signature, referee.file, self._on_gpu
        try:
            return worker.call("open", self._candidate, *wanted, limit_s=CALL_LIMIT_S)
        except DeviceError as error:
            return str(error)

    def _all(self, worker: Worker, sizes: Sizes) -> None:
        """Every call at some sizes; a candidate that ended its process is not called again."""
        before: dict[str, Bits] = {}
        for step in self._referee.steps(sizes):
            self._say(str(step))
            try:
                made = self._made(worker, step)
            except DeviceError as error:
                self._note([("ends", str(error))], str(step))
                return
            for one in made:
                self._calls += 1
                self._note(one.complaints, str(step))
                if one.outputs:
                    self._judged(worker, step, one)
            if step.kind == SAME and made[0].outputs:
                before = made[0].outputs
            if step.kind == REPEATED and made[0].outputs:
                self._repeated(before, made[0].outputs, step)
            if self._found:
                return

    def _made(self, worker: Worker, step: Step, values: Values | None = None) -> list[Called]:
        """What the candidate makes of a step's inputs, or of those given."""
        given = self._referee.expected(step)[0] if values is None else values
        if step.kind == BURST:
            count = EMULATED_CALLS if self._slow else BURST_CALLS
            return worker.call("burst", given, step.sizes, count, limit_s=CALL_LIMIT_S)
        again = step.kind not in (NEW, TWINS)
        return [worker.call("call", given, step.sizes, again, limit_s=CALL_LIMIT_S)]

    def _judged(self, worker: Worker, step: Step, made: Called) -> None:
        """Compare outputs; what is wrong is looked at from two sides."""
        outputs = made.outputs
        wanted = self._referee.expected(step)[1]
        wrong = list(_compared(_decoded(outputs, wanted), wanted, self._errors))
        if not wrong:
            return
        check, text = wrong[0]
        if self._right_alone(step):
            check = "burst" if step.kind in (BURST, TIMED) else "state"
            other = " (is there work on another stream?)" if self._on_gpu else ""
            text = f"right in a process of its own, but not here{other}: {text}"
        elif check == "values" and not made.complaints and self._constant(worker, step, outputs):
            check, text = "constant", f"the same result for other inputs; {text}"
        self._note([(check, text)], str(step))

    def _constant(self, worker: Worker, step: Step, outputs: dict[str, Bits]) -> bool:
        """Whether other inputs have the same result."""
        other = replace(step, kind=NEW, seed=step.seed + 1)
        try:
            made = self._made(worker, other)[0].outputs
        except DeviceError:
            return False
        return bool(made) and all(np.array_equal(outputs[name], made[name]) for name in outputs)

    def _right_alone(self, step: Step) -> bool:
        """Whether the call is right as the first one of a process."""
        wanted = self._referee.expected(step)[1]
        worker = self._worker()
        try:
            if self._trouble(worker):
                return False
            made = self._made(worker, replace(step, kind=NEW), self._referee.expected(step)[0])
            outputs = made[0].outputs
            return bool(outputs) and not any(_compared(_decoded(outputs, wanted), wanted, {}))
        except DeviceError:
            return False
        finally:
            worker.close()

    def _repeated(self, before: dict[str, Bits], after: dict[str, Bits], step: Step) -> None:
        if not self._referee.problem.repeatable:
            return
        for name, bits in before.items():
            if differ := int((bits != after[name]).sum()):
                text = f"{differ:,} of {bits.size:,} elements of {name} have other bits"
                self._note([("repeatable", text)], str(step))

    def _timed(self, worker: Worker, sizes: Sizes, gpu: str) -> TimedAt:
        step = Step(TIMED, _Frozen(sizes), self._referee.problem.patterns[0], self._referee.seed)
        self._say(str(step))
        values = self._referee.expected(step)[0]
        file = self._referee.name if ":" in self._referee.name else str(self._referee.file)
        limit = self._referee.problem.limit_us(sizes, machine.load(gpu))
        timed, made = worker.call("time", file, step.sizes, values, step.seed)
        self._note(made.complaints, str(step))
        if made.outputs:
            self._judged(worker, step, made)
        return TimedAt(sizes, timed, limit)

    def _note(self, complaints: tuple[Complaint, ...] | list[Complaint], call: str) -> None:
        """Keep the first finding of each check."""
        for check, text in complaints:
            self._found.setdefault(check, Finding(check, text, call))


def judge(
    candidate: str,
    problem: str,
    place: str = "cpu",
    gpu: str = "h200",
    seed: int = 0,
    say: Callable[[str], None] = lambda _: None,
) -> Verdict:
    """Judge a candidate (see `judge.candidate`) against a problem, "FILE.py" or "FILE.py:OBJECT".

    place   "cpu", where CUDA runs on the emulated Hopper, or "gpu", where it is also timed
    gpu     the machine whose limit a time is compared with

    Raises `InputError` for what cannot be judged; a candidate that is wrong is a verdict.
    """
    check_form(candidate)
    found, file = load_problem(problem)
    return Referee(found, file, problem, seed).judge(candidate, place, gpu, say)


def _other(steps: list[Step]) -> Step:
    return next(step for step in steps if step.kind == SAME)


def _decoded(outputs: dict[str, Bits], wanted: dict[str, Spread]) -> dict[str, Any]:
    return {name: decode(bits, wanted[name].kind) for name, bits in outputs.items()}


def _change(values: Values, problem: Problem, sizes: Sizes) -> None:
    """Another value for the last element of the first input that floats: its sign, and size."""
    one = next((a for a in problem.signature.inputs if a.dtype.is_float), None)
    if one is None:
        return
    flat = values[one.name].reshape(-1)
    place = (flat.size * 5) // 7
    other = problem.values(sizes, "constant", place)[one.name].reshape(-1)
    flat[place] = other[place] ^ (1 << (one.dtype.bits - 1))


def _compared(
    got: dict[str, Any], wanted: dict[str, Spread], errors: dict[str, tuple[float, float]]
) -> Iterator[Complaint]:
    """What is wrong with outputs; keeps the largest errors beside their bounds."""
    for name, spread in wanted.items():
        have, want = got[name], spread.exact
        judged = spread.known | ~np.isfinite(want)
        left = np.isnan(have) & ~np.isnan(want) & judged
        error = relative_error(have[spread.known & ~left], want[spread.known & ~left])
        bound = norm_bound(spread)
        if left.any():
            error = math.inf
        old = errors.get(name, (0.0, bound))
        if error / (bound or 1.0) >= old[0] / (old[1] or 1.0):
            errors[name] = (error, bound)
        if left.any():
            first = [int(at) for at in np.unravel_index(int(np.argmax(left)), left.shape)]
            text = f"{int(left.sum()):,} of {left.size:,} elements are NaN or were not written"
            yield "unwritten", f"{name}: {text}, the first {first}"
        elif wrong := off_by_more(name, have, want, limits(spread, ELEMENT_DEVIATIONS), judged):
            yield "values", str(wrong[0])
        elif not error <= bound:
            yield "values", f"{name}: relative error {error:.2e}, allowed {bound:.1e}"
