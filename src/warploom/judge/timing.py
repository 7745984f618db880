"""Times on a GPU: the candidate beside the reference in its own types, and a copy of that (A/A)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from warploom.judge.problem import load_problem
from warploom.judge.tolerance import torch
from warploom.runtime.driver import CudaDevice
from warploom.runtime.helpers import Helpers
from warploom.runtime.stats import Ratio, bootstrap_ratio, round_ratios
from warploom.runtime.timing import Stopwatch, TimingSettings, launches_per_window

GROUPS = 4  # of rounds, each with arrays in other memory


@dataclass(frozen=True)
class Timed:
    """Microseconds of a call, and the reference's time over the candidate's with its A/A control.

    Above 1 the candidate is faster than the reference in torch.
    """

    microseconds: float
    reference_us: float
    ratio: Ratio
    control: Ratio

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        return asdict(self)


def time_calls(
    candidate: Callable[[], None], problem: str, given: Sequence[Any], seed: int
) -> Timed:
    """Interleaved rounds on a stream of the driver's, whose events no code of torch's touches."""
    reference = load_problem(problem)[0].reference
    device = CudaDevice(torch.cuda.current_device())
    watch = Stopwatch(device, Helpers(device))
    stream = torch.cuda.ExternalStream(device.stream)
    rng = np.random.default_rng(seed)
    settings = TimingSettings()
    series: list[list[Any]] = [[], [], []]
    with torch.cuda.stream(stream), torch.no_grad():
        launches = 0
        for _ in range(GROUPS):
            copies = [one.clone() for one in given]
            others = [one.clone() for one in given]
            calls: list[Callable[[], None]] = [
                lambda own=copies: _drop(reference(*own)),
                lambda own=others: _drop(reference(*own)),
                candidate,
            ]
            launches = launches or launches_per_window(watch.rough_us(calls[0]), settings)
            watch.rounds(calls, 2, launches, rng)  # warm up, not counted
            for place, row in enumerate(watch.rounds(calls, settings.rounds, launches, rng)):
                series[place].append(row)
    base, control, own = series
    return Timed(
        float(np.median(np.concatenate(own))),
        float(np.median(np.concatenate(base))),
        bootstrap_ratio([round_ratios(*pair) for pair in zip(base, own, strict=True)], seed),
        bootstrap_ratio([round_ratios(*pair) for pair in zip(base, control, strict=True)], seed),
    )


def _drop(_: Any) -> None:
    """Nobody keeps the result of a timed call."""
