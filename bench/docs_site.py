"""Hooks of the documentation site (`mkdocs.yml`): what differs there from the pages as they stand.

* A fence's note for the tests (`python part`, `file=NAME`) is left out.
* `build/reports` (`bench/reports.py`) is part of the site, and `<!-- report: NAME -->` becomes a
  link to the page of that name there.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

REPORTS = Path(__file__).parents[1] / "build" / "reports"
FENCE = re.compile(r"^(```\w*) [^\n`]+$", re.MULTILINE)
REPORT = re.compile(r"<!-- report: (\w+) -->")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page without notes, with links to reports."""
    return REPORT.sub(r"[Open the page](reports/\1.html)", FENCE.sub(r"\1", markdown))


def on_files(files: Any, config: Any) -> Any:
    """The pages of the site with the reports; a link to one that was not made is a warning."""
    from mkdocs.structure.files import File  # noqa: PLC0415 - in the environment of `make docs` only

    for path in sorted(REPORTS.glob("*.html")):
        name = f"reports/{path.name}"
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files
