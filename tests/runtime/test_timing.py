"""Interleaved timing on the virtual clock: planted ratios are found, the host gap never is."""

from __future__ import annotations

import json

import pytest
from fake_device import FakeDevice, image, spec

from warploom.errors import DeviceError, InputError
from warploom.runtime.helpers import Helpers
from warploom.runtime.timing import (
    CONTROL,
    SPIN_MARGIN_US,
    Stopwatch,
    Timing,
    TimingSettings,
    launches_per_window,
    time_images,
)
from warploom.runtime.workbench import Workbench


def make(noise: float = 0.0, late_spins: int = 0) -> Workbench:
    device = FakeDevice(noise=noise, late_spins=late_spins)
    return Workbench(device, Helpers(device), spec())


def test_a_planted_speed_up_is_found_and_the_control_is_one() -> None:
    bench = make(noise=0.01)
    timing = time_images(bench, {"base": image(us=20), "new": image(us=19.6)})
    assert timing.ratios["new"].verdict == "win"
    assert timing.ratios["new"].median == pytest.approx(20 / 19.6, rel=0.005)
    assert timing.control.low <= 1 <= timing.control.high
    assert timing.median_us["base"] == pytest.approx(20, rel=0.02)
    assert len(timing.reload_medians["new"]) == 4
    assert timing.ratios["new"].rounds == 48


@pytest.mark.parametrize("mode", ["warm", "cold"])
def test_both_modes_measure_the_launch_alone(mode: str) -> None:
    bench = make()
    settings = TimingSettings(mode=mode, rounds=3, reloads=2)
    timing = time_images(bench, {"a": image(us=7), "b": image(us=14)}, settings)
    assert timing.median_us == pytest.approx({"a": 7, "b": 14, CONTROL: 7})
    assert timing.ratios["b"].median == pytest.approx(0.5)
    assert timing.ratios["b"].verdict == "loss"
    assert timing.launches_per_window == (9 if mode == "warm" else 1)
    back = Timing.from_json(json.loads(json.dumps(timing.to_json())))
    assert back == timing
    assert "0.5000" in str(timing)


@pytest.mark.parametrize(("mode", "micros"), [("warm", [7.0, 14.0]), ("cold", [21.0, 16.0])])
def test_cold_is_from_memory_and_warm_from_the_cache(mode: str, micros: list[float]) -> None:
    """The second kernel is slower from the cache and faster from memory."""
    images = {"a": image(us=7, cold_us=21), "b": image(us=14, cold_us=16)}
    timing = time_images(make(), images, TimingSettings(mode=mode, rounds=3, reloads=2))
    assert [timing.median_us["a"], timing.median_us["b"]] == pytest.approx(micros)
    assert timing.ratios["b"].verdict == ("win" if mode == "cold" else "loss")


def test_a_spin_that_ends_too_early_throws_the_batch_away_and_grows() -> None:
    bench = make(late_spins=2)
    watch = Stopwatch(bench.device, bench.helpers)
    launch = bench.launcher(bench.load(image(us=5)))
    assert watch.windows([launch] * 3, 2) == pytest.approx([5, 5, 5])
    spins = bench.device.spins  # type: ignore[attr-defined]
    assert len(spins) == 3
    assert spins == sorted(set(spins))


def test_a_spin_grows_to_what_queueing_took_and_half_as_much_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A spin longer than it need be keeps the kernels waiting and lets the clocks fall."""
    bench = make(late_spins=1)
    watch = Stopwatch(bench.device, bench.helpers)
    launch = bench.launcher(bench.load(image(us=5)))
    clock = iter([0.0, 0.004, 1.0, 1.004])  # queueing took 4 ms
    monkeypatch.setattr("warploom.runtime.timing.time.perf_counter", lambda: next(clock))
    watch.windows([launch], 1)
    _, second = bench.device.spins  # type: ignore[attr-defined]
    assert second / bench.device.info.clock_mhz == pytest.approx(1.5 * 4000 + SPIN_MARGIN_US)


def test_a_host_that_never_keeps_up_is_named() -> None:
    bench = make(late_spins=10_000)
    with pytest.raises(DeviceError, match="within 200 ms: the host is too busy to time"):
        Stopwatch(bench.device, bench.helpers).windows([bench.launcher(bench.load(image()))], 1)
    spins = bench.device.spins  # type: ignore[attr-defined]
    assert max(spins) <= 200_000 * bench.device.info.clock_mhz


def test_windows_hold_enough_launches_for_short_kernels_only() -> None:
    settings = TimingSettings(window_us=60)
    assert launches_per_window(2.0, settings) == 30
    assert launches_per_window(0.01, settings) == 32
    assert launches_per_window(500.0, settings) == 1
    assert launches_per_window(2.0, TimingSettings(mode="cold")) == 1


def test_bad_requests_are_refused() -> None:
    with pytest.raises(InputError, match="mode 'hot'"):
        TimingSettings(mode="hot")
    with pytest.raises(InputError, match="rounds >= 2"):
        TimingSettings(rounds=1)
    with pytest.raises(InputError, match="reloads >= 1"):
        TimingSettings(reloads=0)
    assert TimingSettings(rounds=2, reloads=1).reloads == 1
    with pytest.raises(InputError, match="none named 'control'"):
        time_images(make(), {CONTROL: image()})


def test_the_sm_clock_is_read_from_a_spin() -> None:
    assert make().helpers.clock_mhz() == pytest.approx(1000.0)
    timing = time_images(make(), {"base": image(us=20), "new": image(us=20)})
    assert timing.clock_mhz == [1000.0] * len(timing.reload_medians["new"])  # one a reload


def test_the_first_launches_after_a_load_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that has just been loaded is slow at first: a round before counting has it warm."""
    seen: list[int] = []
    measure = Stopwatch.rounds

    def rounds(self: Stopwatch, functions, count, launches, rng, flush=None):  # type: ignore[no-untyped-def]
        fresh = any(id(function) not in seen for function in functions)
        seen.extend(id(function) for function in functions)
        kept.extend(functions)
        return measure(self, functions, count, launches, rng, flush) * (5.0 if fresh else 1.0)

    monkeypatch.setattr(Stopwatch, "rounds", rounds)
    monkeypatch.setattr(Workbench, "unload", lambda self, loaded: kept.append(loaded))
    kept: list[object] = []
    timing = time_images(make(), {"a": image(us=7)}, TimingSettings(rounds=3, reloads=2))
    assert timing.median_us["a"] == pytest.approx(7)
