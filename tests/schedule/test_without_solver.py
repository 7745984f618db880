"""OR-Tools is imported when something is solved, and nothing else needs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BLOCK = "import sys; sys.modules['ortools'] = None"  # as if it were not installed
LINE = "OR-Tools is needed to solve schedules; install it with: pip install 'warploom[solver]'"
MODULES = (
    *(
        f"cli.{name}"
        for name in "bench build derive doctor optimize run sass schedule tune".split()
    ),
    *(f"kernels.{name}" for name in "attention.variants gemm.variant library user".split()),
    *(f"schedule.solve.{name}" for name in "solve enumerate".split()),
    "schedule.service",
    "schedule.refute.refute",
    "codegen.compile.build",
    "integrations.torch_op",
    "flows.optimize",
)


def python(code: str, *args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", f"{BLOCK}; {code}", *args]
    environment = {**os.environ, "WARPLOOM_CACHE": str((cwd or Path()) / "cache")}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, cwd=cwd, env=environment
    )


def test_no_module_imports_it() -> None:
    names = ", ".join(f"warploom.{name}" for name in MODULES)
    done = python(f"import {names}")
    assert done.returncode == 0, done.stderr


COMMANDS = {
    "build gemm --gpu h200 -o out": (0, "gemm for h200"),
    "run gemm": (0, "gemm c on cpu"),
    "schedule gemm": (2, LINE),
    "build gemm --gpu h200 --schedule solve -o out": (2, LINE),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_need_it_only_to_solve(command: str, tmp_path: Path) -> None:
    status, text = COMMANDS[command]
    done = python("from warploom.cli import main; main()", *command.split(), cwd=tmp_path)
    assert done.returncode == status, done.stderr
    assert text in (done.stderr.splitlines()[-1] if status else done.stdout)
    assert "Traceback" not in done.stderr
