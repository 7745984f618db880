"""The core alone: what it does, and which extra each refusal names."""

from __future__ import annotations

import json
import lzma
import os
import subprocess
import sys
import tomllib
from pathlib import Path

from warploom.toolchain import SPECS

ROOT = Path(__file__).parents[1]
# Modules of the extras; `importlib` finds none of them, and `import` fails.
OPTIONAL = (
    "cuda", "cvxpy", "gymnasium", "nvidia", "ortools", "sb3_contrib", "scipy", "sympy", "torch",
    "triton", "tvm_ffi",
)  # fmt: skip
CORE = (
    "--help",
    "doctor",
    "run gemm --set m=40 --set n=72 --set k=136",
    "variants gemm",
    "run examples/programs/rmsnorm_linear.py:kernel",
)
REFUSED = {
    "schedule gemm": "solver",
    "derive attention": "derive",
    "build gemm -o OUT": "compile",
    "optimize gemm -o OUT": "compile",
    "run gemm --on gpu": "compile",
    "sass show CUBIN": "sass",
    "tune CUBIN -o OUT --search ppo": "rl",
    "optimize examples/textbook_gemm.py:kernel -o OUT": "compile",
    "tune examples/tuned_softmax.py -o OUT": "triton",
    "judge bench/judged/softmax.py:right --against bench/judged/problems.py:softmax": "torch",
}
SCRIPT = """
import contextlib, importlib.abc, importlib.util, io, json, sys
optional, commands = json.loads(sys.argv[1])

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in optional:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in optional else find(name)
from warploom.cli import main
rows = {}
for command in commands:
    sys.argv = ["warploom", *command.split()]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main()
            code = 0
        except SystemExit as error:
            code = error.code or 0
    rows[command] = [code, said.getvalue()]
print(json.dumps(rows))
"""


def test_the_core_is_useful_and_a_refusal_names_its_extra(tmp_path: Path) -> None:
    cubin = tmp_path / "softmax.cubin"
    packed = next((ROOT / "tests/corpus/prebuilt").glob("softmax*.xz"))
    cubin.write_bytes(lzma.decompress(packed.read_bytes()))
    words = {"OUT": str(tmp_path / "out"), "CUBIN": str(cubin)}

    def filled(command: str) -> str:
        return " ".join(words.get(word, word) for word in command.split())

    commands = [filled(command) for command in (*CORE, *REFUSED)]
    environment = {**os.environ, "PATH": str(tmp_path), "WARPLOOM_CACHE": str(tmp_path / "cache")}
    asked = json.dumps([OPTIONAL, commands])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, asked],
        capture_output=True, text=True, cwd=ROOT, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])
    for command in CORE:
        assert rows[filled(command)][0] == 0, (command, rows[filled(command)])
    for command, extra in REFUSED.items():
        code, said = rows[filled(command)]
        assert code == 2 and f"'warploom[{extra}]'" in said, (command, said)
        assert said.strip().splitlines()[-1].startswith("warploom: ") and "Trace" not in said


def test_extras_are_known_and_the_two_of_users_hold_the_rest() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert set(REFUSED.values()) <= set(extras)
    assert extras["laptop"] == ["warploom[sass,compile,solver,derive]"]
    assert "warploom[laptop]" in extras["gpu"]


def test_the_extra_that_a_missing_tool_names_brings_it() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    packages = {"ptxas": "nvidia-cuda-nvcc"}  # the others' have their names
    for name, spec in SPECS.items():
        package = packages.get(name, f"nvidia-cuda-{name}")
        assert any(one.startswith(f"{package}>=") for one in extras[spec.extra]), name
