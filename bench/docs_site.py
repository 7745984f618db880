"""Hooks of the documentation site (`mkdocs.yml`): what differs there from the pages as they stand.

* A fence's note for the tests (`python part`, `file=NAME`) is left out.
* A link to a file beside `docs` is its name: the site has pages only.
* `build/notebooks` (`bench/notebooks.py`) and `build/reports` (`bench/reports.py`) are
  part of the site, and `<!-- report: NAME -->` becomes a link to the page of that name there.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

BUILD = Path(__file__).parents[1] / "build"
FENCE = re.compile(r"^(```\w*) [^\n`]+$", re.MULTILINE)
BESIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)\s]+)\)")
REPORT = re.compile(r"<!-- report: (\w+) -->")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page without notes, with links to reports."""
    markdown = BESIDE.sub(r"\1 (`\2`)", FENCE.sub(r"\1", markdown))
    return REPORT.sub(r"[Open the page](reports/\1.html)", markdown)


def on_files(files: Any, config: Any) -> Any:
    """The pages of the site with those that were made; a link to one that was not is a warning."""
    from mkdocs.structure.files import File  # noqa: PLC0415 - in the environment of `make docs` only

    made = (*BUILD.glob("reports/*.html"), *BUILD.glob("notebooks/*.md"))
    for path in sorted(made):
        name = str(path.relative_to(BUILD))
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files
