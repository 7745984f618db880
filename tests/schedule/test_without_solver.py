"""OR-Tools is imported when something is solved, and nothing else needs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

LINE = "OR-Tools is needed to solve schedules; install it with: pip install 'warploom[solver]'"
MODULES = (
    *(f"cli.{name}" for name in "build derive doctor optimize run sass schedule tune".split()),
    *(f"kernels.{name}" for name in "attention.variants gemm.variant library user".split()),
    *(f"schedule.solve.{name}" for name in "solve enumerate".split()),
    "schedule.service",
    "schedule.refute.refute",
    "codegen.compile.build",
    "integrations.torch_op",
    "flows.optimize",
)


COMMANDS = {
    "build gemm --gpu h200 -o out": (0, "gemm for h200"),
    "run gemm": (0, "gemm c on cpu"),
    "schedule gemm": (2, LINE),
    "build gemm --gpu h200 --schedule solve -o out": (2, LINE),
}
SCRIPT = """
import contextlib, importlib, io, json, sys
sys.modules["ortools"] = None  # as if it were not installed
modules, commands = json.loads(sys.argv[1])
for module in modules:
    importlib.import_module(f"warploom.{module}")
from warploom.cli import main
rows = {}
for command in commands:
    sys.argv = ["warploom", *command.split()]
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as left:
            code = left.code or 0
    rows[command] = code, out.getvalue(), err.getvalue()
print(json.dumps(rows))
"""


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, str]]:
    """What each command gives in one process without OR-Tools, in which all modules are loaded."""
    folder = tmp_path_factory.mktemp("without")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps([MODULES, list(COMMANDS)])],
        capture_output=True, text=True, timeout=200, check=False, cwd=folder,
        env={**os.environ, "WARPLOOM_CACHE": str(folder / "cache")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_need_it_only_to_solve(
    command: str, rows: dict[str, tuple[int, str, str]]
) -> None:
    (status, text), (code, out, err) = COMMANDS[command], rows[command]
    assert code == status, err
    assert text in (err.splitlines()[-1] if status else out)
    assert "Traceback" not in err
