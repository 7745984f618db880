"""CUDA files under the emulation: right ones pass, planted faults are found with both lines."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.emulate import FOLDER, broken, styles
from warploom.cli import app
from warploom.emulate import build
from warploom.emulate.program import CudaProgram
from warploom.errors import InputError, ToolMissing

# The first fault of a class in a file, and its report; `python -m bench.emulate` runs all.
SAMPLE = {
    "no wait for a slot": ("bulk_pipeline", "rule"),
    "slot given back early": ("bulk_pipeline", "race"),
    "store still reads": ("bulk_pipeline", "race"),
    "no fence of the proxy": ("bulk_pipeline", "proxy"),
    "bytes of a copy": ("specialised_gemm", "bytes"),
    "no fence of registers": ("tutorial_gemm", "registers"),
    "no __syncwarp": ("row_sums", "unwritten"),
    "barrier not published": ("cluster_sum", "rule"),
    "wrong count of arrivals": ("cluster_sum", "deadlock"),
}


def with_fault(file, name):
    """The text of a file with its first fault of a class."""
    return broken(file, *next(change for kind, *change in styles()[file] if kind == name))


def first_fault(program, seeds):
    """The first run that ends in a fault, or None."""
    return next((run for run in map(program.run, seeds) if run.fault is not None), None)


@pytest.mark.parametrize("name", ["bulk_pipeline", "row_sums", "cluster_sum"])
def test_right_programs_pass(name):
    program = CudaProgram.of(FOLDER / f"{name}.cu")
    assert first_fault(program, range(1, 4)) is None


@pytest.mark.parametrize("name", SAMPLE)
def test_planted_faults_are_found(name):
    file, kind = SAMPLE[name]
    text = with_fault(file, name)
    run = first_fault(CudaProgram(text, f"{file}.cu"), range(1, 21))
    assert run is not None and run.fault is not None
    assert run.fault.kind == kind
    if kind in ("race", "proxy"):
        assert sum(bool(line.places) for line in run.fault.lines) >= 2  # both sides
    shown = run.fault.shown({f"{file}.cu": text})
    for line in re.findall(rf"^  {file}\.cu:(\d+) \| (.*)$", shown, re.MULTILINE):
        assert text.splitlines()[int(line[0]) - 1].strip() == line[1]
    assert f"--seed {run.seed}" in shown


def test_registers_touched_after_the_last_fence_are_found():
    fences = [c for c in styles()["attention_rs"] if c[0] == "no fence of registers"]
    change = next(one for one in fences if "c < 4" in one[1])
    run = CudaProgram(broken("attention_rs", *change[1:]), "attention_rs.cu").run()
    assert run.fault is not None and "after its last wgmma.fence" in str(run.fault)


def test_every_fault_fits_its_file():
    for name, faults in styles().items():
        for _, before, after in faults:
            assert broken(name, before, after) != (FOLDER / f"{name}.cu").read_text()


def test_the_command_reports_replays_and_refuses(tmp_path):
    runner = CliRunner()
    file = tmp_path / "k.cu"
    file.write_text(with_fault("bulk_pipeline", "store still reads"))
    done = runner.invoke(app, ["emulate", str(file), "--seed", "3"])
    assert done.exit_code != 0 and "race: " in done.output and "replay: --seed 3" in done.output
    right = runner.invoke(app, ["emulate", str(FOLDER / "bulk_pipeline.cu"), "--seeds", "1"])
    assert right.exit_code == 0 and "no fault under seed 1" in right.output
    for words in (["--seeds", "0"], ["--set", "m=3"], ["--timeout", "0"]):
        assert isinstance(runner.invoke(app, ["emulate", str(file), *words]).exception, InputError)
    file.write_text("__global__ void k() {}\n")
    with pytest.raises(InputError, match=r"k\.cu: no main"):
        CudaProgram.of(file)
    with pytest.raises(InputError, match="cannot read"):
        CudaProgram.of(tmp_path / "nothing.cu")


def test_a_program_that_says_no_or_ends_badly_is_a_fault():
    said = CudaProgram('#include <cstdio>\nint main() { puts("12 is not 13"); return 1; }', "k.cu")
    fault = said.run().fault
    assert fault is not None and fault.kind == "result" and "12 is not 13" in str(fault)
    ended = CudaProgram("int main() { return *(volatile int*)0; }", "k.cu").run().fault
    assert ended is not None and ended.kind == "bounds"
    idle = CudaProgram("int main() { return 0; }", "k.cu").run().fault
    assert idle is not None and "launched no kernel" in str(idle)


def test_without_a_compiler_one_line_says_how_to_get_it(monkeypatch):
    build.compiler.cache_clear()
    monkeypatch.setenv("WARPLOOM_GXX", "/nowhere/g++")
    with pytest.raises(ToolMissing, match="apt install g"):
        build.compiler()
    build.compiler.cache_clear()
    assert Path(build.MODEL / "machine.cpp").is_file()
