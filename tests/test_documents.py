"""Every block of README and docs is run in the order it is written, and prints what the page says.

What a fence holds, and what becomes of it:

* a line `$ COMMAND` is run, in a folder of the page's own that has the repository's `examples`;
  what would take long gets the documented option that shortens it (`SHORTER`), what needs a
  GPU (`--on gpu`) is left out where there is none, and so is what another page runs, too, where
  no line of this one needs the files it writes (`REPEATED`);
* a line that begins with `warploom`, `python` or `make` and no `$` is a form, and so is
  `warploom ...` in the text: the options, scripts and targets it names must exist;
* Python is run, one namespace a page. Noted `gpu`, only where a GPU is; noted `part`, it goes on
  from what the reader has: it must parse, and what it imports of warploom must exist;
* `file=NAME` writes the block to that file; a `text` block is what the block before it printed.

Commands in the docstrings of `examples` are run too.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from warploom.cli import app, main
from warploom.engine.search import SECONDS
from warploom.errors import WarploomError
from warploom.integrations.triton_swap import uninstall

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r"^```(\w*)(?: ([^\n]*))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
TEXTS = (*PAGES, "CONTRIBUTING.md", "CHANGELOG.md")
FORMS = ("warploom ", "python ", "make ")
INLINE = re.compile(r"`(warploom [^`]+)`")
# The first words of a command: the option that keeps it short here.
SHORTER = {"tune": "--budget 1s", "schedule": "--time-limit 5", "optimize": "--time-limit 3"}
SEARCHES = re.compile(r"optimize \S+\.py:\S+ (?!.*--(space|effort))")  # gets --effort quick
FIRST = "warploom.engine.search._Search._explore"  # is left out: a search tries its first point


WRITING = ("-o", "--svg", "--json", "--trace", "--build")  # each with the place it writes to


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


def commands(text: str, prompt: str) -> list[str]:
    """The commands that a text shows behind its prompt, in order."""
    return [
        line.removeprefix(prompt)
        for line in text.splitlines()
        if line.startswith(f"{prompt}warploom ")
    ]


def meaning(line: str) -> tuple[str, ...]:
    """The words of a command without the places it writes to."""
    words = shlex.split(line, comments=True)
    return tuple(w for before, w in pairwise(["", *words]) if not {before, w} & {*WRITING})


def needed(line: str, shown: list[str]) -> bool:
    """Whether another of the commands shown names what this one writes."""
    places = [w for before, w in pairwise(shlex.split(line, comments=True)) if before in WRITING]
    return any(place in other for place in places for other in shown if other != line)


def repeated() -> dict[str, frozenset[str]]:
    """Of each page and example: its commands that another one of them runs, too, and whose files
    no other line of it needs. Of several that could be left out the first is run."""
    shown = {page: commands((ROOT / page).read_text(), "$ ") for page in PAGES}
    for path in sorted((ROOT / "examples").glob("*.py")):
        said = ast.get_docstring(ast.parse(path.read_text())) or ""
        shown[f"examples/{path.name}"] = commands(said, "")
    known = {meaning(one) for lines in shown.values() for one in lines if needed(one, lines)}
    found: dict[str, frozenset[str]] = {}
    for page, lines in shown.items():
        free = [line for line in lines if not needed(line, lines)]
        found[page] = frozenset(line for line in free if meaning(line) in known)
        known |= {meaning(line) for line in free}
    return found


def run_all(page: str, folder: Path, gpu: bool, left_out: frozenset[str] = frozenset()) -> int:
    """Run a page's blocks in `folder`, and give how many commands and blocks of Python were run;
    raises where one fails or prints something else."""
    space: dict[str, Any] = {"__name__": "page"}
    said, ran = "", 0
    for block in blocks(page):
        place = f"line {block.line}"
        if block.kind == "text":
            assert said.strip() == block.text.strip(), f"{place} of the page:\n{said}"
        elif block.note.startswith("file="):
            (folder / block.note.removeprefix("file=")).write_text(block.text)
        elif block.kind == "python":
            ran_now, said = python(block, folder, space, gpu)
            ran += ran_now
        else:
            for line in re.sub(r"\n {4,}(?=\[)", " ", block.text).splitlines():  # forms go on
                if line.removeprefix("$ ") in left_out:
                    continue
                if line.startswith("$ "):
                    ran += command(line.removeprefix("$ "), place, gpu)
                elif line.startswith(FORMS):
                    check_form(line, place)
    return ran


def python(block: Block, folder: Path, space: dict[str, Any], gpu: bool) -> tuple[int, str]:
    """(1 when the block was run, what it printed)."""
    # A file, since torch.compile reads the source of what it compiles.
    source = folder / f"line_{block.line}.py"
    source.write_text(block.text)
    code = compile(block.text, str(source), "exec")
    if block.note == "part" or (block.note == "gpu" and not gpu):
        check_imports(block)
        return 0, ""
    assert block.note in ("", "gpu"), f"line {block.line}: a note {block.note!r} means nothing"
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, space)
    return 1, out.getvalue()


def check_imports(block: Block) -> None:
    """What a block imports of warploom exists."""
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("warploom"):
            module = importlib.import_module(node.module or "")
            for name in node.names:
                assert hasattr(module, name.name), f"line {block.line}: no {name.name}"


def command(line: str, place: str, gpu: bool) -> int:
    """Run a `warploom ...` line in this process, as short as may be; 1 when it was run."""
    words = shlex.split(line, comments=True)
    assert words[0] == "warploom", f"{place}: only warploom's commands are run, not {line}"
    shorter = SHORTER.get(words[1], "").split()
    # `--space` searches nothing, and the command refuses what would shorten a search.
    if shorter and not {shorter[0], "--space", "list"} & set(words[1:]):
        words += shorter
    if SEARCHES.match(" ".join(words[1:])):
        words += ["--effort", "quick"]
    if not gpu and "--on gpu" in " ".join(words):
        return 0
    saved, sys.argv = sys.argv, words
    code: object = 0
    try:
        main()
    except SystemExit as left:
        code = left.code or 0
    finally:
        sys.argv = saved
    assert code == 0, f"{place}: {line}"
    return 1


def check_form(line: str, place: str) -> None:
    """The command and the options of a form exist, and so do scripts and targets."""
    words = line.replace("[", " ").replace("]", " ").split("#")[0].split()
    if words[0] == "make":
        assert re.search(f"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), place
    elif words[0] == "python" and words[1] != "-m":
        assert (ROOT / words[1]).is_file(), f"{place}: {words[1]}"
    elif words[0] == "python":
        assert importlib.util.find_spec(words[2]), f"{place}: {words[2]}"
    else:
        options = [word for word in words if word.startswith("--")]
        for name in words[1].split("|"):
            names = [name, *words[2:3]] if name == "sass" else [name]
            said = CliRunner().invoke(app, [*names, "--help"], terminal_width=200)
            assert said.exit_code == 0, f"{place}: no warploom {' '.join(names)}"
            missing = [option for option in options if option not in said.output]
            assert not missing, f"{place}: {' '.join(names)} has no {missing[0]}"


REPEATED = repeated()


def has_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the examples and the kernels of the emulation."""
    for folder in ("examples", "bench"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.setitem(SECONDS, "quick", 120.0)  # which compiling takes on a busy machine
    monkeypatch.setattr(FIRST, lambda self: None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "gated", raising=False)
    yield tmp_path
    uninstall()


@pytest.mark.parametrize("page", [p for p in PAGES if blocks((ROOT / p).read_text())])
def test_a_page_runs_as_it_is_written(page: str, here: Path) -> None:
    run_all((ROOT / page).read_text(), here, gpu=False, left_out=REPEATED[page])


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_the_text_exist(page: str) -> None:
    for form in INLINE.findall((ROOT / page).read_text()):
        check_form(form, page)


@pytest.mark.parametrize("example", sorted(path.name for path in (ROOT / "examples").glob("*.py")))
def test_the_commands_of_an_example_run(example: str, here: Path) -> None:
    said = ast.get_docstring(ast.parse((ROOT / "examples" / example).read_text())) or ""
    for line in commands(said, ""):
        if line not in REPEATED[f"examples/{example}"]:
            command(line, f"examples/{example}", gpu=False)


def test_a_command_that_is_left_out_is_run_elsewhere() -> None:
    shown = {page: commands((ROOT / page).read_text(), "$ ") for page in PAGES}
    ran = {meaning(a) for page, lines in shown.items() for a in lines if a not in REPEATED[page]}
    assert {meaning(line) for lines in shown.values() for line in lines} == ran
    out = "warploom build gemm -o out/gemm"
    assert needed(out, [out, "warploom sass lint out/gemm/gemm.cubin"])
    assert not needed(out, [out, "warploom sass lint out/other.cubin"])
    assert meaning(out) == meaning("warploom build gemm -o elsewhere  # said otherwise")
    assert meaning(out) != meaning("warploom build gemm --gpu a100 -o out/gemm")


def places(page: str) -> Iterator[str]:
    """What a page calls a place in the repository: `x/y.py`, `y.py`, `x/y/` and `warploom.x.y`."""
    for word in re.findall(r"`([^`\s]+)`", page):
        if re.fullmatch(r"[\w./-]+\.(py|toml|j2)|[\w-]+(/[\w-]+)+/", word):
            yield word
    yield from re.findall(r"\bwarploom(?:\.[a-z]\w*)+", page)


def exists(place: str, files: frozenset[str]) -> bool:
    """A name from the root or below any folder; of a module or of what stands in one."""
    if place.startswith("warploom."):
        above, _, last = place.rpartition(".")
        module = "/".join(place.split("."))
        inside = f"src/{module}.py" in files or f"src/{module}/__init__.py" in files
        return inside or hasattr(importlib.import_module(above), last)
    if place.endswith("/"):
        return any(f"/{place}" in f"/{file}" for file in files)
    return any(f"/{file}".endswith(f"/{place}") for file in files)


@pytest.fixture(scope="module")
def files() -> frozenset[str]:
    folders = ("src", "tests", "bench", "examples", "docs")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    return frozenset(path.relative_to(ROOT).as_posix() for path in found) | {
        "README.md",
        "pyproject.toml",
    }


@pytest.mark.parametrize("page", TEXTS)
def test_a_place_that_is_named_exists(page: str, files: frozenset[str]) -> None:
    named = set(places((ROOT / page).read_text()))
    assert [place for place in sorted(named) if not exists(place, files)] == []


@pytest.mark.parametrize("page", TEXTS)
def test_a_link_leads_somewhere(page: str) -> None:
    links = re.findall(r"\]\((?!https?:)([^)\s]+)\)", (ROOT / page).read_text())
    dead = [link for link in links if not leads_somewhere(link, ROOT / page)]
    assert dead == []


def leads_somewhere(link: str, page: Path) -> bool:
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    if not target.exists() or not anchor:
        return target.exists()
    text = FENCE.sub("", target.read_text())
    return anchor in map(address, re.findall(r"^#+ (.+)$", text, re.MULTILINE))


def address(heading: str) -> str:
    """The anchor that GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize(
    "text",
    [
        "in `codegen/emit.py`",
        "see `emit_nothing.py`",
        "below `schedule/graphs/`",
        "`from warploom.diagram import derive`",
        "`warploom.tile.attend`",
    ],
)
def test_a_place_that_is_gone_is_noticed(text: str, files: frozenset[str]) -> None:
    (place,) = places(text)
    assert not exists(place, files)


@pytest.mark.parametrize("link", ["docs/diagram.md", "docs/results.md#nothing", "#nowhere"])
def test_a_link_to_nowhere_is_noticed(link: str) -> None:
    assert not leads_somewhere(link, ROOT / "README.md")


def test_the_pages_have_something_to_run(here: Path) -> None:
    """A pattern that finds no block would pass every page."""
    found = {page: blocks((ROOT / page).read_text()) for page in PAGES}
    assert len(found["docs/tutorial.md"]) >= 15
    for page, least in {"README.md": 5, "docs/tour.md": 9}.items():
        text = (ROOT / page).read_text()
        assert len(re.findall(r"^\$ warploom \w+", text, re.MULTILINE)) >= least


@pytest.mark.gpu
@pytest.mark.parametrize("page", ["README.md", "docs/tour.md", "docs/tutorial.md"])
def test_a_page_runs_to_the_end_on_a_gpu(page: str, here: Path) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    run_all((ROOT / page).read_text(), here, gpu=True)


PLANTED = {
    "line 6 of the page": "```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n",
    r"line 2: warploom run nothing": "```console\n$ warploom run nothing\n```\n",
    "line 2: only warploom's": "```\n$ rm -r out\n```\n",
    "line 2: no warploom walk": "```\nwarploom walk NAME\n```\n",
    "line 2: run has no --off": "```\nwarploom run NAME [--off gpu]\n```\n",
    "line 2: bench.none": "```\npython -m bench.none --gpus 0\n```\n",
    "line 2: examples/none.py": "```\npython examples/none.py --gpus 0\n```\n",
    "line 2: no attend": "```python gpu\nfrom warploom.tile import attend\n```\n",
    "line 2: a note 'gpus'": "```python gpus\nx = 1\n```\n",
}


@pytest.mark.parametrize("message", PLANTED)
def test_a_page_that_is_not_so_fails(message: str, here: Path) -> None:
    with pytest.raises(AssertionError, match=message):
        run_all(PLANTED[message], here, gpu=False)


def test_python_that_fails_fails(here: Path) -> None:
    with pytest.raises(WarploomError, match="unknown machine"):
        run_all("```python\nfrom warploom import machine\nmachine.load('h900')\n```\n", here, False)
