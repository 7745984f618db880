"""`warploom tune script.py`: the Triton kernels that a script launches, with and without a GPU."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import triton
from typer.testing import CliRunner

from warploom.cli import app
from warploom.errors import InputError
from warploom.flows.tune_script import record
from warploom.integrations.deploy import content_key
from warploom.integrations.triton_capture import captured
from warploom.integrations.triton_record import Recorder, written

SCRIPT = """
import sys
import torch, triton
import triton.language as tl


@triton.jit
def add(x_ptr, y_ptr, n, block: tl.constexpr):
    lanes = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(y_ptr + lanes, tl.load(x_ptr + lanes, mask=lanes < n) + 1.0, mask=lanes < n)


@triton.autotune([triton.Config({"block": block}) for block in (256, 512)], key=["n"])
@triton.jit
def twice(x_ptr, y_ptr, n, block: tl.constexpr):
    lanes = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(y_ptr + lanes, tl.load(x_ptr + lanes, mask=lanes < n) * 2.0, mask=lanes < n)


@triton.jit
def odd(what, y_ptr):
    tl.store(y_ptr, 1.0)


rows = int(sys.argv[1])
x = torch.nn.Linear(64, 96).to("cuda" if torch.cuda.is_available() else "cpu")
x = x(torch.randn(rows, 64, device=triton.runtime.driver.active.get_active_torch_device()))
assert x.is_cuda and torch.cuda.get_device_capability() == (9, 0)
y = torch.empty_like(x)
for step in range(3):
    add[lambda meta: (triton.cdiv(x.numel(), meta["block"]),)](x, y, x.numel(), block=128)
    twice[(7,)](y, x, x.numel())
add[(1,)](x[0], y[0], 96, 256)
odd[(1,)]("a word", y)
print(y.sum().item())
add[(2,)](x, y, 4, block=32)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(SCRIPT)
    return path


def test_a_script_without_a_gpu_goes_as_far_as_it_needs_no_value(script: Path) -> None:
    command = ["tune", str(script), "-o", str(script.parent / "out"), "--candidates", "2"]
    done = CliRunner().invoke(app, [*command, "--json", "--only", "twice", "--", "10"])
    assert done.exit_code == 0, done.stderr
    assert list(json.loads(done.stdout)) == ["twice"]
    found = json.loads((script.parent / "out/recorded/recorded.json").read_text())
    assert not found["gpu"] and "train.py:35: RuntimeError" in found["stopped"]
    rows = {one.get("name", one["kernel"]): one for one in found["kernels"]}
    assert [(name, one.get("launches")) for name, one in rows.items()] == [
        ("add", 3), ("twice", 3), ("add-2", 1), ("odd", None),
    ]  # fmt: skip
    assert rows["add"]["arguments"] == "x_ptr fp32[10, 96], y_ptr fp32[10, 96], n=960, block=128"
    assert rows["add"]["grid"] == [8, 1, 1] and "first configuration" in rows["twice"]["note"]
    assert "'what' is str" in rows["odd"]["refused"]
    assert "add-2   1" in done.stderr and "stopped early" in done.stderr
    kept = script.parent / "out/kernels/twice/original.cubin"
    assert kept.read_bytes() == (script.parent / "out/recorded/twice.cubin").read_bytes()


def test_what_is_no_script_or_launches_nothing_is_refused(tmp_path: Path) -> None:
    quiet = tmp_path / "quiet.py"
    quiet.write_text("import sys\nsys.exit('nothing to do')\n")
    with pytest.raises(InputError, match=r"launched no Triton kernel.*; it stopped.*nothing to"):
        record(quiet, [], tmp_path / "out", None)
    with pytest.raises(InputError, match=r"none\.py: no such file"):
        record(tmp_path / "none.py", [], tmp_path / "out", None)
    runner, out = CliRunner(), ["-o", str(tmp_path / "out")]
    refused = runner.invoke(app, ["tune", str(quiet), *out, "--kernel", "x"])
    assert "go with other targets" in str(refused.exception)
    refused = runner.invoke(app, ["tune", "some.cubin", *out, "--list"])
    assert "go with a script" in str(refused.exception)


def load(name: str) -> Any:
    path = Path(__file__).parent / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"warploom_tests_{name}", path)
    assert spec and spec.loader
    module = sys.modules.setdefault(spec.name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


def test_launches_are_made_and_noted_where_a_gpu_is(driver: Any, tmp_path: Path) -> None:
    kernels, helpers = load("kernels"), load("conftest")

    class Tensor(helpers.FakeTensor):
        shape = (1024,)

    tried: list[Any] = []

    def bench(call: Any, quantiles: Any) -> list[float]:
        call()
        tried.append(call)
        return [1.0, 1.0, 1.0] if len(tried) == 2 else [2.0, 2.0, 2.0]

    configs = [triton.Config({"block": block}) for block in (128, 256)]
    tuned = triton.autotune(configs, key=["n"], do_bench=bench)(triton.jit(kernels.add_one))
    plain, recorder = triton.jit(kernels.add_one), Recorder()
    x, y = Tensor(), Tensor()
    with recorder.installed():
        launched = [plain[(8,)](x, y, 1024, block=128) for _ in range(2)]
        tuned[(4,)](x, y, 1024)
        plain[(8,)](Tensor(address=4100), y, 1024, block=128)
    plain[(9,)](x, y, 1024, block=128)  # nobody listens now
    assert len(driver.launched) == 7 and len(tried) == 2
    notes = list(recorder.notes.values())
    assert [one.launches for one in notes] == [2, 1, 1]
    assert captured(notes[0].call).key == content_key(launched[0].asm["cubin"])
    assert notes[1].call.constexprs == {"block": 256}, "the one that the autotuner chose"
    rows = written(tmp_path, notes, 90)
    # What lies askew gets the same machine code here: launches of one cubin are one kernel.
    assert {one["name"]: one["launches"] for one in rows} == {"add_one": 3, "add_one-2": 1}
