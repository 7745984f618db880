"""What a worker process does for its parent: hold one workload ready and answer requests on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from warploom.errors import InputError
from warploom.runtime.buffers import describe_difference
from warploom.runtime.correctness import CheckReport, CheckSettings, Progress, check_candidate
from warploom.runtime.device import CudaError
from warploom.runtime.driver import CudaDevice
from warploom.runtime.helpers import Helpers
from warploom.runtime.sampling import check_samples
from warploom.runtime.stats import round_ratios
from warploom.runtime.timing import (
    Stopwatch,
    Timing,
    TimingSettings,
    launches_per_window,
    time_images,
)
from warploom.runtime.workbench import Loaded, Workbench, Workload

DeviceFactory = Callable[[int], CudaDevice]


@dataclass(frozen=True)
class MeasureSettings:
    """The fast path of a search: `rounds` ABBA rounds against the original, windows of `window_us`.

    `repeats` correctness launches are compared before timing (wrong schedules can be right once).
    """

    rounds: int = 5
    window_us: float = 25.0
    repeats: int = 2

    def __post_init__(self) -> None:
        """Refuse counts that judge or time nothing."""
        if self.rounds < 1 or self.repeats < 1 or self.window_us <= 0:
            raise InputError(
                f"measuring needs rounds >= 1, repeats >= 1 and a window above 0, got "
                f"{self.rounds}, {self.repeats}, {self.window_us}"
            )


@dataclass(frozen=True)
class Measurement:
    """One measured candidate. `speedup` is the original's time over its own, the median of rounds.

    Times are microseconds per launch; NaN unless `outcome` is 'ok'.
    """

    outcome: str
    speedup: float = float("nan")
    median_us: float = float("nan")
    base_us: float = float("nan")
    detail: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data; NaN becomes None."""
        data = asdict(self)
        if self.outcome != "ok":
            data.update(speedup=None, median_us=None, base_us=None)
        return data


@dataclass(frozen=True)
class Baseline:
    """The original, ready: its rough time, the device, and what was learnt opening it."""

    digest: str
    rough_us: float
    device: Mapping[str, Any]
    helper_cubin: bytes


class Session:
    """One device and the workload prepared on it. Lives in a worker process."""

    def __init__(self, device: CudaDevice, helper_cubin: bytes = b"") -> None:
        self.device = device
        self.helpers = Helpers(device, helper_cubin)
        self._bench: Workbench | None = None
        self._workload: Workload | None = None
        self._original: Loaded | None = None
        self._watch: Stopwatch | None = None
        self._rng = np.random.default_rng(0)
        self._rough_us = 0.0

    def prepare(self, workload: Workload) -> Baseline:
        """Make a workload current: run the original, check it, leave expected outputs ready.

        Raises `CheckFailed` when the original is no reference, `CudaError` when it does not run.
        """
        if self._bench is not None:
            if self._original is not None:
                self._bench.unload(self._original)
            self._bench.close()
        self._bench = self._original = None
        self._bench = Workbench(self.device, self.helpers, workload.spec)
        self._workload = workload
        self._original = self._bench.load(workload.image)
        self._watch = Stopwatch(self.device, self.helpers)
        self._expect()
        self._bench.check_original(self._original)
        self._rough_us = self._watch.rough_us(self._bench.launcher(self._original))
        info = self.device.info.to_json()
        return Baseline(workload.digest, self._rough_us, info, self.helpers.cubin)

    def measure(self, image: bytes, settings: MeasureSettings) -> Measurement:
        """Load, check and time one candidate. Fatal CUDA errors leave as `CudaError`."""
        bench, original, watch = self._ready()
        try:
            candidate = bench.load(image)
        except CudaError as error:
            if error.fatal:
                raise
            return Measurement("rejected", detail=str(error))
        # On a fatal error the module is not unloaded: its context is gone, and the process follows.
        verdict = self._judged(candidate, settings.repeats)
        if verdict is None:
            verdict = self._timed(watch, original, candidate, settings)
        bench.unload(candidate)
        return verdict

    def _judged(self, candidate: Loaded, repeats: int) -> Measurement | None:
        """'wrong' with the place of the first difference, or None when every launch was right."""
        bench, _, _ = self._ready()
        for _ in range(repeats):
            if found := bench.judge(candidate):
                self._expect()  # a wild write may have reached the reference itself
                return Measurement(
                    "wrong", detail=describe_difference(bench.workspace.layout, found)
                )
        return None

    def _timed(
        self, watch: Stopwatch, original: Loaded, candidate: Loaded, settings: MeasureSettings
    ) -> Measurement:
        warm = TimingSettings(window_us=settings.window_us)
        launches = launches_per_window(self._rough_us, warm)
        calls = [self._ready()[0].launcher(one) for one in (original, candidate)]
        base, own = watch.rounds(calls, settings.rounds, launches, self._rng)
        return Measurement(
            "ok",
            speedup=float(np.median(round_ratios(base, own))),
            median_us=float(np.median(own)),
            base_us=float(np.median(base)),
        )

    def compare(self, images: Mapping[str, bytes], settings: TimingSettings) -> Timing:
        """Time images honestly, the first being the base; see `timing.time_images`."""
        bench, _, _ = self._ready()
        timing = time_images(bench, images, settings)
        self._expect()
        return timing

    def check(self, image: bytes, settings: CheckSettings, progress: Progress) -> CheckReport:
        """Check an image against the workload's original, samples included."""
        bench, _, _ = self._ready()
        original = self._current().image
        report = check_candidate(bench, original, image, settings, progress)
        if report.passed and settings.samples:
            report = check_samples(bench, original, image, settings, progress, report)
        self._expect()
        return report

    def close(self) -> None:
        """Release the device."""
        self.device.close()

    def _current(self) -> Workload:
        if self._workload is None:
            raise InputError("no workload is prepared: call prepare first")
        return self._workload

    def _ready(self) -> tuple[Workbench, Loaded, Stopwatch]:
        self._current()
        if self._bench is None or self._original is None or self._watch is None:
            raise InputError("the workload was not prepared to the end: call prepare again")
        return self._bench, self._original, self._watch

    def _expect(self) -> None:
        """Expected outputs of the search inputs, whatever ran in the arenas before."""
        bench, original, _ = self._ready()
        workload = self._current()
        bench.expect(original, workload.seed, (workload.pattern,))
        self.device.synchronize()


def open_cuda(index: int) -> CudaDevice:
    """The device a worker opens unless told otherwise."""
    return CudaDevice(index)


def open_session(index: int, open_device: DeviceFactory, helper_cubin: bytes) -> Session:
    """The session of a worker on GPU `index`."""
    return Session(open_device(index), helper_cubin)
