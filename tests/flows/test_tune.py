"""`warploom tune` end to end under the model, and its bad inputs."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.fake_device import image, open_fake, workload
from typer.testing import CliRunner

from warploom.cli import app
from warploom.cli.tune import parse_duration
from warploom.errors import InputError
from warploom.flows.targets import read_target
from warploom.flows.tune import tune
from warploom.flows.tune_compare import fastest
from warploom.flows.tune_keep import Keeper
from warploom.flows.tuned import TuneSettings
from warploom.integrations.deploy import FolderStore, content_key
from warploom.runtime import LocalMeasurer
from warploom.sass.decode.cubin import load
from warploom.sass.flow.aliasing import AliasMode
from warploom.sass.rules.verify import verify
from warploom.search.game import Game

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "tune_gemm_leaky_relu.py"


@pytest.fixture(scope="module")
def small() -> Path:
    """A small real cubin of the corpus."""
    folder = ROOT / "build" / "corpus"
    spec = importlib.util.spec_from_file_location(
        "warploom_corpus_builder", ROOT / "tests" / "corpus" / "build.py"
    )
    assert spec is not None and spec.loader is not None
    module = sys.modules.get(spec.name)
    if module is None:
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    module.build_corpus()
    return folder / "triton_softmax_1x4096_w8_s1_sm90.cubin"


def _run(arguments: list[str]) -> Any:
    return CliRunner().invoke(app, arguments)


def test_a_search_leaves_a_legal_deployable_cubin(small: Path, tmp_path: Path) -> None:
    target = read_target(str(small), None, None)
    report = tune(target, TuneSettings("greedy", "model", 60.0, candidates=150), tmp_path)
    assert report.changed and report.speedup > 1.0
    original, tuned = load(tmp_path / "original.cubin"), load(tmp_path / "tuned.cubin")
    assert original.data == small.read_bytes()
    verdict = verify(original, tuned, mode=AliasMode.TRITON)
    assert verdict.legal and verdict.moved + verdict.control_edits > 0
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["result"]["speedup_is"] == "modelled, not measured"
    assert manifest["result"]["timing_verdict"] == "not measured"
    store = FolderStore(tmp_path / "store")
    assert store.lookup(content_key(original.data)) == tuned.data
    assert "moved" in (tmp_path / "diff.txt").read_text()
    assert (tmp_path / "diff.html").read_text().lstrip().startswith("<!")


def test_the_same_seed_gives_the_same_cubin(small: Path, tmp_path: Path) -> None:
    target = read_target(str(small), None, None)
    settings = TuneSettings("anneal", "model", 60.0, candidates=40, seed=7)
    first = tune(target, settings, tmp_path / "a").cubin.data
    assert tune(target, settings, tmp_path / "b").cubin.data == first


def test_resume_goes_on_from_the_best(small: Path, tmp_path: Path) -> None:
    target = read_target(str(small), None, None)
    first = tune(target, TuneSettings("greedy", "model", 60.0, candidates=80), tmp_path)
    again = TuneSettings("greedy", "model", 60.0, candidates=40, seed=1, resume=True)
    assert tune(target, again, tmp_path).speedup >= first.speedup


def test_the_same_kernel_goes_on_unasked_and_never_loses(small: Path, tmp_path: Path) -> None:
    target = read_target(str(small), None, None)
    first = tune(target, TuneSettings("greedy", "model", 60.0, candidates=80), tmp_path)
    best = (tmp_path / "best.cubin").read_bytes()
    told: list[str] = []
    # Another seed and one candidate: begun anew, this would end far below.
    short = TuneSettings("random", "model", 60.0, candidates=1, seed=3)
    again = tune(target, short, tmp_path, say=told.append)
    assert again.speedup == pytest.approx(first.speedup) and again.cubin.data == first.cubin.data
    assert (tmp_path / "best.cubin").read_bytes() == best
    assert any("holds a search of this kernel that reached" in line for line in told)


def test_a_folder_that_is_not_the_kernels_own_is_left_as_it_is(small: Path, tmp_path: Path) -> None:
    """Another kernel's search, and a built kernel, whose manifest.json would be written over."""
    short = TuneSettings("greedy", "model", 60.0, candidates=20)
    tune(read_target(str(small), None, None), short, tmp_path / "tuned")
    (tmp_path / "built").mkdir()
    (tmp_path / "built" / "manifest.json").write_text('{"schema": "warploom.kernel"}')
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    other = read_target(str(small.parent / "triton_rmsnorm_2x4096_w8_s2_sm90.cubin"), None, None)
    with pytest.raises(InputError, match="holds the search of another kernel, softmax"):
        tune(other, short, tmp_path / "tuned")
    with pytest.raises(InputError, match=r"holds manifest\.json and no search to go on from"):
        tune(other, short, tmp_path / "built")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_what_is_no_order_of_the_kernel_is_not_gone_on_from(tmp_path: Path) -> None:
    cubin = ROOT / "build" / "corpus" / "triton_rmsnorm_2x4096_w8_s2_sm90.cubin"
    target = read_target(str(cubin), None, None)
    settings = TuneSettings("greedy", "model", 2.0, candidates=2)
    keeper = Keeper(target, settings, tmp_path)
    keeper.begin()
    keeper.keep(Game(target.cubin, target.kernel).current(), 1.5)
    text = target.cubin.kernel(target.kernel).text
    damaged = bytearray(target.cubin.data)
    damaged[text.offset + 20] ^= 1  # an operand of the second instruction
    (tmp_path / "best.cubin").write_bytes(damaged)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match="with other --moves or --alias found it"):
        tune(target, settings, tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_where_the_result_goes_is_looked_at_before_any_work(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    slow = tmp_path / "slow.py"
    slow.write_text("raise AssertionError('the target was run')")
    for out, message in ((file, "is a file, expected a folder"), (file / "in", "cannot be made")):
        result = _run(["tune", f"{slow}:kernel", "-o", str(out)])
        assert isinstance(result.exception, InputError)
        assert f"-o {out}: {message}" in str(result.exception)
    _run(["tune", f"{slow}:kernel", "-o", str(tmp_path / "a" / "b")])
    assert not (tmp_path / "a").exists() and file.read_text() == "mine"


NEVER_FASTER = (
    "from warploom.search.evaluate import ModelEvaluator as E; "
    "E.cycles = lambda self, candidate: 2 * self.original_cycles; "
)
MAIN = "from warploom.cli import main; main()"


def _started(code: str, arguments: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, "tune", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _wait_for(there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_ctrl_c_before_any_gain_can_be_resumed(small: Path, tmp_path: Path) -> None:
    arguments = [str(small), "-o", str(tmp_path / "out"), "--measure", "model"]
    arguments += ["--search", "greedy"]  # which scores at once where no step is faster
    with _started(NEVER_FASTER + MAIN, [*arguments, "--budget", "600s"]) as running:
        assert running.stderr is not None
        while "of 600 s" not in running.stderr.readline():
            pass  # the first line of progress: the search has begun
        time.sleep(0.3)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=60)
    assert running.returncode == 0, err
    assert "interrupted: the best so far was kept, the same command goes on" in out
    assert "no win" in out and not (tmp_path / "out" / "best.cubin").exists()
    again = _run(["tune", *arguments, "--resume", "--candidates", "30"])
    assert again.exit_code == 0, again.output
    assert "speed-up: 1." in again.output


def test_a_killed_search_leaves_its_best_and_is_gone_on_from(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = [str(small), "-o", str(out), "--measure", "model", "--search", "greedy"]
    with _started(MAIN, [*arguments, "--budget", "600s"]) as running:
        _wait_for(lambda: (out / "progress.json").exists() and _speedup(out) > 1.0)
        running.kill()
        running.communicate()
    reached = _speedup(out)
    assert verify(load(small), load(out / "best.cubin")).legal
    again = _run(["tune", *arguments, "--candidates", "10"])
    assert again.exit_code == 0, again.output
    assert f"reached {reached:.4f}x modelled: going on" in again.output
    assert json.loads((out / "manifest.json").read_text())["result"]["speedup"] >= reached - 1e-5


def _speedup(folder: Path) -> float:
    return json.loads((folder / "progress.json").read_text())["speedup"]


def test_a_folder_of_another_kernel_is_not_resumed(small: Path, tmp_path: Path) -> None:
    target = read_target(str(small), None, None)
    tune(target, TuneSettings("greedy", "model", 60.0, candidates=30), tmp_path)
    other = small.parent / "triton_rmsnorm_2x4096_w8_s2_sm90.cubin"
    settings = TuneSettings("greedy", "model", 60.0, candidates=10, resume=True)
    with pytest.raises(InputError, match="another kernel"):
        tune(read_target(str(other), None, None), settings, tmp_path)


def test_the_example_is_a_target() -> None:
    target = read_target(f"{EXAMPLE}:kernel", None, None, arch=80)
    assert target.cubin.sm == 80 and target.launch is not None
    assert target.launch.block == (256, 1, 1)


# Each object is something that a user hands to `tune`, and what the one line must say.
USER_FILE = """
import triton
import triton.language as tl
from warploom.integrations.triton import ScalarArgument, TensorArgument, capture

@triton.jit
def add(x, y, n, block: tl.constexpr):
    i = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(y + i, tl.load(x + i, mask=i < n) + 1, mask=i < n)

@triton.autotune(configs=[triton.Config({"block": 1024})], key=["n"])
@triton.jit
def auto(x, y, n, block: tl.constexpr):
    tl.store(y, tl.load(x))

@triton.jit
def undefined(x, y, n, block: tl.constexpr):
    tl.store(y, tl.load(x) + nowhere)

@triton.jit
def odd(x, y, n, block: tl.constexpr):
    tl.store(y + tl.arange(0, 3), 0.0)

X, Y = TensorArgument("fp32", (4096,)), TensorArgument("fp32", (4096,), "out")
N = ScalarArgument("i32", 4096)

def made(kernel=add, x=X, n=N, grid=(4, 1, 1), **options):
    fixed = {"block": 1024}
    return capture(kernel, {"x": x, "y": Y, "n": n}, grid=grid, constexprs=fixed, **options)

def no_name(): return made(undefined)
def three(): return made(odd)
def warps(): return made(num_warps=3)
def option(): return made(options={"num_wraps": 8})
def pair(): return made(x=("fp32", (4096,)))
def dtype(): return made(x=TensorArgument("float32", (4096,)))
def shape(): return made(x=TensorArgument("fp32", 4096))
def role(): return made(x=TensorArgument("fp32", (4096,), "input"))
def value(): return made(n=ScalarArgument("i32", None))
def grid(): return made(grid=(4,))
def a_list(): return capture(add, [X, Y, N], grid=(4, 1, 1))
def needs(x, y): return made()
def fails(): return {}["nothing"]
def leaves(): raise SystemExit(3)

from warploom import kernel, tile as t

@kernel(x="n", y="n")
def tiles(x, y): t.store(y, t.span(0, 8), tile=t.load(x, t.span(0, 8)))
"""
USER_MISTAKES = {
    "add": "is a Triton kernel, and how it is launched is not known; name a function that returns",
    "auto": "is a Triton kernel, and how it is launched is not known",
    "no_name": "does not compile undefined for sm_90: line 2 of it: NameError('nowhere is not",
    "three": "does not compile odd for sm_90: line 2 of it: arange's range must be a power of 2",
    "warps": "does not compile add for sm_90: num_warps must be a power of 2",
    "option": "add: 'num_wraps' is no parameter of it and no Triton option",
    "pair": "argument 'x' is tuple ('fp32', (4096,)), expected TensorArgument(dtype, shape)",
    "dtype": "argument 'x': dtype 'float32', expected 'fp32'",
    "shape": "argument 'x': shape 4096, expected a tuple of integers",
    "role": "buffer x: role 'input', expected in, out or inout",
    "value": "argument 'n': value None, expected a number",
    "grid": "add: grid (4,), expected three positive integers (x, y, z)",
    "a_list": "add: arguments are list, expected a dictionary",
    "needs": "needs needs x, y; expected a function that is called without arguments",
    "fails": "fails does not run: ",
    "leaves": "leaves does not run: it leaves Python with code 3",
    "tiles": "tiles is a tile program; what `warploom build ",
}


@pytest.fixture(scope="module")
def mistakes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's file with every mistake in it."""
    file = tmp_path_factory.mktemp("mistakes") / "mistakes.py"
    file.write_text(USER_FILE)
    return file


@pytest.mark.parametrize(("name", "message"), USER_MISTAKES.items())
def test_a_mistake_in_a_users_file_is_one_clear_line(
    name: str, message: str, mistakes: Path, tmp_path: Path
) -> None:
    result = _run(["tune", f"{mistakes}:{name}", "-o", str(tmp_path / "out"), "--measure", "model"])
    assert isinstance(result.exception, InputError), result.exception
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)


LAUNCH = {
    "schema": 1,
    "kernel": "softmax_kernel",
    "grid": [1, 1, 1],
    "block": [32, 1, 1],
    "cluster": [1, 1, 1],
    "buffers": [],
    "arguments": [],
}


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        ([], "expected a JSON object, a launch description"),
        ({"launch": None}, "not a launch description (expected a JSON object)"),
        ({**LAUNCH, "schema": 7}, "launch spec has schema 7, expected 1"),
        ({**LAUNCH, "buffers": [3]}, "launch spec is malformed"),
        ({**LAUNCH, "arguments": [3]}, "launch spec is malformed"),
        ({**LAUNCH, "kernel": "other"}, "launches other, not "),
    ],
)
def test_a_wrong_launch_file_is_one_clear_line(
    launch: Any, message: str, small: Path, tmp_path: Path
) -> None:
    file = tmp_path / "launch.json"
    file.write_text(json.dumps(launch))
    with pytest.raises(InputError) as caught:
        read_target(str(small), None, file)
    assert message in str(caught.value) and "launch.json" in str(caught.value)


BAD = [
    (["tune", "nothing.cubin", "-o", "{out}"], "nothing.cubin"),
    (["tune", "nothing", "-o", "{out}"], "expected FILE.cubin, a build folder or file.py:object"),
    (["tune", "{cubin}", "-o", "{out}", "--search", "luck"], "expected one of random"),
    (["tune", "{cubin}", "-o", "{out}", "--budget", "soon"], "expected a time such as"),
    (["tune", "{cubin}", "-o", "{out}", "--samples", "-1"], "--samples -1, expected 0 or more"),
    (
        ["tune", "{cubin}", "-o", "{out}", "--candidates", "0"],
        "--candidates 0, expected at least 1",
    ),
    (["tune", "{cubin}", "-o", "{out}", "--kernel", "other"], "has no kernel 'other'"),
    (["tune", "{cubin}", "-o", "{out}", "--measure", "gpu"], "needs the launch"),
    (["tune", "{cubin}", "-o", "{out}", "--measure", "luck"], "expected gpu or model"),
    (["tune", "{cubin}", "-o", "{out}", "--resume", "--measure", "model"], "no earlier search"),
    (["tune", "{example}:nothing", "-o", "{out}"], "has no object called 'nothing'"),
    (["tune", "{example}:M", "-o", "{out}"], "expected a CapturedKernel"),
    (["tune", "{cubin}", "-o", "/proc/nowhere", "--measure", "model"], "cannot write"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_input_is_one_clear_line(
    arguments: list[str], message: str, small: Path, tmp_path: Path
) -> None:
    names = {"cubin": small, "out": tmp_path / "out", "example": EXAMPLE}
    result = _run([argument.format(**names) for argument in arguments])
    assert isinstance(result.exception, InputError), result.output
    assert message in str(result.exception)
    assert result.exception.exit_code == 2
    assert not (tmp_path / "out" / "tuned.cubin").exists()


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("1.5s", 1.5), ("5m", 300), ("2h", 7200)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(("times", "place"), [([19.0, 15.0, 18.0], 1), ([21.0, 20.0], None)])
def test_the_fastest_is_compared_once_more(times: list[float], place: int | None) -> None:
    told: list[str] = []
    with LocalMeasurer(open_device=open_fake) as gpu:
        gpu.prepare(workload())
        images = [image(us=us) for us in times]
        found, speedup, timing = fastest(gpu, image(), images, 0.5, told.append)
    assert found == place, str(timing)
    assert speedup == pytest.approx(1.0 if place is None else 20.0 / times[place], rel=0.01)
    # Four reloads of the original, its copy and the leaders, as long as a measurement each.
    assert told[0].endswith(f"about {4 * (len(times) + 2) * 0.5:.0f} s")
