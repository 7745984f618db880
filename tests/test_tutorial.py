"""Every block of the tutorial is run: Python in one namespace, commands, and what they print."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from warploom.cli import main

PAGE = Path(__file__).parent.parent / "docs" / "tutorial.md"
FENCE = re.compile(r"^```(\w+)(?: ([^\n]*))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, what follows it on the fence, text and line."""

    kind: str
    note: str
    text: str
    line: int


def blocks(page: str) -> list[Block]:
    """The blocks of a page, in order."""
    return [
        Block(m[1], m[2] or "", m[3], page[: m.start()].count("\n") + 2)
        for m in FENCE.finditer(page)
    ]


def run_all(page: str, folder: Path, gpu: bool) -> int:
    """Run a page's blocks in `folder`; raises where one fails or prints something else."""
    space: dict[str, Any] = {"__name__": "tutorial"}
    said = ""
    ran = 0
    for block in blocks(page):
        if block.kind == "text":
            assert said.strip() == block.text.strip(), f"line {block.line} of the page:\n{said}"
            continue
        if block.note.startswith("file="):
            (folder / block.note.removeprefix("file=")).write_text(block.text)
            continue
        said = ""
        if block.kind == "console":
            for line in block.text.splitlines():
                assert command(line.removeprefix("$ ")) == 0, f"line {block.line}: {line}"
                ran += 1
            continue
        # A file, since torch.compile reads the source of what it compiles.
        source = folder / f"line_{block.line}.py"
        source.write_text(block.text)
        code = compile(block.text, str(source), "exec")
        if block.note == "gpu" and not gpu:
            continue
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(code, space)
        said = out.getvalue()
        ran += 1
    return ran


def command(line: str) -> int:
    """The exit code of a `warploom ...` line, run in this process."""
    words = shlex.split(line)
    assert words[0] == "warploom"
    saved, sys.argv = sys.argv, words
    try:
        main()
    except SystemExit as left:
        return int(left.code or 0)
    finally:
        sys.argv = saved
    return 0


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "gated", raising=False)
    return tmp_path


def test_the_tutorial_runs(here: Path) -> None:
    assert run_all(PAGE.read_text(), here, gpu=False) >= 12
    assert (here / "out" / "gated-a100" / "manifest.json").exists()


def test_the_example_of_the_language_runs(here: Path) -> None:
    assert run_all((PAGE.parent / "tile.md").read_text(), here, gpu=False) == 1


@pytest.mark.gpu
def test_the_tutorial_runs_to_the_end_on_a_gpu(here: Path) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    run_all(PAGE.read_text(), here, gpu=True)


PLANTED = {
    "line 6 of the page": "```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n",
    r"line 2: . warploom run nothing": "```console\n$ warploom run nothing\n```\n",
}


@pytest.mark.parametrize("message", PLANTED)
def test_a_page_that_is_not_so_fails(message: str, here: Path) -> None:
    with pytest.raises(AssertionError, match=message):
        run_all(PLANTED[message], Path(os.curdir), gpu=False)
