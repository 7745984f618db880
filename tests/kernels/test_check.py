"""What a check of a run finds: planted faults, small ones too, and nothing in right kernels."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from warploom.cli import app
from warploom.errors import CheckFailed, DeviceError, InputError
from warploom.kernels import check
from warploom.kernels.check import CheckResult, checked
from warploom.kernels.gemm.program import GemmConfig, gemm
from warploom.kernels.library import configure
from warploom.kernels.select import select
from warploom.tile import interpret

SOURCE = """
import numpy as np
from warploom import tile as t
from warploom.kernels import UserKernel

def copy(rows: int = 64, step: int = 64, kind: t.DType = t.FP32, part: int = 0) -> t.Program:
    # A task copies `rows` rows from every `step`-th on, or less of them: `part`.
    def body(x, y):
        (i,) = t.grid(m=t.cdiv(t.size("m"), step))
        at = t.span(i * step, part or rows)
        t.store(y, at, t.span(0, 128), tile=t.load(x, at, t.span(0, 128)))
    arrays = {"x": t.array(kind, "m n"), "y": t.array(kind, "m n")}
    return t.trace(body, arrays, name="copied")

def numbers(sizes, random):
    return {"x": random.integers(-9, 9, (sizes["m"], sizes["n"]))}

sizes = {"m": 200, "n": 128}
floats = UserKernel(copy, sizes=sizes)
whole = UserKernel(lambda rows=64, step=64, part=0: copy(rows, step, t.INT32, part), sizes=sizes,
                   inputs=numbers)

def added(step: int = 64) -> t.Program:
    def body(x, y):
        i, j = t.grid(m=t.cdiv(t.size("m"), 64), parts=t.cdiv(t.size("n"), step))
        tile = t.load(x, t.span(i * 64, 64), t.span(j * step, step))
        t.store(y, t.span(i * 64, 64), tile=t.sum_along(tile, "n"), add=True)
    return t.trace(body, {"x": t.array(t.FP32, "m n"), "y": t.array(t.FP32, "m")}, name="added")

def doubled() -> t.Program:
    # In place, and only the first half of the columns.
    def body(y):
        (i,) = t.grid(m=t.cdiv(t.size("m"), 64))
        at = t.span(i * 64, 64), t.span(0, 64)
        t.store(y, *at, tile=t.load(y, *at) * 2.0)
    return t.trace(body, {"y": t.array(t.FP32, "m n")}, name="doubled")

def nothing() -> t.Program:
    def body(x):
        t.load(x, t.span(0, 64)) * 2.0
    return t.trace(body, {"x": t.array(t.FP32, "m")}, name="nothing")

def half(arrays):
    y = arrays["y"].astype(float)
    y[:, :64] *= 2
    return {"y": y}

in_place = UserKernel(doubled, half, sizes=sizes)
sums = UserKernel(added, lambda a: {"y": a["x"].astype(float).sum(1)}, sizes=sizes)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return path


def run(name: str, **settings: object) -> CheckResult:
    config, sizes = configure(name, {key: str(value) for key, value in settings.items()})
    return checked(name, config, sizes)


@pytest.mark.parametrize("name", ["floats", "whole"])
def test_what_no_task_writes_is_found(file: Path, name: str) -> None:
    """Planted fault: a tenth of the rows, as NaN in floats and as no result in integers."""
    found = run(f"{file}:{name}", part=8)
    assert not found.passed and found.errors["y"] == np.inf
    (one,) = found.unwritten
    assert (one.array, one.count, one.size, one.first) == ("y", 168 * 128, 200 * 128, (8, 0))
    assert str(one) == "y: 21,504 of 25,600 elements are never written, the first [8, 0]"


@pytest.mark.parametrize("name", ["floats", "whole"])
def test_what_two_tasks_write_is_found_though_the_numbers_are_right(file: Path, name: str) -> None:
    """Planted fault: every task copies four rows more than its own."""
    found = run(f"{file}:{name}", rows=68)
    assert found.errors == {"y": 0.0} and not found.unwritten and not found.passed
    (one,) = found.overlaps
    assert (one.count, one.first) == (3 * 4 * 128, (64, 0))
    assert "written by more than one task (task m_tile=0 and task m_tile=1)" in str(one)


def test_sums_that_tasks_add_up_do_not_overlap(file: Path) -> None:
    found = run(f"{file}:sums")
    assert found.passed, found
    assert 0 < found.bounds["y"] < 3e-6


def test_what_is_changed_in_place_is_compared(file: Path) -> None:
    """An array that is read and written begins as numbers, and may keep some of them."""
    assert run(f"{file}:in_place").passed
    text = file.read_text().replace("y[:, :64] *= 2", "y[:, :65] *= 2")
    file.with_name("other.py").write_text(text)
    found = run(f"{file.with_name('other.py')}:in_place")
    assert found.wrong[0].count == 200 and found.wrong[0].first == (0, 64)


