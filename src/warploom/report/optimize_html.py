"""The one page of `warploom optimize`: figures, timeline, space, program, code, verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from warploom.report.pages import Figure, rendered


@dataclass(frozen=True)
class Line:
    """A line of code with the number of the step whose code it is, or of its operation."""

    label: str
    text: str
    step: int = -1
    op: int = -1


@dataclass(frozen=True)
class Page:
    """What the page shows, as text and rows of text; empty parts are said to be absent.

    answers     (question, sentences) of the first screen
    timelines   bars of each loop (`flows.optimize_page`)
    space       points with predicted and measured times; `recorded` says where the latter are from
    steps       (name, numbers of the operations that it does, kind by which it is coloured), which
                bars and lines refer to
    checked     what the interpreter said of the program
    schedules   (name, cycles an iteration, bound or why not, note)
    pictures    SVG documents of ours, one a loop; every other string is escaped
    measured    (what, value); empty: nothing was measured
    """

    title: str
    summary: str
    figures: Sequence[Figure] = ()
    answers: Sequence[tuple[str, Sequence[str]]] = ()
    timelines: Sequence[dict[str, Any]] = ()
    space: Sequence[dict[str, Any]] = ()
    recorded: str = ""
    steps: Sequence[tuple[str, list[int], str]] = ()
    program: Sequence[Line] = ()
    cuda: Sequence[Line] = ()
    sass: Sequence[Line] = ()
    derivation: str = ""
    checked: str = ""
    schedules: Sequence[tuple[str, str, str, str]] = ()
    schedule_text: str = ""
    pictures: Sequence[str] = field(default_factory=list[str])
    facts: Sequence[tuple[str, str]] = ()
    measured: Sequence[tuple[str, str]] = ()
    seconds: Sequence[tuple[str, str]] = ()

    @property
    def stamped(self) -> bool:
        """Whether a timeline holds time stamps."""
        bars = (bar for one in self.timelines for row in one["rows"] for bar in row["bars"])
        return any(bar[3] == "stamped" for bar in bars)

    @property
    def kinds(self) -> set[str]:
        """The kinds of the steps, for the legend."""
        return {kind for _, _, kind in self.steps}


def page_html(page: Page) -> str:
    """The page as HTML."""
    pictures = [Markup(picture) for picture in page.pictures]
    data = {"steps": page.steps, "timelines": page.timelines, "space": page.space}
    return rendered("optimize.html.j2", page=page, pictures=pictures, data=data)
