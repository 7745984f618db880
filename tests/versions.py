"""The wheel under every other Python that warploom supports and that this computer has.

    python -m tests.versions          make versions: interpreters on the PATH and of pyenv

In an environment of its own, from the wheel: the first page's kernel is interpreted and built, a
schedule is solved, and the tests that need neither PyTorch nor Triton run. Exit status 1 if any
fails; a version that is not here is named and left out.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "versions"
VERSIONS = ("3.11", "3.12", "3.13")
EXTRAS = "sass,compile,solver"
TESTS = ("tests/tile", "tests/machine", "tests/rewrites")
KERNEL = re.compile(r"```python file=silu_gemm\.py\n(.*?)```", re.DOTALL)


def interpreter(version: str) -> str | None:
    """The interpreter of a version, or None: a shim of pyenv may name one that is not chosen."""
    kept = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [str(path) for path in sorted(kept.glob(f"{version}.*/bin/python"))]
    tried = [shutil.which(f"python{version}"), *reversed(found)]
    for one in filter(None, tried):
        said = subprocess.run([one, "--version"], capture_output=True, text=True, check=False)
        if said.stdout.startswith(f"Python {version}."):
            return one
    return None


def wheel() -> Path:
    """The wheel of this tree."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(FOLDER)]
    subprocess.run([*pip, str(ROOT)], check=True)
    (made,) = FOLDER.glob("*.whl")
    return made


def commands(python: str) -> Iterator[list[str]]:
    """What runs in the environment of `python`."""
    (kernel,) = KERNEL.findall((ROOT / "README.md").read_text())
    (FOLDER / "silu_gemm.py").write_text(kernel)
    program, warploom = f"{FOLDER}/silu_gemm.py:silu_gemm", [python, "-m", "warploom"]
    yield [*warploom, "run", program]
    yield [*warploom, "build", program, "--gpu", "h200", "-o", str(FOLDER / "built")]
    yield [*warploom, "schedule", "attention", "--gpu", "h200", "--time-limit", "30"]
    yield [python, "-m", "pytest", "-q", "-m", "not gpu", "-p", "no:cacheprovider", *TESTS]


def passes(base: str, version: str, made: Path) -> bool:
    """Whether everything runs from the wheel under one Python."""
    place = FOLDER / version
    subprocess.run([base, "-m", "venv", str(place)], check=True)
    python = str(place / "bin" / "python")
    needs = [f"{made}[{EXTRAS}]", "pytest", "pytest-timeout", "hypothesis"]
    subprocess.run([python, "-m", "pip", "install", "--quiet", *needs], check=True)
    for command in commands(python):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"Python {version}: {' '.join(command)}\n{done.stdout}{done.stderr}")
            return False
    print(f"Python {version}: {done.stdout.strip().splitlines()[-1]}")
    return True


def main() -> int:
    """Command line."""
    own, made, good = ".".join(map(str, sys.version_info[:2])), wheel(), True
    for version in VERSIONS:
        if version == own:
            continue
        began, base = time.perf_counter(), interpreter(version)
        if base is None:
            print(f"Python {version}: not on this computer")
            continue
        good &= passes(base, version, made)
        print(f"Python {version}: {time.perf_counter() - began:.0f} s", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
