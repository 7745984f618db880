"""The one page of `warploom optimize`: derivation, program, schedule, code, verdicts, timing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import jinja2
from markupsafe import Markup

from warploom import __version__


@dataclass(frozen=True)
class Page:
    """What the page shows, as text and rows of text; empty parts are said to be absent.

    checked     what the interpreter said of the program
    schedules   (name, cycles an iteration, bound or why not, note)
    pictures    SVG documents of ours, one a loop; every other string is escaped
    measured    (what, value); empty: nothing was measured
    """

    title: str
    summary: str
    derivation: str
    program: str
    checked: str
    schedules: list[tuple[str, str, str, str]]
    schedule_text: str
    pictures: list[str]
    cuda: str
    facts: list[tuple[str, str]]
    measured: list[tuple[str, str]]
    seconds: list[tuple[str, str]]


@cache
def _templates() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("warploom.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def page_html(page: Page) -> str:
    """One self-contained HTML file: no script, no link to anywhere."""
    template = _templates().get_template("optimize.html.j2")
    pictures = [Markup(picture) for picture in page.pictures]
    return template.render(page=page, pictures=pictures, version=__version__)
