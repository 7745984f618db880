"""Capturing offline gives the cubin that Triton's own launch would load, and its launch."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import triton

from warploom.errors import InputError
from warploom.integrations.deploy import content_key
from warploom.integrations.triton import ScalarArgument, TensorArgument, capture, capture_call
from warploom.runtime.launch import Null, Pointer, Scalar

HERE = Path(__file__).parent


def load(name: str, folder: Path = HERE) -> Any:
    """A helper module of this folder."""
    spec = importlib.util.spec_from_file_location(f"warploom_tests_{name}", folder / f"{name}.py")
    assert spec
    assert spec.loader
    module = sys.modules.setdefault(spec.name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


kernels = load("kernels")
helpers = load("conftest")
TENSORS = {
    "x_ptr": TensorArgument("fp32", (4096,)),
    "y_ptr": TensorArgument("fp32", (1024,), "out"),
}


@pytest.mark.parametrize("stride", [1, 3, 16])
@pytest.mark.parametrize("address", [4096, 4100])
def test_captured_cubin_is_the_launched_one(driver: Any, stride: int, address: int) -> None:
    x, y = helpers.FakeTensor(address=address), helpers.FakeTensor()
    compiled = triton.jit(kernels.scaled)[(8,)](x, 0.5, stride, y, 1000, block=128, num_warps=2)
    captured = capture(
        triton.jit(kernels.scaled),
        {
            **TENSORS,
            "x_ptr": TensorArgument("fp32", (4096,), aligned=address % 16 == 0),
            "factor": ScalarArgument("fp32", 0.5),
            "stride": ScalarArgument("i32", stride),
            "n": ScalarArgument("i32", 1000),
        },
        constexprs={"block": 128},
        grid=(8, 1, 1),
        num_warps=2,
    )
    assert captured.key == content_key(compiled.asm["cubin"])
    assert len(driver.launched) == 1


def test_launch_lists_visible_then_hidden_parameters() -> None:
    arguments = {
        **TENSORS,
        "factor": ScalarArgument("fp32", 0.5),
        "stride": ScalarArgument("i32", 1),
        "n": ScalarArgument("i32", 1000),
    }
    captured = capture(
        triton.jit(kernels.scaled), arguments, constexprs={"block": 128}, grid=(8, 1, 1)
    )
    assert captured.launch.arguments == (
        Pointer("x_ptr"),
        Scalar("fp32", 0.5),
        Pointer("y_ptr"),
        Scalar("i32", 1000),
        Null(),
        Null(),
    )
    assert captured.launch.block == (128, 1, 1)
    assert [buffer.role for buffer in captured.launch.buffers] == ["in", "out"]
    assert parameter_bytes(captured.cubin) == 8 + 8 + 8 + 8 + 8 + 8


def parameter_bytes(cubin: bytes) -> int:
    """EIATTR_PARAM_CBANK's size field: what the kernel itself says it takes."""
    at = cubin.index(b"\x04\x0a\x08\x00")  # format 4, attribute 0x0a, 8 bytes
    return int.from_bytes(cubin[at + 10 : at + 12], "little")


def test_the_key_survives_moving_the_source_file(tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere.py"
    moved.write_text("# moved\n\n\n" + (HERE / "kernels.py").read_text())
    arguments = {**TENSORS, "n": ScalarArgument("i32", 1000)}
    here, there = (
        capture(triton.jit(module.add_one), arguments, constexprs={"block": 128}, grid=(8, 1, 1))
        for module in (kernels, load("elsewhere", tmp_path))
    )
    assert here.cubin != there.cubin
    assert here.key == there.key


def test_a_live_call_is_captured_without_launching() -> None:
    class Tensor(helpers.FakeTensor):
        shape = (1024,)

    x, y = Tensor("torch.float16"), Tensor("torch.float16", address=4098)
    captured = capture_call(
        triton.jit(kernels.add_one),
        x,
        y,
        1024,
        block=128,
        grid=lambda meta: (triton.cdiv(meta["n"], meta["block"]),),
        outputs=["y_ptr"],
        num_warps=8,
        arch=80,
    )
    assert captured.launch.grid == (8, 1, 1)
    assert captured.launch.block == (256, 1, 1)
    assert [(item.name, item.role) for item in captured.launch.buffers] == [
        ("x_ptr", "in"),
        ("y_ptr", "out"),
    ]


@pytest.mark.parametrize(
    ("arguments", "constants", "words"),
    [
        ({}, {"block": 128}, "parameter 'x_ptr' is missing, give it in arguments"),
        (TENSORS, {}, "parameter 'n' is missing"),
        ({**TENSORS, "n": ScalarArgument("i32", 8)}, {}, "'block' is missing, give it in constex"),
        (TENSORS, {"blocks": 128}, "has no parameter 'blocks', its parameters are"),
        ({**TENSORS, "n": ScalarArgument("int", 8)}, {"block": 128}, "type 'int', expected one of"),
    ],
)
def test_what_does_not_fit_is_named(arguments: Any, constants: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        capture(triton.jit(kernels.add_one), arguments, constexprs=constants, grid=(8, 1, 1))


def test_an_unknown_live_argument_is_named() -> None:
    with pytest.raises(InputError, match="argument 'x_ptr' is str, expected a tensor"):
        capture_call(triton.jit(kernels.add_one), "x", "y", 1, block=8, grid=(1,))
