"""Checking candidates on the fake device: every planted fault is found, and named where it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_device import FakeDevice, image, spec

from warploom.errors import CheckFailed, InputError
from warploom.runtime.buffers import GUARD_BYTES, Layout
from warploom.runtime.correctness import CheckReport, CheckSettings, check_candidate, self_test
from warploom.runtime.device import CudaError
from warploom.runtime.encoding import decode
from warploom.runtime.helpers import Helpers
from warploom.runtime.patterns import DEFAULT_PATTERNS, generate
from warploom.runtime.sampling import check_samples
from warploom.runtime.workbench import Workbench
from warploom.tile.dtypes import MEMORY

QUICK = CheckSettings(patterns=("randn", "integers"), warm=3)
PASSED = CheckReport(True, (), {})


def make(**kwargs: Any) -> Workbench:
    device = FakeDevice()
    return Workbench(device, Helpers(device), spec(**kwargs))


@pytest.fixture
def bench() -> Workbench:
    return make()


def ignore(_: dict[str, Any]) -> None:
    pass


def test_the_layout_guards_every_buffer() -> None:
    layout = Layout.of(spec(count=1000))
    for region in layout.regions:
        assert region.offset % 512 == 0
        assert any(start + size == region.offset for start, size in layout.guards())
    covered = sum(size for _, size in layout.guards()) + sum(
        region.buffer.nbytes for region in layout.regions
    )
    assert covered == layout.nbytes
    assert all(size >= GUARD_BYTES for _, size in layout.guards())


def test_a_word_is_described_by_buffer_element_and_role() -> None:
    layout = Layout.of(spec(count=1000))
    x, y = layout.regions
    assert layout.describe(x.offset // 4) == "input x, element 0 of [10, 100]"
    assert layout.describe(y.offset // 4 + 2) == "output y, element 4 of [1000]"
    assert layout.describe(0) == "the guard band after the start"
    assert layout.describe(y.end // 4) == "the guard band after y"
    with pytest.raises(InputError, match="no buffer 'z'"):
        layout.region("z")


def test_inputs_on_the_device_are_those_of_generate(bench: Workbench) -> None:
    space = bench.workspace
    space.fill(space.pristine, 11, ("uniform",))
    expected = generate(MEMORY["bf16"], 1000, "uniform", 11, salt=0, inner=100)
    assert space.read(space.pristine, "x") == expected.tobytes()
    assert set(space.read(space.pristine, "y")) == {0xFF}


def test_a_right_candidate_passes_every_pattern(bench: Workbench) -> None:
    report = check_candidate(bench, image(), image(us=10), CheckSettings(), ignore)
    assert report.passed
    assert [finding.pattern for finding in report.findings[::3]] == list(DEFAULT_PATTERNS)
    assert {finding.phase for finding in report.findings} == {"cold", "warm", "back to back"}
    assert json.loads(json.dumps(report.to_json()))["passed"]
    assert (report.samples, report.failed_sample) == (0, -1), "none was asked for, and none failed"


@pytest.mark.parametrize(
    ("candidate", "message"),
    [
        (image("zero"), "output y, element 0"),
        (image("wrong", at=10), "1 words differ, first in output y, element 4"),
        (image("unwritten"), "output y, element 500"),
        (image("wild"), "guard band after y"),
        (image("input"), "input x, element 0"),
        (image("wrong cold"), "cold"),
        (image("wrong from memory"), "cold"),
        (image("wrong later", after=1), "warm"),
        (image("wrong later", after=5), "back to back"),
        (image("random"), "words differ"),
    ],
    ids=lambda value: json.loads(value)["behave"] if isinstance(value, bytes) else "",
)
def test_planted_faults_are_found(bench: Workbench, candidate: bytes, message: str) -> None:
    report = check_candidate(bench, image(), candidate, QUICK, ignore)
    assert not report.passed
    assert message in report.detail
    assert str(report).startswith("FAILED")


def test_a_candidate_wrong_on_one_pattern_is_wrong(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever pattern it is, those after it do not make up for it."""
    load, until = bench.device.load, [0]

    def unlucky(data: bytes) -> object:
        until[0] -= json.loads(data)["behave"] == "unlucky"
        once = json.loads(data)["behave"] == "unlucky" and until[0] == 0
        return load(image("wrong") if once else data)

    monkeypatch.setattr(bench.device, "load", unlucky)
    for number, pattern in enumerate(DEFAULT_PATTERNS, 1):
        until[0] = number
        report = check_candidate(bench, image(), image("unlucky"), CheckSettings(), ignore)
        assert not report.passed and pattern in report.detail


def test_a_faulting_candidate_raises_a_fatal_error(bench: Workbench) -> None:
    with pytest.raises(CudaError, match="CUDA_ERROR_ILLEGAL_ADDRESS") as caught:
        check_candidate(bench, image(), image("fault"), QUICK, ignore)
    assert caught.value.fatal


@pytest.mark.parametrize(
    ("original", "message"),
    [
        (image("random"), "not deterministic"),
        (image("wild"), "writes into the guard band after y, byte"),
        (image("constant zero"), "writes only zeros"),
    ],
)
def test_an_original_that_is_no_reference_is_refused(
    bench: Workbench, original: bytes, message: str
) -> None:
    with pytest.raises(CheckFailed, match=message):
        check_candidate(bench, original, original, QUICK, ignore)


