"""Exported launchers beside warploom's own, over a libcuda that writes down what it is asked."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.integrations.exports import cases

from warploom.integrations.exports.forms import FORMS, postfix

HERE = Path(__file__).parent
TVM_FFI = importlib.util.find_spec("tvm_ffi") is not None
LAUNCHERS = ["python", "c", *(["ffi"] if TVM_FFI else [])]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What drive.py saw of each launcher."""
    if not (shutil.which("cmake") and shutil.which("cc") and shutil.which("c++")):
        pytest.skip("needs cmake and a C and C++ compiler")
    folder = tmp_path_factory.mktemp("exports")
    stub = folder / "libcuda.so.1"
    run("cc", "-O1", "-fPIC", "-shared", "-Wl,-soname,libcuda.so.1,-Bsymbolic", "-Wall", "-Werror",
        str(HERE / "record_cuda.c"), "-o", str(stub), "-ldl")  # fmt: skip
    cubins = {f"{one.name}.cubin": one.cubin for one in cases.CASES}
    for form in ("python", "c", *(["tvm-ffi"] if TVM_FFI else [])):
        files = FORMS[form]("ffi", cases.manifest(), cubins)
        files["manifest.json"] = json.dumps(cases.manifest()).encode()
        place = folder if form == "tvm-ffi" else folder / form
        place.mkdir(exist_ok=True)
        for name, data in files.items():
            (place / name).write_bytes(data)
    run(
        "cmake",
        "-S",
        str(folder / "c"),
        "-B",
        str(folder / "made"),
        "-DCMAKE_C_FLAGS=-Wall -Werror",
    )
    run("cmake", "--build", str(folder / "made"))
    library = str(folder / "made" / "libffi.a")
    run("cc", "-shared", "-o", str(folder / "c.so"), "-Wl,--whole-archive", library,
        "-Wl,--no-whole-archive", "-ldl", "-lpthread")  # fmt: skip
    done = run(sys.executable, str(HERE / "drive.py"), str(stub), str(folder))
    return json.loads(done)


def run(*command: str) -> str:
    places = os.pathsep.join(filter(None, sys.path))  # what this process imports, whoever began it
    environment = {**os.environ, "LD_LIBRARY_PATH": "", "PYTHONPATH": places}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, env=environment
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def launches(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("launch")]


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("launcher", ["bound", *LAUNCHERS])
def test_each_launch_is_warplooms_own(
    seen: dict[str, Any], launcher: str, case: cases.Case
) -> None:
    own, theirs = seen["own"][case.name], seen[launcher][case.name]
    assert [launches(call) for call in theirs] == [launches(call) for call in own]
    assert sum(len(launches(call)) for call in own) == len(case.calls) + 1 - (case.name == "matmul")


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_kernel_is_loaded_once_and_prepared_as_ours(
    seen: dict[str, Any], launcher: str, case: cases.Case
) -> None:
    def prepared(of: str) -> list[str]:
        lines = [line for call in seen[of][case.name] for line in call]
        return sorted(line for line in lines if not line.startswith("launch"))

    assert prepared(launcher) == prepared("own")


def test_the_launches_are_what_they_should_be(seen: dict[str, Any]) -> None:
    """Read off by hand, so that a stub that writes nothing does not pass."""
    matmul, _, empty, hollow, none, again = seen["own"]["matmul"]
    (line,) = launches(matmul)
    # 2 clusters of 2 along the rows, one column of tiles
    assert line.startswith(
        "launch grid 4 1 1 block 384 1 1 shared 200000 stream 0x50 attribute 6=1"
    )
    a, b, c, m, n, counter, alpha, count = line.split()[15:]
    # The address is before what else a map of two dimensions says, and behind it in one of three.
    assert a[16:].startswith("090200030000") and b.startswith("090300020200")
    assert c[16:].startswith("070200010300")
    assert (m, n, count) == ("2c010000", "40000000", "f9ffffff")
    assert (counter[:4], alpha) == ("0000", "cdccccbd")
    assert counter != launches(again)[0].split()[20], "the next launch counts elsewhere"
    assert launches(none) == [] and "0000a0" in launches(empty)[0]
    assert "00010000a0" in launches(hollow)[0], "what is written lies in the second half"
    assert any(line == "clusters 2 384 200000 of 2" for line in matmul + seen["own"]["matmul"][0])


@pytest.mark.parametrize("what", cases.REFUSED)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_what_ours_refuses_is_refused(seen: dict[str, Any], launcher: str, what: str) -> None:
    assert seen["refused"]["own"][what]
    said = seen["refused"][launcher][what]
    assert said and what.split(maxsplit=1)[0] in said, said


def test_a_launch_waits_for_the_stream_that_made_an_array(seen: dict[str, Any]) -> None:
    lines = seen["python"]["produced"]
    assert lines[:2] == ["record on 0x60", "wait on 0x50"] and len(launches(lines)) == 1
    assert lines == seen["own"]["produced"]


def test_contexts_are_left_as_they_were(seen: dict[str, Any]) -> None:
    assert seen["contexts"] == 0


def test_expressions_go_to_postfix() -> None:
    found = postfix(["-", ["//", ["+", "n", 63], 64], ["%", "k", 3]], ["m", "n", "k"])
    text = "".join(f"{op}{value}" if op in "cd" else op for op, value in found)
    assert text == "d1c63+c64/d2c3%-"
    assert not re.search("[mM]in|//", text)
