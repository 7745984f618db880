"""The commands as functions: objects of a running Python take the same way as files."""

import doctest
import importlib
import inspect
import subprocess
import sys

import pytest

import warploom
from bench.emulate import broken, styles
from warploom import tile as t
from warploom.emulate.report import Fault
from warploom.engine.search import SECONDS
from warploom.errors import InputError
from warploom.flows import notebook
from warploom.kernels import UserKernel

SIZES = {"m": 130, "n": 72, "k": 136}


def scaled(tile_m: int = t.tunable(64, 128), tile_n: int = 64, factor: float = 2.0) -> t.Program:
    """c = factor a b: what a cell of a notebook might hold."""

    def body(a, b, c):
        i, j = t.grid(m=t.cdiv(t.size("m"), tile_m), n=t.cdiv(t.size("n"), tile_n))
        rows, cols = t.span(i * tile_m, tile_m), t.span(j * tile_n, tile_n)
        total = t.zeros(m=tile_m, n=tile_n)
        for step in t.loop(t.cdiv(t.size("k"), 64)):
            part = t.span(step * 64, 64)
            total += t.load(a, rows, part) @ t.load(b, part, cols)
        t.store(c, rows, cols, tile=(total * factor).cast(t.BF16))

    dims = {"a": "m k", "b": "k n", "c": "m n"}
    return t.trace(body, {name: t.array(t.BF16, text) for name, text in dims.items()}, name="mine")


kernel = UserKernel(scaled, lambda arrays: {"c": 2.0 * arrays["a"] @ arrays["b"]}, SIZES)


@pytest.mark.parametrize("given", [scaled, scaled(), kernel, "gemm"], ids=range(4))
def test_a_kernel_is_a_name_or_an_object(given) -> None:
    found = warploom.run(given, SIZES)
    assert found.passed and found.sizes == SIZES
    assert found._repr_html_().startswith("<pre>pass: ")


def test_settings_reach_an_object_and_wrong_numbers_are_seen() -> None:
    assert not warploom.run(kernel, {**SIZES, "factor": 3.0}).passed
    with pytest.raises(InputError, match="no setting 'tile_k'"):
        warploom.run(scaled, {"tile_k": 64})
    with pytest.raises(InputError, match="expected cpu, emulated or gpu"):
        warploom.run(scaled, on="tpu")


def test_an_object_is_searched_in_workers_that_cannot_load_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("WARPLOOM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("warploom.engine.search.os.cpu_count", lambda: 1)
    monkeypatch.setitem(SECONDS, "quick", 3.0)  # the first point, in time for a test
    told: list[str] = []
    found = warploom.optimize(
        kernel, {**SIZES, "tile_m": 128}, out=tmp_path / "out", say=told.append, effort="quick"
    )
    assert found.check.judge == "the reference given" and (tmp_path / "out/report.html").is_file()
    assert found.chosen.launch and any("predicted" in line for line in told)
    html = found._repr_html_()
    assert html.count("<td>built</td>") == 1 and "us predicted" in html
    assert found.selected.program.name in found.selected.program._repr_html_()


def test_what_is_built_is_written_where_asked(tmp_path) -> None:
    folder = tmp_path / "built"
    built = warploom.build(scaled, {"tile_m": 64}, schedule="multistage", out=folder)
    assert (folder / "mine.cubin").read_bytes() == built.cubin
    assert "registers a thread" in built._repr_html_()
    told: list[str] = []
    tuned = warploom.tune(folder, tmp_path / "tuned", say=told.append, seconds=30.0, candidates=3)
    assert 3 <= tuned.search.scored < 9 and tuned.verdict.legal
    assert told == ["writing the result"]


def test_an_object_is_not_measured_where_it_cannot_be_loaded(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("warploom.flows.optimize.gpu_here", lambda: True)
    with pytest.raises(InputError, match="measure='none'"):
        warploom.optimize(scaled, SIZES, out=tmp_path)


def test_the_front_door_lists_what_it_has_and_rooms_are_called() -> None:
    pytest.importorskip("torch")  # judging needs it
    names = "build derive emulate judge kernel optimize run schedule tune".split()
    assert set(names) <= set(dir(warploom))
    for name in names:
        assert callable(getattr(warploom, name)), name
    for name in ("derive", "emulate", "judge", "schedule"):
        command = getattr(notebook, name)
        assert inspect.signature(getattr(warploom, name)) == inspect.signature(command)
        assert f"warploom.{name}(" in command.__doc__
    assert importlib.import_module("warploom.judge").Problem is warploom.judge.Problem
    with pytest.raises(AttributeError, match="no attribute 'derives'"):
        warploom.derives  # noqa: B018


def test_the_package_is_imported_without_its_floors() -> None:
    code = "import sys, warploom; print([x for x in sys.modules if x.startswith('warploom.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["build", "derive", "emulate", "judge", "run", "schedule"])
def test_the_example_of_a_docstring_runs(name) -> None:
    if name == "judge":
        pytest.importorskip("torch")
    command = getattr(notebook, name)
    (found,) = doctest.DocTestFinder(recurse=False).find(command, name)
    assert found.examples and doctest.DocTestRunner().run(found).failed == 0


def test_results_are_short_where_python_shows_them() -> None:
    built, found = warploom.build("gemm"), warploom.emulate("gemm", SIZES, seeds=1)
    solved = warploom.schedule("gemm")
    assert len(repr(built)) < 200 and "registers" in repr(built)
    assert repr(scaled()) == str(scaled())
    assert found.require() is found and "no fault under seed 1" in found._repr_html_()
    assert "data:image/svg" in solved._repr_html_() and "II " in repr(solved)


def test_a_fault_is_a_result_with_its_lines(tmp_path) -> None:
    change = next(change for kind, *change in styles()["row_sums"] if kind == "no __syncwarp")
    file = tmp_path / "sums.cu"
    file.write_text(broken("row_sums", *change))
    found = warploom.emulate(file, seeds=20)
    assert not found.passed and "sums.cu:" in found._repr_html_() and "--seed" in str(found)
    with pytest.raises(Fault, match="unwritten"):
        found.require()
    with pytest.raises(InputError, match="has its own sizes"):
        warploom.emulate(file, {"m": 8})
