"""`warploom tune` end to end under the model, and its bad inputs."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from warploom.cli import app
from warploom.cli.tune import parse_duration
from warploom.errors import InputError
from warploom.integrations.deploy import FolderStore, content_key
from warploom.pipeline.targets import read_target
from warploom.pipeline.tune import tune
from warploom.pipeline.tuned import TuneSettings
from warploom.sass.aliasing import AliasMode
from warploom.sass.cubin import load
from warploom.sass.verify import verify

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
    "fails": "fails fails: KeyError: 'nothing'",
    "leaves": "leaves leaves Python with code 3",
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
        ([], "not a launch description (expected a JSON object)"),
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
    (["tune", "{cubin}", "-o", "{out}", "--alias", "none"], "expected strict or triton"),
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
