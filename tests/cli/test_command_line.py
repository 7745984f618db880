"""What a person meets who types something wrong: one line that names it, and the exit code."""

from __future__ import annotations

import json
import lzma
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import typer

from warploom.cli import COMMANDS, EXAMPLES, app, main

MINE = """
from warploom import tile as t; from warploom.derive import tensor
from warploom.kernels import UserKernel

def good(bm: int = 64) -> t.Program:
    def body(x, w, z):
        (i,) = t.grid(m=t.cdiv(t.size("m"), bm))
        acc = t.zeros(m=bm, n=32)
        for k in t.loop(t.cdiv(t.size("k"), 16)):
            left = t.load(x, t.span(i * bm, bm), t.span(k * 16, 16))
            acc += left @ t.load(w, t.span(k * 16, 16), t.span(0, 32))
        t.store(z, t.span(i * bm, bm), t.span(0, 32), tile=acc.cast(t.BF16))
    arrays = {"x": t.array(t.BF16, "m k"), "w": t.array(t.BF16, "k n"), "z": t.array(t.BF16, "m n")}
    return t.trace(body, arrays, name="good")

def raises(): raise ValueError("inside")
def misused(): return t.trace(lambda x: t.store(x, 0, tile=x), {"x": t.array(t.FP32, "m")})
other_shape = UserKernel(good, reference=lambda arrays: {"z": arrays["x"][:1]})
no_table = UserKernel(good, reference=lambda arrays: 3)
text = UserKernel(good, reference=lambda arrays: {"z": "text"})
odd_size = UserKernel(good, sizes={"m": -3})
def named(): return t.trace(lambda x: None, {"x": t.array(t.FP32, "m")}, name="../evil")
def nothing(): return t.trace(lambda x: None, {"x": t.array(t.FP32, "m")}, name="nothing")
def scaled():
    def body(x, y):
        whole = t.load(x, t.span(0, 8)) * t.scalar("s")
        t.store(y, t.span(0, 8), tile=whole)
    return t.trace(body, {"x": t.array(t.FP32, "m"), "y": t.array(t.FP32, "m")}, name="scaled")
odd_scalar = UserKernel(scaled, scalars={"s": "x"})
def guessed(): return t.trace(lambda x: t.row_sum(x), {"x": t.array(t.FP32, "m")})
def meant(): return t.trace(lambda x: t.sillu(x), {"x": t.array(t.FP32, "m")})
alone = tensor("Q", "q d")
"""
WRONG = {
    "run": "run: Missing argument 'NAME'",
    "nonsense": "No such command 'nonsense'",
    "--zz": "No such option: --zz",
    "run gemm --seed x": "run: Invalid value for '--seed'",
    "run gemm --seed -1": "--seed -1, expected at least 0",
    "run gemm --on tpu": "--on 'tpu': expected cpu, emulated or gpu",
    "run gemm --set m=-3": "m=-3, expected a size of at least 0",
    "run gemm --set tile=1": "tile='1', expected 3 whole numbers, as 128,256",
    "run nothing": "kernel 'nothing': expected one of",
    "run none.py:x": "none.py: no such file",
    "run mine.py:raises": "mine.py:16: ValueError: inside",
    "run mine.py:misused": "mine.py:17: store of array x: load a tile of it first",
    "run mine.py:good --set bm=0": "mine.py:7: cdiv by 0",
    "run mine.py:other_shape": "the reference gives z of shape [1, 200], the program",
    "run mine.py:no_table": "the reference gives int, expected a table",
    "run mine.py:text": "the reference gives z as str, expected an array of numbers",
    "run mine.py:odd_size": "size m=-3, expected a whole number, at least 0",
    "run mine.py:odd_scalar": "scalar s='x': expected a number",
    "run mine.py:nothing": "the program stores nothing",
    "run leaves.py:x": "leaves.py does not run: it leaves Python with code 3",
    "run gemm --set m=99999999999": "tasks: the model of a launch counts at",
    "run gemm --set slices=3": "does not know how long 'slices' is",
    "run attention --set packed=true": "a run does not know how long",
    "build gemm": "build: Missing option '-o'",
    "build gemm -o mine.py": "mine.py: is a file, expected a folder",
    "build gemm -o mine.py/out": "mine.py/out: cannot be made: ",
    "build gemm -o /proc/out": "/proc/out: cannot write to /proc: ",
    "build mine.py:nothing -o out": "nothing stores nothing: there is nothing to build",
    "build mine.py:named -o out": "program str '../evil': expected a name",
    "build gemm -o out --gpu b200": "code is emitted for h100, h200, a100",
    "build mine.py:scaled -o out --print-after all": "has no matmul, so it has no block program",
    "build gemm -o out --print-after none": "--print-after 'none': expected all, scheduled",
    "build gemm -o out --invariant q": "--invariant q: no dimension of the kernel",
    "build mine.py:good -o out --invariant k": "not proved: z (store.5) depends on how many k",
    "build gemm -o out --allow all": "allow 'all': expected some of spills, stack",
    "build gemm -o out --schedule none.json": "cannot read none.json",
    "build gemm -o out --schedule bad.json": "bad.json: not JSON",
    "build gemm -o out --gpu a100 --schedule solve": "schedule 'solve' is for Hopper",
    "build mine.py:good -o out --set bm=16": "16 rows in a group, expected a multiple of 64",
    "run mine": "mine.py has mine.py:odd_scalar, mine.py:guessed, mine.py:meant, mine.py:alone",
    "run mine.py:guessed": "no attribute 'row_sum'; nearest: sum_along",
    "run mine.py:meant": "no attribute 'sillu'; nearest: silu",
    "derive mine.py": "that gives one; mine.py has",
    "derive mine.py:alone": "mine.py:alone is an array, expected a formula of arrays",
    "derive nothing": "no formula 'nothing'",
    "derive attention --set q=99999999999": "expected at most that",
    "schedule none.json": "cannot read none.json",
    "schedule attention --json .": "cannot write .: it is a directory",
    "variants recurrent": "'recurrent' has no table of variants: expected gemm or attention",
    "sass show mine.py": "mine.py is not a cubin",
    "sass verify mine.py mine.py --alias zz": "sass verify: Invalid value for '--alias'",
    "tune none.cubin -o out": "cannot read none.cubin",
    "optimize gemm -o mine.py": "is a file, expected a folder",
    "optimize mine.py:raises -o out": "ValueError: inside",
}


