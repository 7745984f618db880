"""`warploom ...` run in the process of the tests: a process of its own takes a second to begin."""

from __future__ import annotations

import contextlib
import io
import sys
import warnings
from pathlib import Path
from subprocess import CompletedProcess
from unittest.mock import patch

from warploom.cli import main


def warploom(*words: str, cwd: Path | None = None) -> CompletedProcess[str]:
    """What the installed command does with these words."""
    out, err = io.StringIO(), io.StringIO()
    code: object = 0
    with (
        patch.object(sys, "argv", ["warploom", *words]),
        patch.object(warnings, "showwarning"),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        contextlib.chdir(cwd or "."),
    ):
        try:
            main()
        except SystemExit as left:
            code = left.code
    return CompletedProcess(words, int(str(code or 0)), out.getvalue(), err.getvalue())
