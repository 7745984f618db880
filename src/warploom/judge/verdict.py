"""What the judge says: findings, each of one check, numbers, and whether the candidate passes."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from warploom.errors import CheckFailed
from warploom.judge.timing import Timed
from warploom.report.pages import rendered

# Every check, in the order in which a verdict names them, and what it asks.
CHECKS: Mapping[str, str] = {
    "loads": "Does its file run, compile and fit the problem?",
    "ends": "Does each call end, without taking its process along?",
    "raises": "Does it compute every size and pattern without an error?",
    "form": "Are outputs tensors of the right type, shape and place?",
    "lazy": "Are they plain tensors, which compute nothing when they are read?",
    "fault": "Is the emulated Hopper content: no race, no missing wait, no access out of bounds?",
    "unwritten": "Is every element written? Memory begins as NaN.",
    "values": "Is every element, and the whole, as near to float64 as rounding allows?",
    "constant": "Does the result depend on the inputs?",
    "state": "Is a call right, whatever was called before, at the same addresses, too?",
    "burst": "Are calls right that follow each other with no check in between?",
    "repeatable": "Do the same inputs give the same bits?",
    "late": "Is all written when the call is over, on the judge's stream?",
    "inputs": "Are inputs left as they were?",
    "bounds": "Is nothing written around inputs and outputs?",
    "aliasing": "Have outputs memory of their own, and may two inputs be one tensor?",
    "library": "Does it call only what the problem allows?",
    "reference": "Does it leave the reference, and the network, alone?",
    "tampering": "Does it leave clocks, torch and the judge as they were?",
}


@dataclass(frozen=True)
class Finding:
    """What a check found wrong, at which call."""

    check: str
    text: str
    call: str = ""

    def __str__(self) -> str:
        return f"{self.check}: {self.text}" + (f" ({self.call})" if self.call else "")


@dataclass(frozen=True)
class TimedAt:
    """A timing at some sizes, and the time below which no kernel goes there."""

    sizes: Mapping[str, int]
    timed: Timed
    limit_us: float

    @property
    def share(self) -> float:
        """The limit over the time of the candidate: 1 is perfect."""
        return self.limit_us / self.timed.microseconds

    def __str__(self) -> str:
        dims = ", ".join(f"{name}={length}" for name, length in self.sizes.items())
        verdict = "ahead" if self.timed.ratio.clears(self.timed.control) else "not ahead"
        return (
            f"{dims}: {self.timed.microseconds:.2f} us, {self.share:.0%} of the limit; reference / "
            f"candidate {self.timed.ratio}, control {self.timed.control}: {verdict}"
        )


@dataclass(frozen=True)
class Verdict:
    """The verdict on a candidate.

    place   "cpu", "emulated" (CUDA on the emulated Hopper) or "gpu"
    calls   how many calls were judged
    errors  of each output: the largest relative error in norm, and the bound at that call
    """

    candidate: str
    problem: str
    place: str
    seed: int
    findings: tuple[Finding, ...]
    calls: int
    errors: Mapping[str, tuple[float, float]]
    timed: tuple[TimedAt, ...] = ()
    seconds: float = 0.0
    notes: tuple[str, ...] = field(default=())

    @property
    def passed(self) -> bool:
        """Whether no check found anything."""
        return not self.findings

    @property
    def checks(self) -> tuple[str, ...]:
        """The checks that found something."""
        return tuple(dict.fromkeys(one.check for one in self.findings))

    def require(self) -> Verdict:
        """This verdict; raises `CheckFailed` with its first finding where it has one."""
        if not self.passed:
            raise CheckFailed(f"{self.candidate}: {self.findings[0]}")
        return self

    @property
    def called(self) -> str:
        """How many calls, in words."""
        return f"{self.calls} call{'' if self.calls == 1 else 's'}"

    @property
    def place_named(self) -> str:
        """Where it was called, in words."""
        return "an emulated Hopper" if self.place == "emulated" else f"the {self.place.upper()}"

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data; an infinite error is null."""
        finite = {
            name: [number if math.isfinite(number) else None for number in pair]
            for name, pair in self.errors.items()
        }
        shares = [one.share for one in self.timed]
        return {
            **asdict(self), "passed": self.passed, "errors": finite, "shares_of_limit": shares,
        }  # fmt: skip

    def to_html(self) -> str:
        """One page, which needs nothing else."""
        return rendered("judge.html.j2", verdict=self, checks=CHECKS)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def __str__(self) -> str:
        head = "pass" if self.passed else "REFUSED"
        lines = [f"{self.candidate} against {self.problem}: {head}"]
        lines += [f"  {one}" for one in self.findings]
        for name, (error, bound) in self.errors.items():
            lines.append(f"  {name}: relative error {error:.2e}, allowed {bound:.1e}")
        lines += [f"  {one}" for one in (*self.timed, *self.notes)]
        lines.append(
            f"  {self.called} on {self.place_named}, seed {self.seed}, {self.seconds:.1f} s"
        )
        return "\n".join(lines)
