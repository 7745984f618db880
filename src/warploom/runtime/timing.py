"""Interleaved timing of several images of one kernel, with an A/A control in the same run.

How a time is made honest:

* A window is one or more back-to-back launches between two events. All windows of a batch are
  queued behind a spinning kernel; if the spin ended before the last one was queued, the batch is
  thrown away and the spin grows. So no gap of the host is ever inside a window.
* A round visits every function in a random order and then in the mirrored one (ABBA for two).
* *cold* writes more than twice the L2 cache before each single launch; *warm* repeats launches on
  the same buffers. `inout` buffers are not restored between launches.
* Every reload loads all images anew, in a random order, so that load addresses vary; the control
  is a byte-identical copy of the base, loaded as a module of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from warploom.errors import DeviceError, InputError
from warploom.runtime.driver import CudaDevice
from warploom.runtime.helpers import Helpers
from warploom.runtime.stats import Ratio, bootstrap_ratio, palindrome, round_ratios
from warploom.runtime.workbench import Workbench

CONTROL = "control"
BATCH_OPERATIONS = 400  # well under the driver's queue, so that queueing never blocks on the spin
SPIN_MARGIN_US = 60.0
MAX_SPIN_US = 200_000.0


@dataclass(frozen=True)
class TimingSettings:
    """How much to measure. `rounds` is per reload; `window_us` is the aim for one warm window."""

    mode: str = "warm"
    rounds: int = 12
    reloads: int = 4
    window_us: float = 60.0
    seed: int = 0
    pattern: str = "randn"

    def __post_init__(self) -> None:
        """Refuse an unknown mode and counts that make no interval."""
        if self.mode not in ("warm", "cold"):
            raise InputError(f"timing mode {self.mode!r}, expected warm or cold")
        if self.rounds < 2 or self.reloads < 1 or self.window_us <= 0:
            raise InputError(
                f"timing needs rounds >= 2, reloads >= 1 and a window above 0, got {self.rounds}, "
                f"{self.reloads}, {self.window_us}"
            )


@dataclass(frozen=True)
class Timing:
    """What an interleaved run found.

    `median_us` is the time of one launch for each name, `ratios` the base's time over the other's
    (above 1: the other is faster), `control` the same for the copy of the base. `reload_medians`
    holds each reload's median ratio by name.
    """

    base: str
    mode: str
    median_us: dict[str, float]
    ratios: dict[str, Ratio]
    control: Ratio
    reload_medians: dict[str, list[float]]
    launches_per_window: int
    clock_mhz: list[float]
    settings: TimingSettings = field(default_factory=TimingSettings)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Timing:
        """A result back from `to_json`."""
        values = dict(data)
        values["ratios"] = {name: Ratio(**entry) for name, entry in data["ratios"].items()}
        values["control"] = Ratio(**data["control"])
        values["settings"] = TimingSettings(**data["settings"])
        return cls(**values)

    def __str__(self) -> str:
        lines = [f"{self.mode}, {self.control.rounds} rounds, {self.control.reloads} reloads"]
        for name, micros in self.median_us.items():
            ratio = self.control if name == CONTROL else self.ratios.get(name)
            lines.append(f"  {name:<16} {micros:9.2f} us  {ratio or '(base)'}")
        return "\n".join(lines)


Launch = Callable[[], None]  # queues one launch on the device's stream


class Stopwatch:
    """Times launches on one device behind a spin. Keeps its events and the spin it learnt.

    `flush` queues what empties the cache before a window.
    """

    def __init__(self, device: CudaDevice, helpers: Helpers) -> None:
        self._device, self._helpers = device, helpers
        self._events: list[Any] = []
        self._spin_us = SPIN_MARGIN_US

    def windows(
        self, order: Sequence[Launch], launches: int, flush: Launch | None = None
    ) -> list[float]:
        """Microseconds per launch of one window for each entry of `order`, in that order."""
        device = self._device
        while len(self._events) < 2 * len(order) + 1:
            self._events.append(device.event())
        spun, marks = self._events[0], self._events[1:]
        while self._spin_us <= MAX_SPIN_US:
            began = time.perf_counter()
            self._helpers.spin(int(self._spin_us * device.info.clock_mhz))
            device.record(spun)
            for place, launch in enumerate(order):
                if flush is not None:
                    flush()
                device.record(marks[2 * place])
                for _ in range(launches):
                    launch()
                device.record(marks[2 * place + 1])
            late = device.is_done(spun)
            queued_us = (time.perf_counter() - began) * 1e6
            device.synchronize()
            if not late:
                pairs = zip(marks[0::2], marks[1::2], strict=False)
                times = [device.elapsed_us(*pair) for pair, _ in zip(pairs, order, strict=False)]
                return [micros / launches for micros in times]
            self._spin_us = max(2 * self._spin_us, 1.5 * queued_us + SPIN_MARGIN_US)
        raise DeviceError(
            f"launches could not be queued within {MAX_SPIN_US / 1000:.0f} ms: the host is too "
            "busy to time this kernel, free some cores"
        )

    def rough_us(self, launch: Launch) -> float:
        """The warm time of one launch, roughly: the smallest of three after one to warm up."""
        return min(self.windows([launch] * 4, 1)[1:])

    def rounds(
        self,
        functions: Sequence[Launch],
        count: int,
        launches: int,
        rng: np.random.Generator,
        flush: Launch | None = None,
    ) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Microseconds per launch: [functions, count], each the mean of a round's two windows."""
        per_round = 2 * len(functions) * (launches + 2 + int(flush is not None))
        step = max(1, BATCH_OPERATIONS // per_round)
        result = np.zeros((len(functions), count))
        for start in range(0, count, step):
            span = range(start, min(start + step, count))
            order = [index for _ in span for index in palindrome(len(functions), rng)]
            times = self.windows([functions[index] for index in order], launches, flush)
            width = 2 * len(functions)
            for place, (index, micros) in enumerate(zip(order, times, strict=True)):
                result[index, start + place // width] += micros / 2
        return result


def launches_per_window(rough_us: float, settings: TimingSettings) -> int:
    """Launches in one window: enough for `window_us`, at most 32; always 1 when cold."""
    if settings.mode == "cold":
        return 1
    return int(np.clip(round(settings.window_us / max(rough_us, 0.1)), 1, 32))


def time_images(
    bench: Workbench, images: Mapping[str, bytes], settings: TimingSettings | None = None
) -> Timing:
    """Time `images` (the first is the base) against each other and against a copy of the base.

    All must be correct already. Raises `InputError` with no image or one named 'control',
    `CudaError` when one does not load or faults.
    """
    settings = settings or TimingSettings()
    if not images or CONTROL in images:
        raise InputError(f"timing needs at least one image, none named {CONTROL!r}")
    base, *others = images
    names = [base, CONTROL, *others]
    sources = {**images, CONTROL: images[base]}
    rng = np.random.default_rng(settings.seed)
    flush = bench.workspace.flush_l2 if settings.mode == "cold" else None
    watch = Stopwatch(bench.device, bench.helpers)
    launches = 0
    times: dict[str, list[Any]] = {name: [] for name in names}
    clocks: list[float] = []
    for reload in range(settings.reloads):
        order = [names[int(place)] for place in rng.permutation(len(names))]
        loaded = {name: bench.load(sources[name]) for name in order}
        if reload == 0:
            bench.expect(loaded[base], settings.seed, (settings.pattern,))
            bench.workspace.restore()
            launches = launches_per_window(watch.rough_us(bench.launcher(loaded[base])), settings)
        functions = [bench.launcher(loaded[name]) for name in names]
        watch.rounds(functions, 2, launches, rng, flush)  # warm up, not counted
        measured = watch.rounds(functions, settings.rounds, launches, rng, flush)
        for name, series in zip(names, measured, strict=True):
            times[name].append(series)
        clocks.append(round(bench.helpers.clock_mhz(), 1))
        for name in names:
            bench.unload(loaded[name])
    return _summary(base, names, times, launches, clocks, settings)


def _summary(
    base: str,
    names: Sequence[str],
    times: Mapping[str, list[Any]],
    launches: int,
    clocks: list[float],
    settings: TimingSettings,
) -> Timing:
    series = {
        name: [round_ratios(*pair) for pair in zip(times[base], times[name], strict=True)]
        for name in names
        if name != base
    }
    ratios = {name: bootstrap_ratio(groups, settings.seed) for name, groups in series.items()}
    return Timing(
        base=base,
        mode=settings.mode,
        median_us={name: float(np.median(np.concatenate(times[name]))) for name in names},
        ratios={name: ratio for name, ratio in ratios.items() if name != CONTROL},
        control=ratios[CONTROL],
        reload_medians={
            name: [float(np.median(group)) for group in groups] for name, groups in series.items()
        },
        launches_per_window=launches,
        clock_mhz=clocks,
        settings=settings,
    )
