"""The library and its two commands, as a user calls them."""

import json
import shutil

import pytest
from tests.command import warploom
from typer.testing import CliRunner

from warploom.cli import app
from warploom.errors import CheckFailed, InputError
from warploom.kernels.check import checked
from warploom.kernels.library import KERNELS, configure
from warploom.tile import FP32

RUNNER = CliRunner()


def call(*words):
    done = RUNNER.invoke(app, list(words), catch_exceptions=False)
    return done.exit_code, done.output


@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_builds_and_its_schedule_can_be_given_back(name, tmp_path):
    code, text = call("build", name, "-o", str(tmp_path / "one"))
    # Two blocks of recurrent attention share an SM.
    assert code == 0 and f"{128 if name == 'recurrent' else 168} registers at entry" in text
    code, text = call(
        "build", name, "-o", str(tmp_path / "two"), "--json",
        "--schedule", str(tmp_path / "one" / "schedule.json"),
    )  # fmt: skip
    first = (tmp_path / "one" / "manifest.json").read_text()
    assert json.loads(text)["sha256"] == json.loads(first)["sha256"]
    assert {p.suffix for p in (tmp_path / "one").iterdir()} == {".cu", ".cubin", ".json"}


@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_runs_on_the_cpu(name):
    code, text = call("run", name, "--json")
    found = json.loads(text)
    assert code == 0 and found["passed"]
    assert all(error < found["bounds"][output] for output, error in found["errors"].items())


def test_settings_reach_the_kernel():
    config, sizes = configure(
        "attention", {"causal": "true", "tile": "64,32", "head_dim": "64", "rows": "70"}
    )
    assert config.causal and config.tile == (64, 32) and sizes["d"] == 64 and sizes["rows"] == 70


@pytest.mark.parametrize(("text", "value"), [("fp32", FP32), ("none", None)])
def test_a_setting_may_be_left_to_the_kernel(text, value):
    config, _ = configure("attention", {"dtype": "e4m3", "out": text, "window": "none"})
    assert config.out == value and config.window is None


def test_eight_bit_operands_are_stored_as_the_tensor_core_takes_them(tmp_path):
    assert configure("gemm", {"dtype": "e4m3"})[0].b == "nk"
    assert configure("gemm", {"dtype": "e4m3", "b": "kn"})[0].b == "kn"
    assert configure("gemm", {})[0].b == "kn"
    for name in ("attention", "gemm"):
        code, text = call("build", name, "--set", "dtype=e4m3", "-o", str(tmp_path / name))
        assert code == 0, text


BAD = [
    ("gmm", {}, "expected one of attention, gemm"),
    ("gemm", {"tyle": "1"}, "no setting 'tyle': expected one of dtype"),
    ("gemm", {"across": "true"}, "no setting 'across': it is called 'swap_ab'"),
    ("attention", {"guess": "12"}, "no setting 'guess': it is called 'optimistic_threshold'"),
    ("attention", {"causal": "maybe"}, "expected true or false"),
    ("attention", {"out": "bf61"}, "dtype .bf61. is not known"),
    ("attention", {"head_dim": "none"}, "expected a whole number"),
    ("attention", {"heads": "0"}, "heads=0 kv_heads=0 group=1: expected at least one head"),
    ("attention", {"kv_heads": "0"}, "kv_heads=0 group=1: .* heads = kv_heads"),
    ("attention", {"heads": "6", "kv_heads": "2"}, "heads=6 kv_heads=2 group=1: .* heads = kv_h"),
    ("attention", {"heads": "6", "group": "4"}, "heads=6 kv_heads=1 group=4"),
]


@pytest.mark.parametrize("how", [{}, {"heads": "6"}, {"kv_heads": "2"}, {"group": "3"}])
def test_numbers_of_heads_that_are_not_given_follow_from_the_others(how):
    for settings in (how, {"group": "3", **how}):
        sizes = configure("attention", settings)[1]
        assert sizes["heads"] == int(settings.get("group", "1")) * sizes["kv_heads"] > 0
        assert all(sizes[name] == int(text) for name, text in how.items() if name in sizes)


@pytest.mark.parametrize(("name", "settings", "message"), BAD)
def test_bad_settings_are_refused(name, settings, message):
    with pytest.raises(InputError, match=message):
        configure(name, settings)


def test_an_unwritten_output_counts_as_wrong(monkeypatch):
    config, sizes = configure("gemm", {"m": "8", "n": "8", "k": "8"})
    monkeypatch.setattr("warploom.kernels.check.interpret", lambda p, arrays, scalars: arrays)
    assert checked("gemm", config, sizes).errors == {"c": float("inf")}
    with pytest.raises(CheckFailed, match="52,800 of 52,800 elements are NaN"):
        RUNNER.invoke(app, ["run", "gemm"], catch_exceptions=False)


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["gemm", "--set", "m=20", "--set", "n=24", "--set", "k=32"], 0, "on cpu: relative error"),
        (["gemm", "--on", "tpu"], 2, "expected cpu, emulated or gpu"),
        (["gemm", "--on", "gpu", "--set", "m=20"], 2, "no GPU driver here"),
        (["gemm", "--set", "m"], 2, "expected key=value"),
    ],
)
def test_run_says_a_line_and_ends_with_its_code(words, code, says):
    if "gpu" in words and shutil.which("nvidia-smi"):
        pytest.skip("there is a GPU here")
    done = warploom("run", *words)
    text = done.stdout + done.stderr
    first, *more = text.splitlines()
    assert done.returncode == code and says in first
    passed = "pass: each element is written once and within its bound, at m 20, k 32, n 24"
    assert more == ([] if code else [passed])
