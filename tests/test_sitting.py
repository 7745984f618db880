"""The protocol of the headline figures: its intervals, its rows, and what its timed calls hold."""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from warploom.errors import InputError
from warploom.runtime.stats import median_interval

ROOT = Path(__file__).parent.parent
WHERE = {"device": "NVIDIA H200", "driver": "580", "torch": "2.11", "date": "2026-11-22"}


@pytest.fixture(scope="module")
def bench() -> Callable[[str], ModuleType]:
    """Modules of bench, imported when a test asks for one."""
    return lambda name: import_module(f"bench.{name}")


def coverage(
    interval: Callable[[list[float]], tuple[float, float, float]], draw: Callable[[], list[float]]
) -> float:
    """How often an interval holds the true ratio, 1."""
    trials = 2000
    inside = 0
    for _ in range(trials):
        _, low, high = interval(draw())
        inside += low <= 1 <= high
    return inside / trials


@pytest.mark.parametrize("sittings", [3, 4, 6])
def test_the_interval_over_sittings_covers_what_it_says(
    bench: Callable[[str], ModuleType], sittings: int
) -> None:
    """Sittings differ by more than their rounds do; an interval of 90 % would fail here."""
    rng = random.Random(sittings)

    def draw() -> list[float]:
        offsets = (math.exp(rng.gauss(0, 0.004)) for _ in range(sittings))
        return [
            x * statistics.median(math.exp(rng.gauss(0, 0.002)) for _ in range(8)) for x in offsets
        ]

    assert 0.935 < coverage(bench("sitting").interval, draw) < 0.965


@pytest.mark.parametrize("rounds", [6, 7, 12, 16, 32])
def test_the_interval_over_rounds_covers_at_least_what_it_says(
    bench: Callable[[str], ModuleType], rounds: int
) -> None:
    rng = random.Random(rounds)
    ours = [1.0] * rounds
    found = coverage(
        lambda other: median_interval(ours, other),
        lambda: [math.exp(0.01 * rng.gauss(0, 1) ** 3) for _ in range(rounds)],
    )
    assert 0.94 < found < 0.99


def test_too_few_rounds_or_sittings_have_no_interval(bench: Callable[[str], ModuleType]) -> None:
    with pytest.raises(InputError, match="5 rounds: expected at least 6"):
        median_interval([1.0] * 5, [1.0] * 5)
    with pytest.raises(InputError, match="2 sittings: expected at least 3"):
        bench("sitting").interval([1.0, 1.0])


def timed(name: str, times: dict[str, list[float]], **more: Any) -> dict[str, Any]:
    """A case as a sitting writes it: 1e9 operations, so that a millisecond is 1 TFLOP/s."""
    return {
        "name": name,
        "shape": name,
        "dtype": "bf16",
        "default": "variant",
        "compiler": "nvcc",
        "work": 1e9,
        "baselines": [x for x in times if x not in ("control", "default", "front-door")],
        "refused": {},
        "checks": {x: "pass" for x in times if x in ("default", "front-door")},
        "same image": True,
        "bursts": {x: {"ms": ms, "mhz": [1980] * len(ms)} for x, ms in times.items()},
        "alone": {},
        **more,
    }


def sitting(path: Path, number: int, *cases: dict[str, Any], **more: Any) -> Path:
    """A sitting's file."""
    header = {"argv": f"python -m bench.x --name {number}", "started": f"1{number}:00", **WHERE}
    lines = [header | more, *cases]
    file = path / f"sitting-{number}.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return file


def plain(ours: float, fa4: float, other: float) -> dict[str, list[float]]:
    """Four rounds of three candidates and the control."""
    return {
        "FA4": [fa4] * 4,
        "cuDNN": [other] * 4,
        "control": [fa4 * 1.001] * 4,
        "default": [ours] * 4,
    }


