"""A step that touches the GPU, in a process of its own with a watchdog.

A kernel that hangs or poisons the context costs that process, not the user's session.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from warploom.errors import DeviceError

LIMIT_S: Final = 240.0  # before the process counts as hung


def answer_of(module: str, folder: Path, subject: str, doing: str) -> Any:
    """What `python -m module folder` prints last, as JSON data.

    Raises `DeviceError` when it fails or hangs; `subject` and `doing` ("measuring") name it.
    """
    command = [sys.executable, "-m", module, str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise DeviceError(f"{subject}: no answer from the GPU in {LIMIT_S:g} s") from None
    if done.returncode:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        raise DeviceError(f"{subject}: the {doing} process failed: {last}")
    return json.loads(done.stdout.splitlines()[-1])
