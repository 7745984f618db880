"""The driver wrapper: over a stub libcuda every call lands; with no driver one line says so."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from warploom.errors import DeviceError, InputError, ToolMissing
from warploom.runtime import bindings
from warploom.runtime.driver import CudaDevice, device_count
from warploom.runtime.helpers import FUNCTIONS, SOURCE
from warploom.runtime.nvrtc import compile_source

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What drive_stub.py saw, run over the stub built with g++."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++ to build the stub libcuda")
    folder = tmp_path_factory.mktemp("stub")
    (folder / "helpers.inc").write_text(SOURCE)
    command = [
        compiler, "-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-Wl,-Bsymbolic",
        f'-DHELPERS="{folder / "helpers.inc"}"', str(HERE / "stub_cuda.cpp"),
        "-o", str(folder / "libcuda.so.1"), "-ldl",
    ]  # fmt: skip
    subprocess.run(command, check=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder)}
    done = subprocess.run(
        [sys.executable, str(HERE / "drive_stub.py")],
        env=environment, capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_device_is_described(seen: dict[str, Any]) -> None:
    assert seen["count"] == 1
    info = seen["info"]
    assert (info["name"], info["sm_count"], info["clock_mhz"]) == ("Stub", 4, 1000)
    assert info["compute_capability"] == [9, 0]
    assert info["cuda_version"] == "13.0"


def test_the_fill_kernels_source_computes_the_patterns_bit_for_bit(seen: dict[str, Any]) -> None:
    assert seen["fills"] == []


def test_candidates_are_measured_and_checked(seen: dict[str, Any]) -> None:
    good, bad = seen["measured"]
    assert good["outcome"] == "ok"
    assert good["speedup"] == pytest.approx(2.0, rel=0.05)
    assert bad["outcome"] == "rejected"
    assert seen["check"]["passed"]
    assert seen["check"]["samples"] == 50
    assert seen["ratio"] == pytest.approx(0.5, rel=0.05)
    assert seen["cold_us"] == pytest.approx(10, rel=0.05)
    assert seen["cluster"] == "ok"


def test_a_tensor_map_is_encoded_as_asked(seen: dict[str, Any]) -> None:
    # type bf16, rank, address, dims, stride, box, element strides, interleave, swizzle 64B,
    # promotion 128B, NaN fill
    assert seen["tensor_map"] == [9, 2, 4096, 50, 8, 112, 32, 8, 1, 1, 0, 2, 2, 1]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("image", "cuModuleLoadData failed: CUDA_ERROR_INVALID_IMAGE (not a cubin this driver"),
        ("text", "CUDA_ERROR_INVALID_IMAGE (4 bytes that are not a 64-bit ELF file"),
        ("cut", "CUDA_ERROR_INVALID_IMAGE (a truncated cubin"),
        ("name", "CUDA_ERROR_NOT_FOUND (no kernel of that name in the cubin) fatal=False"),
        ("shared", "cuFuncSetAttribute failed: CUDA_ERROR_INVALID_VALUE"),
        ("memory", "CUDA_ERROR_OUT_OF_MEMORY (device memory is exhausted) fatal=False"),
        ("copy", "cuMemcpyDtoHAsync failed: CUDA_ERROR_INVALID_VALUE (a size or address is out of"),
        ("copy", "fatal=True"),
        ("launch", "cuLaunchKernel failed: CUDA_ERROR_INVALID_VALUE"),
    ],
)
def test_a_failing_call_names_itself_and_the_error(
    seen: dict[str, Any], what: str, message: str
) -> None:
    assert message in seen["errors"][what]


@pytest.mark.skipif(device_count() > 0, reason="there is a GPU here")
def test_without_a_gpu_one_line_says_what_is_needed() -> None:
    with pytest.raises(DeviceError, match="GPU and its driver") as caught:
        CudaDevice()
    assert "\n" not in str(caught.value)


def test_a_missing_package_carries_its_install_line() -> None:
    with pytest.raises(ToolMissing, match=r"install it with: pip install 'warploom\[gpu\]'"):
        bindings.import_binding("no_such_binding")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
def test_the_helper_kernels_compile_everywhere(arch: str) -> None:
    cubin = compile_source(SOURCE, arch)
    assert cubin[:4] == b"\x7fELF"
    assert all(name.encode() in cubin for name in FUNCTIONS)


def test_a_source_that_does_not_compile_shows_the_first_error() -> None:
    with pytest.raises(InputError, match=r"cannot compile for sm_90a: .*error") as caught:
        compile_source("__global__ void k() { return undeclared; }", "sm_90a")
    assert "\n" not in str(caught.value)