def test_a_row_says_what_every_sitting_saw(
    bench: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    st = bench("sitting")
    # FlashAttention-4 is the best of the three together; cuDNN has the best single sitting.
    speeds = [(1.00, 1.05, 1.30), (1.00, 1.06, 1.03), (1.00, 1.07, 1.30)]
    files = [
        sitting(tmp_path, number, timed("a", plain(*speed))) for number, speed in enumerate(speeds)
    ]
    rows, short = st.rows_of(files, "claim", st.seen_in_bursts)
    assert short == []
    (row,) = rows
    assert row.ratio_to_best == pytest.approx(1.06, abs=1e-4)
    low, high = row.ci95
    assert low < 1.05  # three sittings: wider than their spread
    assert high > 1.07
    assert row.samples == 12
    assert row.checks["fastest baseline"] == round(1 / 1.03, 1)
    assert [one["ratio"] for one in row.checks["sittings"]] == [1.05, 1.06, 1.07]
    assert row.checks["of the limit"] == round(1 / (132 * 4096 * 1980e-6), 3)
    assert row.command.split(" ; ") == [f"python -m bench.x --name {n}" for n in range(3)]
    assert row.control[0] <= 1 / 1.001 + 1e-4


def test_a_kernel_of_the_front_door_is_a_row_of_its_own(
    bench: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    st = bench("sitting")
    times = plain(1.0, 1.1, 1.2) | {"front-door": [1.0] * 4}
    files = [sitting(tmp_path, n, timed("a", times, **({"same image": n != 2}))) for n in range(3)]
    rows, _ = st.rows_of(files, "claim", st.seen_in_bursts)
    assert [row.kernel for row in rows] == ["claim default", "claim front-door"]
    assert rows[1].checks["same image"] is False  # one sitting had another image


def test_what_a_sitting_lacks_is_left_out(
    bench: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    st = bench("sitting")
    whole = timed("a", plain(1.0, 1.1, 1.2))
    without = plain(1.0, 1.1, 1.2)
    del without["cuDNN"]
    failed = timed("a", without, checks={"default": "fail 0.3"})
    hung = {"name": "b", "error": "hung"}
    files = [
        sitting(tmp_path, 0, whole, timed("b", plain(1.0, 1.1, 1.2))),
        sitting(tmp_path, 1, whole, hung),
        sitting(tmp_path, 2, failed),
    ]
    (row,), short = st.rows_of(files, "claim", st.seen_in_bursts)
    assert set(row.baselines) == {"FA4"}  # refused once: no baseline of the row
    assert row.checks["numerics"] == "fail 0.3"
    assert short == ["b: 1 sittings"]


def test_sittings_are_three_and_different_and_real(
    bench: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    st = bench("sitting")
    case = timed("a", plain(1.0, 1.1, 1.2))
    files = [sitting(tmp_path, number, case) for number in range(3)]
    with pytest.raises(InputError, match="expected at least 3"):
        st.rows_of([*files[:2], files[0]], "claim", st.seen_in_bursts)
    with pytest.raises(InputError, match="as another file did"):
        again = sitting(tmp_path, 7, case, started="10:00")
        st.rows_of([*files[:2], again], "claim", st.seen_in_bursts)
    with pytest.raises(InputError, match="dry run"):
        made_up = sitting(tmp_path, 8, case, dry=True)
        st.rows_of([*files[:2], made_up], "claim", st.seen_in_bursts)
    with pytest.raises(InputError, match="says no argv"):
        (tmp_path / "no.jsonl").write_text("{}\n")
        st.rows_of([*files[:2], tmp_path / "no.jsonl"], "claim", st.seen_in_bursts)


def test_kernels_alone_are_compared_by_their_long_samples(
    bench: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    st = bench("sitting")

    def reading(ms: float) -> dict[str, Any]:
        return {
            "calls": 1000,
            "seconds": ms,
            "watts": 699.0,
            "mhz": 1400.0,
            "reasons": st.POWER_CAP,
        }

    alone = {"FA4": 1.2, "cuDNN": 1.4, "control": 1.2, "default": 1.0}
    case = timed("a", plain(1.0, 1.1, 1.2), alone={n: reading(ms) for n, ms in alone.items()})
    bursts_only = timed("b", plain(1.0, 1.1, 1.2))
    files = [sitting(tmp_path, number, case, bursts_only) for number in range(3)]
    (row,), _ = st.rows_of(files, "claim", st.seen_alone)
    assert (row.shape, row.ratio_to_best) == ("a", pytest.approx(1.2))
    assert row.checks["sittings"][0]["watts"] == 699
    assert row.checks["sittings"][0]["capped"] is True


def test_a_row_names_the_command_that_made_it(
    bench: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = [str(ROOT / "bench" / "attention.py"), "run", "--rounds", "7", "--only", "time 64"]
    monkeypatch.setattr(sys, "argv", argv)
    command = bench("kernel_bench").command_line()
    assert command == "python -m bench.attention run --rounds 7 --only 'time 64'"


class Counted:
    """Stands for a kernel: says which table of tasks it was called with."""

    def __init__(self) -> None:
        self.tables: list[Any] = []

    def __call__(self, arrays: dict[str, Any], stream: int = 0) -> None:
        del stream
        self.tables.append(arrays["tiles"])


@pytest.mark.parametrize("tables", [False, True])
def test_the_table_of_tasks_is_made_inside_of_the_timed_call(
    bench: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tables: bool
) -> None:
    torch = pytest.importorskip("torch")
    sits, cases = bench("attention_sitting"), bench("attention_cases")
    monkeypatch.setattr(cases, "DEVICE", "cpu")
    made: list[int] = []
    real = sits.task_table

    def counted(*given: Any) -> Any:
        made.append(1)
        return real(*given)

    case = sits.Case(f"packed 64 causal short{' tables' if tables else ''}")
    data = {x: torch.zeros(1) for x in case.config.arrays} | {"tiles 128": "ready"}
    monkeypatch.setattr(sits, "task_table", counted)
    kernel = Counted()
    call = sits.own_call(torch, kernel, case, 128, lambda: data, lambda: 0)
    call()
    call()
    assert len(made) == (2 if tables else 0)
    if tables:
        first, second = kernel.tables
        assert first is not second
        lengths = cases.PACKED["short"]
        assert first.tolist() == real(lengths, lengths, 128).tolist()
    else:
        assert kernel.tables == ["ready", "ready"]


def options(*without: str) -> Namespace:
    """Those of a dry sitting."""
    return Namespace(
        dry=True, prepare=False, no_alone=False, seed=0, front_door=[], without=[*without]
    )


PLAIN = ("time", "fp8", "gqa", "jump")  # kinds that torch's cuDNN takes
KINDS = (
    "time 64 full 1024",
    "fp8 128 causal 8192",
    "gqa 128 causal 8192",
    "window 128 causal 8192",
    "packed 128 causal mixed",
    "packed 64 causal short tables",
    "jump 128 causal 8192",
)


@pytest.mark.parametrize("name", KINDS)
def test_a_dry_sitting_makes_every_kind_of_case(
    bench: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Operands, reference, baselines and our call with just the arrays that its program takes."""
    pytest.importorskip("torch")
    sits, cases, st = bench("attention_sitting"), bench("attention_cases"), bench("sitting")
    assert name in sits.CASES
    case = sits.Case(name)
    choice = case.choice()
    config = choice.config(case.config)
    entry = {"folder": case.folder, "variant": choice.name, "tile": config.tile}

    def of_name(name: str) -> SimpleNamespace:
        return SimpleNamespace(name=name)

    source = SimpleNamespace(arrays=[*map(of_name, config.arrays)])
    image = SimpleNamespace(source=source, cubin=b"", resources=SimpleNamespace(compiler="nvcc"))
    eager: list[bool] = []

    class Watched(st.Dry):
        def __init__(self, calls: Any, eager: bool = False) -> None:
            super().__init__(calls)
            watched.append(eager)

    watched = eager
    monkeypatch.setattr(cases, "DEVICE", "cpu")
    monkeypatch.setattr(sits, "kernel_table", lambda: {name: entry})
    monkeypatch.setattr(sits.Built, "read", staticmethod(lambda path: image))
    monkeypatch.setattr(sits.st, "Dry", Watched)
    found = sits.sit(name, 6, options("cuDNN"))
    assert found["refused"] == ({"cuDNN": "left out by --without"} if case.kind in PLAIN else {})
    assert eager == [case.tables]  # what the host does is timed where it is part of the call
    own = {"default", "ordered"} if case.kind == "fp8" else {"default"}
    assert set(found["bursts"]) == {*found["baselines"], "control", *own}
    assert all(len(one["ms"]) == 6 for one in found["bursts"].values())
    if case.kind == "fp8":
        assert {"cuDNN fp8, fp8 out", "cuDNN fp8, bf16 out"} <= set(found["baselines"])
    if case.kind in ("time", "packed"):
        assert {"FlashAttention-4", "cuDNN front end"} <= set(found["baselines"])


def test_gelu_stands_beside_a_fused_baseline(
    bench: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    sits, gemm, cases = bench("gemm_sitting"), bench("gemm"), bench("gemm_cases")
    monkeypatch.setattr(cases, "DEVICE", "cpu")
    image = SimpleNamespace(cubin=b"", resources=SimpleNamespace(compiler="nvcc"))
    monkeypatch.setattr(sits.Built, "read", staticmethod(lambda _: image))
    found = sits.sit("gelu 8192x8192x2048", 6, options())
    assert set(found["baselines"]) == {"cuBLASLt with gelu", "cuBLAS + activation"}
    # One kernel or two, the baselines compute what is claimed.
    (v, *_) = sits.data_of(torch, "gelu", found["default"], sits.SMALL)
    config = cases.VARIANTS[found["default"]][0]
    want = cases.expected(torch, config, v, None, torch.float64)
    for name, call in gemm.baselines(torch, "gelu").items():
        v["c"].fill_(math.nan)
        call(v)
        assert float((v["c"].double() - want).norm() / want.norm()) < 0.01, name


def test_scores_jump_by_more_than_a_guess_forgives_in_every_block(
    bench: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    cases = bench("attention_cases")
    monkeypatch.setattr(cases, "DEVICE", "cpu")
    d, keys, block = 128, 8192, 80
    v = {x: torch.zeros(1, 1, keys, d, dtype=torch.bfloat16) for x in "qk"}
    cases.reshape_scores(torch, "jump", v, block)
    row = v["q"][0, 0, -1].double() @ v["k"][0, 0].double().T / math.sqrt(d)
    rise = row[block::block] - row[:-block:block][: len(row[block::block])]
    assert float(rise.min()) * math.log2(math.e) > 24
    assert float(row[:block].max()) == 0.0


class FakeCuda:
    """torch.cuda with a clock of its own: 1980 MHz, whatever runs takes the time it says."""

    def __init__(self) -> None:
        self.now, self.captured = 0.0, None
        self.log: list[str] = []
        self.cuda = self
        self.CUDAGraph, self.Event = lambda: FakeGraph(self), lambda **_: FakeEvent(self)

    def run(self, name: str, ms: float) -> None:
        if self.captured is not None:
            self.captured.append((name, ms))
            return
        self.now += ms
        self.log.append(name)

    def _sleep(self, cycles: int) -> None:
        self.run("spin", cycles / 1980e3)

    @contextmanager
    def graph(self, graph: FakeGraph) -> Iterator[None]:
        self.captured = graph.work
        try:
            yield
        finally:
            self.captured = None


class FakeGraph:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.work = cuda, list[tuple[str, float]]()

    def replay(self) -> None:
        for name, ms in self.work:
            self.cuda.run(name, ms)


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.at = cuda, 0.0

    def record(self) -> None:
        self.at = self.cuda.now

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: FakeEvent) -> float:
        return later.at - self.at


@pytest.mark.parametrize("eager", [False, True])
def test_a_burst_rests_and_counts_the_calls_alone(
    bench: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, eager: bool
) -> None:
    st = bench("sitting")
    rests: list[float] = []
    monkeypatch.setattr(st.time, "sleep", rests.append)
    torch = FakeCuda()

    def broken() -> None:
        if torch.captured is not None:
            raise RuntimeError("cannot be captured")
        torch.run("broken", 0.1)

    calls = {"quick": lambda: torch.run("quick", 0.1), "slow": lambda: torch.run("slow", 9.0)}
    gpu = st.Gpu(torch, calls | ({} if eager else {"broken": broken}), eager)
    assert gpu.names == ["quick", "slow"]
    assert gpu.refused == ({} if eager else {"broken": "RuntimeError: cannot be captured"})
    gpu.again("quick")
    torch.log.clear()
    assert gpu.burst("quick") == (pytest.approx(0.1), pytest.approx(1980))
    assert rests == [st.REST]
    queue = [] if eager else ["spin"]  # the host is timed where it is part of the call
    assert torch.log == [*queue, *["quick"] * 40, "spin"]
    assert gpu.burst("slow")[0] == pytest.approx(9.0)
    assert gpu.burst(st.CONTROL)[0] == pytest.approx(0.1)


def test_alone_settles_first(
    bench: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    st = bench("sitting")
    torch = FakeCuda()
    began = st.time.perf_counter()
    samples = [(began - 9, 100.0, 1980), (began + 9, 699.0, 1400)]
    meter = SimpleNamespace(samples=samples, reasons=lambda: st.POWER_CAP)
    monkeypatch.setattr(st, "Meter", lambda _: meter)
    monkeypatch.setattr(st, "SETTLE", 0.01)
    monkeypatch.setattr(st, "ALONE", 0.01)
    found = st.Gpu(torch, {"it": lambda: torch.run("it", 0.5)}).alone("it")
    assert found.seconds * 1e3 / found.calls == pytest.approx(0.5)
    assert found.mhz == pytest.approx(1980)
    assert (found.watts, found.reasons) == (699.0, st.POWER_CAP)
    assert torch.log.count("it") > found.calls  # what settles is not counted