def test_a_comparison_that_sees_nothing_fails_the_self_test(bench: Workbench) -> None:
    bench.expect(bench.load(image()), 1, ("randn",))
    assert self_test(bench) == "found"
    bench.helpers.compare = lambda *_: None  # type: ignore[method-assign]
    with pytest.raises(CheckFailed, match="did not find a zeroed output in y"):
        self_test(bench)


def test_a_comparison_that_overlooks_one_word_fails_the_self_test(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It finds a zeroed output all the same."""
    whole = FakeDevice._compare_words

    def blind(device: FakeDevice, slots: tuple[bytes, ...]) -> None:
        first, second, quads = (int.from_bytes(slot, "little") for slot in slots[:3])
        pairs = [
            np.frombuffer(device.download(at, 16 * quads), np.uint32) for at in (first, second)
        ]
        if np.count_nonzero(pairs[0] != pairs[1]) > 1:
            whole(device, slots)

    bench.expect(bench.load(image()), 1, ("randn",))
    monkeypatch.setattr(FakeDevice, "_compare_words", blind)
    with pytest.raises(CheckFailed, match="did not find one flipped bit in y"):
        self_test(bench)


def test_an_accumulating_kernel_is_checked_without_back_to_back_launches() -> None:
    bench = make(role="inout")
    report = check_candidate(bench, image("adds"), image("adds"), QUICK, ignore)
    assert report.passed
    assert {finding.phase for finding in report.findings} == {"cold", "warm"}


def test_samples_run_as_one_graph_and_change_every_time(bench: Workbench, tmp_path: Path) -> None:
    settings = CheckSettings(samples=300, seed=4, state=str(tmp_path / "state.json"))
    seen: list[dict[str, Any]] = []
    report = check_samples(bench, image(), image(us=5), settings, seen.append, PASSED)
    assert (report.passed, report.samples, report.failed_sample) == (True, 300, -1)
    assert seen[-1]["done"] == 300
    assert seen[-1]["eta_s"] == 0
    last = 299
    pattern = DEFAULT_PATTERNS[last % len(DEFAULT_PATTERNS)]
    made = generate(MEMORY["bf16"], 1000, pattern, 4 + last, salt=0, inner=100)
    space = bench.workspace
    assert space.read(space.expected, "x") == made.tobytes()
    assert json.loads((tmp_path / "state.json").read_text())["done"] == 300


def test_sampling_resumes_and_stops_at_the_failing_sample(bench: Workbench, tmp_path: Path) -> None:
    state = str(tmp_path / "state.json")
    candidate = image("wrong later", after=400)
    first = CheckSettings(samples=200, batch=50, state=state)
    assert check_samples(bench, image(), candidate, first, ignore, PASSED).passed
    more = CheckSettings(samples=1000, batch=50, state=state)
    # a freshly loaded module starts its count again: 200 done, the 401st launch is sample 600
    report = check_samples(bench, image(), candidate, more, ignore, PASSED)
    assert not report.passed
    assert report.failed_sample == 600
    assert report.samples == 650
    assert "sample 600 of seed 1 differs" in report.detail
    again = check_samples(bench, image(), candidate, more, ignore, PASSED)
    assert (again.passed, again.failed_sample) == (False, 600)


def test_a_state_file_of_another_check_is_refused(bench: Workbench, tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    settings = CheckSettings(samples=10, state=str(path))
    check_samples(bench, image(), image(us=5), settings, ignore, PASSED)
    with pytest.raises(InputError, match="belongs to another check"):
        check_samples(bench, image(), image(us=6), settings, ignore, PASSED)
    path.write_text("{")
    with pytest.raises(InputError, match="not a sampling state file"):
        check_samples(bench, image(), image(us=5), settings, ignore, PASSED)


def test_narrow_floats_and_integers_fill_the_same_on_both_sides() -> None:
    for dtype in ("e4m3", "e5m2", "fp16", "fp32", "i32"):
        bench = make(dtype=dtype)
        space = bench.workspace
        space.fill(space.pristine, 2, ("large",))
        raw = space.read(space.pristine, "x")
        made = generate(MEMORY[dtype], 1000, "large", 2, salt=0, inner=100)
        assert raw == made.tobytes()
        assert decode(made, MEMORY[dtype]).any()


def test_bad_settings_are_refused() -> None:
    assert CheckSettings().samples == 0, "random inputs are run where they are asked for"
    with pytest.raises(InputError, match="expected 0 to 10,000,000"):
        CheckSettings(samples=10_000_001)
    with pytest.raises(InputError, match="unknown pattern"):
        CheckSettings(patterns=("nope",))
    with pytest.raises(InputError, match="at least 1"):
        CheckSettings(warm=0)
    big = spec()
    device = FakeDevice()
    too_much = type(big)(big.kernel, big.grid, big.block, big.buffers, big.arguments, 300_000)
    with pytest.raises(InputError, match="allows 232448"):
        Workbench(device, Helpers(device), too_much)