def called(command: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run a command line in this process and give its exit code."""
    monkeypatch.setattr(sys, "argv", ["warploom", *command.split()])
    with pytest.raises(SystemExit) as left:
        main()
    return int(left.value.code or 0)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "leaves.py").write_text("raise SystemExit(3)")
    return tmp_path


@pytest.mark.parametrize("command", WRONG)
def test_a_wrong_command_is_one_line_and_leaves_nothing(
    command: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path for path in here.rglob("*") if "__pycache__" not in path.parts}
    assert called(command, monkeypatch) == 2
    out, err = capsys.readouterr()
    assert WRONG[command] in err
    assert err.startswith("warploom: ") and err.count("\n") == 1 and not out
    assert {path for path in here.rglob("*") if "__pycache__" not in path.parts} == before


CORPUS = Path(__file__).parents[1] / "corpus" / "prebuilt"
NO_TUNES = {
    "--resume": "out holds no earlier search",
    "--search ppo --resume": "out holds no earlier search",
    "--search ppo --policy none.pt": "none.pt: there is no checkpoint",
    "--search ppo --policy bad.json": "bad.json: not a checkpoint",
    "--search ppo --policy .": ".: not a checkpoint",
}


@pytest.mark.parametrize("options", NO_TUNES)
def test_a_search_that_cannot_begin_writes_and_takes_away_nothing(
    options: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if "ppo" in options:
        pytest.importorskip("sb3_contrib")
    packed = next(CORPUS.glob("skinny_gemm*.xz")).read_bytes()
    (here / "some.cubin").write_bytes(lzma.decompress(packed))
    kept = here / "other" / "ppo" / "checkpoint.pt"
    kept.parent.mkdir(parents=True)
    kept.write_text("of an earlier search")
    for out in ("out", "other") if "resume" not in options else ("out",):
        assert called(f"tune some.cubin -o {out} --measure model {options}", monkeypatch) == 2
        assert NO_TUNES[options] in capsys.readouterr().err
    assert not (here / "out").exists()
    assert [path for path in (here / "other").rglob("*") if path.is_file()] == [kept]


@pytest.mark.parametrize("command", ["", "sass"])
def test_a_command_without_arguments_prints_its_help(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    called(command, monkeypatch)
    out, err = capsys.readouterr()
    assert "Commands" in out + err


def test_version_and_help_end_with_0(monkeypatch: pytest.MonkeyPatch) -> None:
    assert called("--version", monkeypatch) == called("run --help", monkeypatch) == 0


def test_the_same_program_is_built_for_an_older_gpu(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert called("build mine.py:good -o out --gpu a100", monkeypatch) == 0
    assert "cp.async" in (here / "out" / "good.cu").read_text()


def test_a_build_prints_the_block_program_after_a_pass_and_goes_on(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "build mine.py:good -o out --gpu a100 --print-after joins --invariant m"
    assert called(command, monkeypatch) == 0
    out, err = capsys.readouterr()
    assert "good for a100" in out and (here / "out" / "good.cubin").exists()
    head, _, text = err[err.index("# after") :].partition("\n")
    assert head == "# after joins" and text.startswith("block program good, schedule ")
    assert "Join <= 0: acc" in text and text.count("block program") == 1
    bits = json.loads((here / "out" / "manifest.json").read_text())["bits"]
    assert bits["independent"]["m"] == "" and bits["results"][0]["elements"][1] == "x[m, every k]"


def test_a_folder_that_cannot_be_written_to_is_refused_before_any_work(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun: list[str] = []
    monkeypatch.setattr("warploom.cli.build.select", lambda *given: begun.append("select"))
    assert called("build gemm -o mine.py/out --schedule solve", monkeypatch) == 2
    assert not begun and "is a file, expected a folder" in capsys.readouterr().err


def test_a_build_goes_on_without_a_cache_it_cannot_write_to(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WARPLOOM_CACHE", str(here / "bad.json"))
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # as Python has it; pytest collects them all
        assert called("build mine.py:good -o out", monkeypatch) == 0
    assert (here / "out" / "manifest.json").exists()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warploom: nothing is kept in the cache {here / 'bad.json'}: ")
    assert "set WARPLOOM_CACHE" in line


def test_an_older_gpu_gets_a_tile_that_it_holds(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert called("build attention -o out --gpu a100", monkeypatch) == 0
    err = capsys.readouterr().err
    assert err.startswith("tile 128,128: attention spills ") and err.count("\n") == 1
    assert (here / "out" / "attention.cubin").is_file()
    assert called("build attention -o out --gpu a100 --set tile=128,128", monkeypatch) == 1
    assert "its 384 threads have 168 each on sm_80" in capsys.readouterr().err


def test_ctrl_c_is_one_line_and_leaves_no_half_written_kernel(here: Path) -> None:
    command = "from warploom.cli import main; print('in', flush=True); main()"
    arguments = "build attention -o out --schedule solve --set tile=192,128".split()
    environment = {**os.environ, "WARPLOOM_CACHE": str(here / "cache"), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", command, *arguments],
        cwd=here, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as running:  # fmt: skip
        assert running.stdout is not None and running.stdout.readline() == "in\n"
        time.sleep(1.0)  # any moment of tracing, solving or compiling will do
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=60)
    assert running.returncode == 130, err
    assert err.splitlines()[-1] == "warploom: interrupted"
    assert not (here / "out").exists() or (here / "out" / "manifest.json").exists()


@pytest.mark.parametrize("name", COMMANDS)
def test_help_names_what_is_taken_and_its_example_can_be_typed(name: str) -> None:
    """No Python type is printed; the example has the command's arguments and options."""
    with_options: Any = typer.main.get_command(app).get_command(None, name)
    for command in getattr(with_options, "commands", {name: with_options}).values():
        context = command.make_context(command.name, ["--help"], resilient_parsing=True)
        told = command.get_help(context)
        assert not re.search(r"<[a-z]|[{}]", told), told
        assert f"Usage: {command.name} [OPTIONS]" in told
    if name in EXAMPLES:
        words = EXAMPLES[name].split()
        assert words[:2] == ["warploom", name]
        with_options.make_context(name, words[2:])


@pytest.mark.parametrize("command", ["-h", "run -h", "sass -h", "sass show -h"])
def test_the_short_option_helps_too(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert called(command, monkeypatch) == 0
    short = capsys.readouterr().out
    assert called(command.replace("-h", "--help"), monkeypatch) == 0
    assert short == capsys.readouterr().out and "-h, --help" in short


def test_judge_explains_itself_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.argv = ['warploom', 'judge', '--help']; "
        "from warploom.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--against FILE.py" in done.stdout


def test_help_imports_no_floor() -> None:
    """A command's floor is imported when the command is named; every name has its command."""
    code = (
        "import sys, warploom.cli as c; heavy = {'numpy', 'ortools', 'warploom.tile'}; "
        "assert not heavy & set(sys.modules), heavy & set(sys.modules); "
        "group = c.typer.main.get_command(c.app); "
        "assert all(group.get_command(None, name).name == name for name in c.COMMANDS); "
        "assert group.get_command(None, 'nonsense') is None; "
        "assert 'warploom.tile' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
