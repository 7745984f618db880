"""The one page of `warploom optimize`: derivation, program, schedule, code, verdicts, timing."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from warploom.report.pages import rendered


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


def page_html(page: Page) -> str:
    """The page as HTML."""
    pictures = [Markup(picture) for picture in page.pictures]
    return rendered("optimize.html.j2", page=page, pictures=pictures)
