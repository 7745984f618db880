"""The notebooks of `examples/notebooks`, run cell by cell, as pages of the documentation site.

    python -m bench.notebooks          # writes build/notebooks/NAME.md

In the repository they hold no outputs. A cell runs as in a notebook: what it prints is shown, and
its last expression, as HTML where it has such a form.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import linecache
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "notebooks"
PAGES = ROOT / "build" / "notebooks"


@dataclass(frozen=True)
class Ran:
    """A cell, and what it showed: text, and the HTML of its last expression or ""."""

    kind: str
    source: str
    text: str = ""
    html: str = ""


def cells(path: Path) -> list[tuple[str, str]]:
    """(kind, source) of every cell."""
    data = json.loads(path.read_text())
    return [(cell["cell_type"], "".join(cell["source"])) for cell in data["cells"]]


def run(path: Path) -> Iterator[Ran]:
    """Run a notebook in the current folder; raises what a cell raises."""
    space: dict[str, Any] = {"__name__": "__main__"}
    for number, (kind, source) in enumerate(cells(path)):
        if kind != "code":
            yield Ran(kind, source)
            continue
        name = f"<{path.stem} {number}>"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            shown = _last(source, name, space)
            html = shown._repr_html_() if hasattr(shown, "_repr_html_") else ""
            if shown is not None and not html:
                print(repr(shown))
        yield Ran(kind, source, said.getvalue(), html)


def _last(source: str, name: str, space: dict[str, Any]) -> Any:
    """Run a cell and give the value of its last expression, or None."""
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), space)
    if last is None:
        return None
    return eval(compile(ast.Expression(last.value), name, "eval"), space)


def page(path: Path) -> str:
    """A notebook as a page with its outputs."""
    parts: list[str] = []
    for one in run(path):
        if one.kind != "code":
            parts.append(one.source)
            continue
        parts.append(f"```python\n{one.source}\n```")
        if one.text:
            parts.append(f"```text\n{one.text.rstrip()}\n```")
        if one.html:
            parts.append(f'<div class="output">{one.html}</div>')
    parts.append(f"The notebook: `{path.relative_to(ROOT)}`.")
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Write the page of every notebook."""
    PAGES.mkdir(parents=True, exist_ok=True)
    before = Path.cwd()
    for path in sorted(FOLDER.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            try:
                text = page(path)
            finally:
                os.chdir(before)
        (PAGES / f"{path.stem}.md").write_text(text)
        print(PAGES / f"{path.stem}.md")


if __name__ == "__main__":
    main()
