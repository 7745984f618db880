"""The watched worker: a hanging, crashing or wrong candidate costs that candidate only."""

from __future__ import annotations

import functools
import operator
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fake_device import image, open_and_die, open_broken, open_fake, workload

from warploom.errors import CheckFailed, DeviceError, InputError
from warploom.runtime import CheckSettings, LocalMeasurer, MeasureSettings, TimingSettings, Workload
from warploom.runtime import worker as watched
from warploom.runtime.session import open_session
from warploom.runtime.worker import MAX_RESTARTS_IN_A_ROW, Worker, in_own_process

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def gpu() -> Iterator[LocalMeasurer]:
    with LocalMeasurer(limit_s=1.0, open_device=open_fake) as measurer:
        measurer.prepare(workload())
        yield measurer


def test_every_outcome_costs_only_its_own_candidate(gpu: LocalMeasurer) -> None:
    candidates = [
        image(us=10),
        b"not a cubin",
        image("wrong"),
        image("hang"),
        image(us=40),
        image("crash"),
        image("fault"),
        image("wild"),
        image(us=20),
    ]
    results = gpu.measure(candidates)
    outcomes = [result.outcome for result in results]
    assert outcomes == [
        "ok", "rejected", "wrong", "hang", "ok", "crash", "fault", "wrong", "ok",
    ]  # fmt: skip
    assert [round(results[at].speedup, 1) for at in (0, 4, 8)] == [2.0, 0.5, 1.0]
    assert "CUDA_ERROR_INVALID_IMAGE" in results[1].detail
    assert "no answer in 1 s" in results[3].detail
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in results[6].detail
    assert gpu.restarts == 3
    assert results[2].to_json()["speedup"] is None


def test_many_faults_in_a_row_are_no_reason_to_give_up(gpu: LocalMeasurer) -> None:
    results = gpu.measure([image("fault")] * (MAX_RESTARTS_IN_A_ROW + 2) + [image(us=10)])
    assert [result.outcome for result in results[:-1]] == ["fault"] * (MAX_RESTARTS_IN_A_ROW + 2)
    assert results[-1].outcome == "ok"


def test_submitting_returns_at_once_and_results_come_in_order(gpu: LocalMeasurer) -> None:
    big = image(us=10, padding="x" * 200_000)  # more than a pipe holds
    began = time.monotonic()
    tickets = [gpu.submit(big) for _ in range(30)]
    assert time.monotonic() - began < 5
    assert gpu.pending == 30
    seen: list[int] = []
    while gpu.pending:
        seen.extend(ticket for ticket, _ in gpu.poll(1.0))
    assert seen == tickets
    assert gpu.poll(0.01) == []


def test_a_hang_is_noticed_even_when_nobody_polls_meanwhile(gpu: LocalMeasurer) -> None:
    gpu.submit(image("hang"))
    gpu.submit(image(us=10))
    time.sleep(2.5)
    results = []
    while gpu.pending:
        results.extend(result for _, result in gpu.poll(1.0))
    assert [result.outcome for result in results] == ["hang", "ok"]


def test_compare_and_check_run_in_the_worker(gpu: LocalMeasurer) -> None:
    timing = gpu.compare(
        {"base": image(us=20), "new": image(us=10)}, TimingSettings(rounds=3, reloads=2)
    )
    assert timing.ratios["new"].median == pytest.approx(2.0, rel=0.05)
    seen: list[dict[str, Any]] = []
    settings = CheckSettings(patterns=("randn",), samples=100)
    assert gpu.check(image(us=10), settings, seen.append).passed
    assert seen[-1]["done"] == 100
    assert not gpu.check(image("wrong")).passed
    with pytest.raises(DeviceError, match="ILLEGAL_ADDRESS"):
        gpu.check(image("fault"))
    assert gpu.measure([image(us=10)])[0].outcome == "ok"


def test_an_original_that_cannot_serve_is_refused(gpu: LocalMeasurer) -> None:
    good = workload()
    with pytest.raises(CheckFailed, match="not deterministic"):
        gpu.prepare(Workload(image("random"), good.spec))
    gpu.prepare(good)
    assert gpu.measure([image(us=10)])[0].outcome == "ok"


def test_measuring_before_preparing_is_refused() -> None:
    with (
        LocalMeasurer(open_device=open_fake) as gpu,
        pytest.raises(InputError, match="call prepare first"),
    ):
        gpu.measure([image()])


def test_a_device_that_cannot_be_opened_says_why() -> None:
    with (
        LocalMeasurer(open_device=open_broken) as gpu,
        pytest.raises(DeviceError, match="no GPU 0 here"),
    ):
        gpu.prepare(workload())


def test_a_worker_that_always_dies_is_given_up() -> None:
    worker = Worker(functools.partial(open_session, 0, open_and_die), "GPU 0")
    with pytest.raises(DeviceError, match=r"failed \d times in a row"):
        worker.call("prepare", workload(), limit_s=30.0)
    worker.close()


def test_calls_do_not_overtake_candidates(gpu: LocalMeasurer) -> None:
    gpu.submit(image())
    with pytest.raises(DeviceError, match="1 requests are pending"):
        gpu.compare({"base": image()})


def test_the_fast_path_is_quick_enough_for_a_search(gpu: LocalMeasurer) -> None:
    gpu.measure([image()])
    began = time.monotonic()
    gpu.measure([image(us=20 + n / 100) for n in range(100)])
    assert time.monotonic() - began < 2


def test_settings_that_judge_nothing_are_refused() -> None:
    with pytest.raises(InputError, match="repeats >= 1"):
        MeasureSettings(repeats=0)


def test_a_function_in_its_own_process_gives_what_it_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    assert in_own_process(operator.add, [1], [2], subject="lists") == [1, 2]
    with pytest.raises(InputError, match="repeats >= 1"):
        in_own_process(MeasureSettings, 5, 25.0, 0, subject="settings")
    with pytest.raises(DeviceError, match="ZeroDivisionError in the worker"):
        in_own_process(operator.truediv, 1, 0, subject="numbers")
    with pytest.raises(DeviceError, match="call on exits: its worker process died"):
        in_own_process(os._exit, 3, subject="exits")
    monkeypatch.setattr(watched, "OWN_LIMIT_S", 0.5)
    with pytest.raises(DeviceError, match=r"call on sleep: no answer in 0\.5 s"):
        in_own_process(time.sleep, 60, subject="sleep")
