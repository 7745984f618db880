"""Where candidates go to be measured: a GPU behind a watched process.

with LocalMeasurer() as gpu:
    baseline = gpu.prepare(Workload(image, spec))
    ticket = gpu.submit(candidate)              # returns at once
    for ticket, result in gpu.poll(timeout_s=1.0): ...
    gpu.measure([a, b, c])                      # or all at once, in order
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from warploom.runtime.correctness import CheckReport, CheckSettings, Progress
from warploom.runtime.device import CudaError
from warploom.runtime.session import (
    Baseline,
    DeviceFactory,
    Measurement,
    MeasureSettings,
    open_cuda,
    open_session,
)
from warploom.runtime.timing import Timing, TimingSettings
from warploom.runtime.workbench import Workload
from warploom.runtime.worker import Reply, Worker

PREPARE_LIMIT_S = 60.0
CHECK_LIMIT_S = 60.0  # between two signs of life: a pattern done, or about a second of samples


class LocalMeasurer:
    """One GPU of this machine behind a watched worker process.

    `limit_s` is how long one candidate may take before it counts as a hang. `tally` counts the
    outcomes so far. `MeasureSettings` is the fast path's; comparing and checking have their own.
    """

    def __init__(
        self,
        index: int = 0,
        settings: MeasureSettings | None = None,
        limit_s: float = 5.0,
        open_device: DeviceFactory = open_cuda,
    ) -> None:
        self.settings = settings or MeasureSettings()
        self.limit_s = limit_s
        opener = functools.partial(open_session, index, open_device)
        self._worker = Worker(opener, f"GPU {index}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def pending(self) -> int:
        """Candidates submitted and not yet collected."""
        return self._worker.pending

    @property
    def restarts(self) -> int:
        """How often the worker process was replaced."""
        return self._worker.restarts

    def prepare(self, workload: Workload) -> Baseline:
        """Make a workload current; raises what keeps the original from running."""
        baseline: Baseline = self._worker.call("prepare", workload, limit_s=PREPARE_LIMIT_S)
        self._worker.remember_setup(
            "prepare", workload, limit_s=PREPARE_LIMIT_S, keep=baseline.helper_cubin
        )
        return baseline

    def submit(self, image: bytes) -> int:
        """Hand a candidate over and return its ticket at once."""
        return self._worker.submit("measure", image, self.settings, limit_s=self.limit_s)

    def poll(self, timeout_s: float = 0.0) -> list[tuple[int, Measurement]]:
        """Finished candidates as (ticket, measurement), waiting up to `timeout_s` for the first."""
        return [(reply.ticket, _measurement(reply)) for reply in self._worker.poll(timeout_s)]

    def measure(self, images: Sequence[bytes]) -> list[Measurement]:
        """Measure images and return their results in order; none may be pending before."""
        tickets = [self.submit(image) for image in images]
        results: dict[int, Measurement] = {}
        while len(results) < len(tickets):
            results.update(self.poll(1.0))
        return [results[ticket] for ticket in tickets]

    def compare(
        self, images: Mapping[str, bytes], settings: TimingSettings | None = None
    ) -> Timing:
        """Time images honestly against the first, with an A/A control."""
        return self._worker.call("compare", dict(images), settings or TimingSettings())

    def check(
        self, image: bytes, settings: CheckSettings | None = None, progress: Progress | None = None
    ) -> CheckReport:
        """Check an image against the workload's original, patterns first, then samples.

        Raises `DeviceError` when the image hangs or faults; a state file keeps the samples done.
        """
        return self._worker.call(
            "check",
            image,
            settings or CheckSettings(),
            limit_s=CHECK_LIMIT_S,
            progress=progress or _unheard,
        )

    def close(self) -> None:
        """Stop the worker process."""
        self._worker.close()


def _unheard(_: dict[str, Any]) -> None:
    """Progress nobody asked for still tells the watchdog that the worker lives."""


def _measurement(reply: Reply) -> Measurement:
    """A worker's reply as a measurement; errors of the machinery itself are raised."""
    if reply.kind == "done":
        return reply.value
    if reply.kind in ("hang", "crash"):
        return Measurement(reply.kind, detail=str(reply.value))
    if isinstance(reply.value, CudaError):
        return Measurement("fault", detail=str(reply.value))
    raise reply.value
