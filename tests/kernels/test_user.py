"""A user's own program by `FILE.py:OBJECT`: run, judged, built; and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from warploom import tile as t
from warploom.cli import app
from warploom.errors import InputError
from warploom.kernels.check import checked
from warploom.kernels.library import configure, entry
from warploom.tile.widen import widened

ROOT = Path(__file__).parents[2]
EXAMPLE = f"{ROOT}/examples/tile_rmsnorm_linear.py:kernel"
SOURCE = """
from warploom import tile as t
from warploom.kernels import UserKernel

def program(block: int = 64, doubled: bool = False) -> t.Program:
    def body(x, y):
        (i,) = t.grid(m=t.cdiv(t.size("m"), block))
        rows, cols = t.span(i * block, block), t.span(0, 256)
        tile = t.load(x, rows, cols).cast(t.FP32)
        tile = tile / (t.sum_along(t.abs(tile) if hasattr(t, "abs") else tile * tile, "n") + 1.0)
        t.store(y, rows, cols, tile=(tile * 2.0 if doubled else tile).cast(t.BF16))
    return t.trace(body, {"x": t.array(t.BF16, "m n"), "y": t.array(t.BF16, "m n")}, name="norm")

wrong = UserKernel(program, reference=lambda arrays: {"y": arrays["x"]}, sizes={"n": 256})
silent = UserKernel(program, reference=lambda arrays: {}, sizes={"n": 256})
right = UserKernel(program, sizes={"n": 256})
number = 7

def no_default(block) -> t.Program: ...
def nothing() -> None: ...
def copy(offset: int = 0) -> t.Program:
    def body(p, y):
        (i,) = t.grid(m=t.size("m"))
        t.store(y, i, t.span(0, 16), tile=t.load(p, i, t.span(0, 16)))
    return t.trace(body, {"p": t.array(t.INT32, "m n"), "y": t.array(t.INT32, "m n")}, name="copy")
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return path


def errors(name: str, **settings: str) -> dict[str, float]:
    config, sizes = configure(name, settings)
    return checked(name, config, sizes).errors


def test_a_program_is_judged_by_its_own_float64_meaning(file: Path) -> None:
    found = errors(f"{file}:right", m="130")
    assert 1e-4 < found["y"] < 5e-3  # bf16 rounding, no more and no less


def test_settings_reach_the_function(file: Path) -> None:
    config, sizes = configure(f"{file}:right", {"block": "128", "doubled": "true", "m": "64"})
    assert config == {"block": 128, "doubled": True}
    assert sizes == {"m": 64, "n": 256}


def test_the_reference_judges_when_there_is_one(file: Path) -> None:
    """Planted fault: a program that is not what its reference says."""
    assert errors(f"{file}:wrong")["y"] > 0.5
    assert entry(EXAMPLE).judge == "the reference given"
    assert errors(EXAMPLE)["y"] < 4e-3


def test_the_command_says_wrong_numbers(file: Path) -> None:
    done = CliRunner().invoke(app, ["run", f"{file}:wrong"])
    assert done.exit_code != 0
    assert CliRunner().invoke(app, ["run", f"{file}:right"]).exit_code == 0


def test_widened_keeps_what_is_not_floating(file: Path) -> None:
    program = entry(f"{file}:copy").program({})
    assert str(widened(program)) == str(program)
    config, _ = configure(EXAMPLE, {})
    exact = widened(entry(EXAMPLE).program(config))
    assert {array.dtype.name for array in exact.arrays} == {"fp64"}
    arrays = {
        "x": np.random.default_rng(0).normal(size=(70, 72)),
        "w": np.random.default_rng(1).normal(size=(72, 40)),
        "y": np.full((70, 40), np.nan),
    }
    got = t.interpret(exact, arrays)["y"]
    want = arrays["x"] @ arrays["w"]
    want /= np.sqrt((arrays["x"] ** 2).mean(1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(got, want, rtol=1e-12)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("missing", {}, "has no object called 'missing'"),
        ("number", {}, "expected a tile Program"),
        ("no_default", {}, "parameter block needs a default"),
        ("nothing", {}, "gives NoneType, expected a warploom.tile.Program"),
        ("right", {"blok": "64"}, "no setting 'blok'"),
        ("right", {"block": "x"}, "expected a whole number"),
    ],
)
def test_refusals_name_what_was_expected(
    file: Path, name: str, settings: dict[str, str], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        configure(f"{file}:{name}", settings)


def test_integers_need_inputs_and_references_need_outputs(file: Path) -> None:
    with pytest.raises(InputError, match="array p is not floating"):
        errors(f"{file}:copy", n="16")
    with pytest.raises(InputError, match="gives no array 'y'"):
        errors(f"{file}:silent")


def test_a_file_that_does_not_run_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0\n")
    with pytest.raises(InputError, match=r"does not run: .*broken.py:1: ZeroDivisionError"):
        entry(f"{broken}:x")
    with pytest.raises(InputError, match="no such file"):
        entry(f"{tmp_path}/none.py:x")


@pytest.mark.parametrize("command", [["run"], ["build", "-o", "out"]])
def test_a_file_is_run_once_and_again_when_it_changed(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file may take long to run, or count."""
    path, count = tmp_path / "counted.py", tmp_path / "count"
    path.write_text(f"{SOURCE}\nwith open({str(count)!r}, 'a') as f:\n    f.write('x')\n")
    monkeypatch.chdir(tmp_path)
    for times in (1, 2):
        done = CliRunner().invoke(app, [command[0], f"{path}:right", *command[1:]])
        assert done.exit_code == 0, done.exception
        assert count.read_text() == "x" * times
        path.write_text(path.read_text() + f"changed = {times}\n")


def test_both_kinds_of_program_are_built(file: Path, tmp_path: Path) -> None:
    """One with a matmul gets warp groups, one without is laid over threads."""
    for name in (EXAMPLE, f"{file}:right"):
        done = CliRunner().invoke(app, ["build", name, "-o", str(tmp_path / "out")])
        assert done.exit_code == 0, done.output
    done = CliRunner().invoke(
        app, ["build", f"{file}:right", "-o", str(tmp_path / "no"), "--schedule", "solve"]
    )
    assert done.exit_code != 0
    assert "no matrix product" in str(done.exception)


def test_a_scheduled_program_can_be_given_back(file: Path, tmp_path: Path) -> None:
    """The schedule.json of a build is a schedule of a build, for threads too."""
    out = tmp_path / "out"
    CliRunner().invoke(app, ["build", f"{file}:right", "-o", str(out)])
    again = ["build", f"{file}:right", "-o", str(tmp_path / "two"), "--schedule"]
    done = CliRunner().invoke(app, [*again, str(out / "schedule.json")])
    assert done.exit_code == 0, done.exception
    # `norm` is a function of CUDA's headers, so the kernel has another name.
    first, second = (folder / "norm_kernel.cu" for folder in (out, tmp_path / "two"))
    assert first.read_text() == second.read_text()


def test_a_package_that_is_missing_is_told_with_its_extra(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("raise ModuleNotFoundError('none', name='triton')\n")
    with pytest.raises(InputError, match=r"mine.py:1: .*none; .*pip install 'warploom\[triton\]'"):
        configure(f"{tmp_path}/mine.py:kernel", {})
