"""The bench's Triton kernels compile offline, say what they need, and compute what they should."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMES = (
    "attention",
    "gemm_leaky_relu",
    "batched_gemm",
    "feed_forward",
    "softmax",
    "layernorm",
    "rmsnorm",
    "skinny_gemm",
)
H200_BYTES_PER_US = 4.27e6
H200_FLOPS_PER_US = 7.0e8


@pytest.fixture(scope="module")
def suite() -> Any:
    """The kernels by name."""
    return importlib.import_module("bench.triton_suite").SUITE


def test_names_and_configurations(suite: Any) -> None:
    assert tuple(suite) == NAMES
    for kernel in suite.values():
        names = [config.name for config in kernel.configs]
        assert 4 <= len(names) <= 8, kernel.name
        assert len(set(names)) == len(names), kernel.name


@pytest.mark.parametrize("name", NAMES)
def test_floors_are_of_the_right_size(suite: Any, name: str) -> None:
    kernel = suite[name]
    memory = kernel.bytes_moved() / H200_BYTES_PER_US
    compute = kernel.flops(kernel.shape) / H200_FLOPS_PER_US
    assert 20 <= max(memory, compute) <= 90


@pytest.mark.parametrize("name", NAMES)
def test_compiles_offline(suite: Any, name: str) -> None:
    kernel, arch = suite[name], (80, 90)[NAMES.index(name) % 2]
    compiled = importlib.import_module("bench.triton_suite.offline").compile_offline(
        kernel, kernel.configs[-1], arch
    )
    assert compiled.cubin[:4] == b"\x7fELF"
    launch = compiled.launch
    visible = kernel.arguments(kernel.shape)
    assert len(launch.arguments) == len(visible) + 2
    tensors = [item for item in visible if hasattr(item, "role")]
    assert [item.name for item in launch.buffers] == [item.name for item in tensors]
    assert any(item.role != "in" for item in launch.buffers)


SMALL = {
    "attention": {"batch": 1, "heads": 2, "rows": 256, "head_dim": 64},
    "gemm_leaky_relu": {"m": 160, "n": 272, "k": 96},
    "batched_gemm": {"batch": 2, "m": 144, "n": 136, "k": 80},
    "feed_forward": {"m": 144, "n": 136, "k": 80},
    "softmax": {"rows": 5, "cols": 1000},
    "layernorm": {"rows": 5, "cols": 1000},
    "rmsnorm": {"rows": 5, "cols": 1000},
    "skinny_gemm": {"m": 5, "n": 72, "k": 600},
}

INTERPRET = """
import torch
from bench.triton_suite import SUITE
from bench.triton_suite.common import Tensor
torch.manual_seed(0)
for name, shape in {shapes!r}.items():
    kernel = SUITE[name]
    config = kernel.configs[-1]
    items = kernel.arguments(shape)
    tensors = {{
        item.name: torch.randn(item.shape).mul(item.scale).half()
        if item.role == "in" else torch.full(item.shape, float("nan")).half()
        for item in items if isinstance(item, Tensor)
    }}
    values = [tensors[i.name] if isinstance(i, Tensor) else i.value for i in items]
    kernel.function[kernel.grid(shape, config)](*values, **kernel.constexprs(config))
    for output, right in kernel.reference(tensors).items():
        error = (tensors[output].double() - right).norm() / right.norm()
        assert error <= kernel.tolerance, (name, output, float(error))
        print(name, output, float(error))
"""


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch (CPU is enough)")
def test_interpreted_kernels_match_their_references() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERPRET.format(shapes=SMALL)],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if "only 0-dimensional arrays can be converted" in done.stderr:
        pytest.skip("Triton 3.6's interpreter does not run with numpy 2.4 or newer")
    assert done.returncode == 0, done.stdout + done.stderr