def test_the_command_names_what_it_found_and_fails(file: Path) -> None:
    done = CliRunner().invoke(app, ["run", f"{file}:floats", "--set", "rows=68"])
    assert isinstance(done.exception, CheckFailed)
    assert "relative error 0.00e+00" in done.output
    assert "y: 1,536 of 25,600 elements are written by more than one task" in str(done.exception)
    done = CliRunner().invoke(app, ["run", f"{file}:floats", "--set", "part=8", "--json"])
    data = json.loads(done.output)
    assert not data["passed"] and data["unwritten"][0]["first"] == [8, 0]


RIGHT = {
    "gemm": [
        {},
        {"dtype": "fp16", "out": "fp16"},
        {"out": "fp32"},
        {"dtype": "e4m3"},
        {"dtype": "e4m3", "scales": "true", "out": "fp16"},
        {"dtype": "e5m2", "promote": "true"},
        {"dual": "true", "gate": "true", "activation": "silu"},  # a few results are far larger
        {"activation": "gelu", "bias": "true", "residual": "true", "batched": "true"},
        {"m": 1, "n": 1, "k": 1},
        {"m": 5, "n": 3, "k": 4000, "out": "fp32"},
        {"k": 0},
        {"slices": 2, "in_cluster": "true", "out": "fp32"},
    ],
    "attention": [
        {},
        {"dtype": "e4m3"},
        {"dtype": "fp16", "optimistic_threshold": 8, "lse": "true"},
        {"rescale_threshold": 8, "lse": "true", "causal": "true", "split_mask_loop": "true"},
        {"window": 40, "group": 2, "rows": 70},
        {"rows": 300, "keys": 20, "causal": "true", "lse": "true"},
        {"scale": 3},
    ],
}


@pytest.mark.parametrize(
    ("name", "settings"), [(n, s) for n, rows in RIGHT.items() for s in rows], ids=str
)
def test_right_kernels_pass(name: str, settings: dict[str, object]) -> None:
    given = {key: str(value) for key, value in settings.items()}
    config, sizes = configure(name, given)
    for one in {config, select(name, given).config}:
        found = checked(name, one, sizes, seed=1)
        assert found.passed, found


def test_a_row_of_attention_that_sees_no_key_is_zero_and_nothing_else() -> None:
    """Nothing is rounded there, so that a number however small is found."""
    bounds = run("attention", rows=300, keys=20, causal="true").bounds
    assert bounds["o"] < 2.0**-6


def test_what_is_not_finite_has_its_place() -> None:
    """A number, an infinity and NaN, each in the place of each."""
    numbers = (2.0, np.inf, -np.inf, np.nan)
    want = np.array(numbers)
    for place in range(4):
        for number in numbers:
            got = want.copy()
            got[place] = number
            right = np.array_equal(got, want, equal_nan=True)
            found = check.off_by_more("y", got, want, np.full(4, 0.01), np.ones(4, bool))
            assert [one.first for one in found] == ([] if right else [(place,)])
            moved = not np.array_equal(np.isfinite(got), np.isfinite(want))
            assert check.relative_error(got, want) == (np.inf if moved else 0.0)
    want = np.array([3.0, np.inf, -4.0])
    assert check.relative_error(want + 0.5, want) == pytest.approx(0.5 * 2**0.5 / 5.0)
    assert check.relative_error(np.array([3.0, 4.0]), np.zeros(2)) == 5.0  # of nothing: as it is


def test_bounds_know_the_types() -> None:
    """An eighth for every three bits of a result; the contracted operands matter where it is fp32.

    Beside the roundoffs 2^-9, 2^-12 and 2^-25 of a number between two that are representable.
    """
    bound = {
        out: run("gemm", dtype=kind, out=out).bounds["c"]
        for kind, out in (("bf16", "bf16"), ("fp16", "fp16"), ("bf16", "fp32"))
    }
    assert 2.0**-9 < bound["bf16"] < 2.0**-7
    assert bound["fp16"] == pytest.approx(bound["bf16"] / 8, rel=0.1)
    assert 2.0**-23 < bound["fp32"] < 2.0**-17
    long = run("gemm", out="fp32", k=2000, m=64, n=64).bounds["c"]
    assert 2 < long / bound["fp32"] < 8  # about the root of 2000 / 144
    narrow = run("gemm", dtype="e4m3", out="fp32").bounds["c"]
    assert narrow > 100 * bound["fp32"]  # 14 bits of the sums


FAULTS = {
    "a scale one percent off": ("attention", {}, lambda o, _: o * 1.01),
    "one element off by 3 % of their size": (
        "gemm",
        {"m": 100},
        lambda c, _: plant(c, (50, 60), 1 + 0.03 * c.std() / c[50, 60]),
    ),
    "one element of one row of attention": (
        "attention",
        {"causal": "true"},
        lambda o, _: plant(o, (0, 1, 150, 7), 1.1),
    ),
    "a very small number where no key is seen": (
        "attention",
        {"rows": 300, "keys": 20, "causal": "true"},
        lambda o, _: np.where(o == 0, 1e-30, o),
    ),
    "one bit of an fp32 sum's upper half": (
        "gemm",
        {"out": "fp32"},
        lambda c, _: plant(c, (3, 4), 1 + 2.0**-12),
    ),
    "a sum that was rounded to bf16 on the way": (
        "gemm",
        {"out": "fp32"},
        lambda c, random: c * (1 + 2.0**-9 * random.uniform(-1, 1, c.shape)),
    ),
    "fp8 values that are doubled in one column": (
        "gemm",
        {"dtype": "e4m3"},
        lambda c, _: c * np.where(np.arange(c.shape[-1]) == 9, 1.1, 1.0),
    ),
}


def plant(values: np.ndarray, at: tuple[int, ...], factor: float) -> np.ndarray:
    changed = values.copy()
    changed[at] *= factor
    return changed


@pytest.mark.parametrize("fault", FAULTS)
def test_small_faults_fail(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, settings, change = FAULTS[fault]

    def wrong(program, arrays, *rest):
        result = interpret(program, arrays, *rest)
        out = "o" if name == "attention" else "c"
        return {**result, out: change(result[out], np.random.default_rng(0))}

    monkeypatch.setattr(check, "interpret", wrong)
    found = run(name, **settings)
    assert not found.passed, found
    with pytest.raises(CheckFailed, match=r"off by more than rounding|relative error"):
        found.require()


def test_the_check_of_a_default_is_quick() -> None:
    """The library's defaults are checked whenever one is built: few elements are computed."""
    for name in ("gemm", "attention"):
        config, sizes = configure(name, {})
        started = time.process_time()
        checked(name, config, sizes)
        assert time.process_time() - started < 5.0


def test_a_wrong_constant_in_the_emitted_code_fails() -> None:
    """Planted fault: a constant of gelu is off by 10 %. Sums have few terms, so that elements are
    where gelu is neither 0 nor its argument."""
    settings = {"activation": "gelu", "k": "8", "m": "64", "n": "64"}
    chosen, sizes = select("gemm", settings), configure("gemm", settings)[1]
    source = chosen.emitted()
    assert checked("gemm", chosen.config, sizes, source).passed
    wrong = replace(source, text=source.text.replace("f), a, -1.0f)", "f), a, -1.1f)"))
    assert wrong.text != source.text
    with pytest.raises(CheckFailed, match="off by more than rounding"):
        checked("gemm", chosen.config, sizes, wrong).require()


def test_what_cannot_be_checked_is_refused(file: Path) -> None:
    config, sizes = configure("gemm", {})
    with pytest.raises(InputError, match="does not know how long 'k' is"):
        checked("gemm", config, {name: size for name, size in sizes.items() if name != "k"})
    config, sizes = configure(f"{file}:nothing", {})
    with pytest.raises(InputError, match="stores nothing, so there is nothing to check"):
        checked(f"{file}:nothing", config, sizes)


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_on_a_gpu_gives_everything_back(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device of this test: what was taken of it is counted."""
    taken = list[object]()

    class Device:
        stream = 0

        def __init__(self) -> None:
            taken.append(self)

        def close(self) -> None:
            taken.remove(self)

    class Memory:
        def __init__(self, device: Device, values: np.ndarray, kind: object) -> None:
            assert taken[0] is device
            taken.append(self)
            self.values = values.copy()

        def numpy(self) -> np.ndarray:
            return self.values

        def free(self) -> None:
            taken.remove(self)

    def launch(memory: dict[str, Memory], scalars: object, stream: int) -> None:
        assert len(taken) == 1 + len(memory)
        if fails:
            raise DeviceError("a fault")
        memory["c"].values += 1.0

    monkeypatch.setattr(check, "CudaDevice", Device)
    monkeypatch.setattr(check, "DeviceArray", Memory)
    program = gemm(GemmConfig())
    arrays = {name: np.zeros((8, 8)) for name in "abc"}
    built = SimpleNamespace(kernel=lambda: launch)
    if fails:
        with pytest.raises(DeviceError, match="a fault"):
            check.run_on_gpu(program, built, arrays)
    else:
        assert check.run_on_gpu(program, built, arrays)["c"].sum() == 64.0
    assert not taken and not arrays["c"].any()
