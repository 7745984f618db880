"""The steady state as SVG: self-contained, readable in light and dark, every bar has a title."""

from __future__ import annotations

from html import escape

from warploom.schedule.model.graph import Graph
from warploom.schedule.model.schedule import Schedule
from warploom.schedule.model.target import Target
from warploom.schedule.view.steady import Bar, Row, steady_rows

WIDTH, LABEL, ROW, GAP, TOP = 1120, 118, 26, 6, 74
COLOURS = ("#4e9fd1", "#e8a33d", "#5fb878", "#b57edc")
SHARED = "#9aa5b1"
CHARACTER = 6.4  # width of a label's character at 11 px

STYLE = """text{font:11px ui-sans-serif,system-ui,sans-serif;fill:#222}
.t{font-size:15px;font-weight:600}.s{fill:#667}.g{stroke:#8889;stroke-dasharray:2 4}
.n{fill:#111}.r{fill:#8881}"""


def svg(graph: Graph, target: Target, schedule: Schedule) -> str:
    """One interval: warp groups above, units below; a lighter bar is an older iteration."""
    rows = steady_rows(graph, target, schedule)
    interval = schedule.initiation_interval
    height = TOP + (ROW + GAP) * len(rows) + 3 * GAP + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<style>{STYLE}</style>",
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        f'<text class="t" x="12" y="24">{escape(_title(graph, schedule))}</text>',
        f'<text class="s" x="12" y="42">{escape(schedule.proof.status)}: '
        f"{escape(_shorten(schedule.proof.reason, 150))}</text>",
    ]
    top, kind, body = TOP, "group", list[str]()
    for row in rows:
        if row.kind != kind:
            kind, top = row.kind, top + 3 * GAP
        body += _row(row, top, interval)
        top += ROW + GAP
    parts += _ticks(interval, TOP - 8, top)
    parts += [*body, *_legend(graph, top + 14), "</svg>"]
    return "\n".join(parts) + "\n"


def _title(graph: Graph, schedule: Schedule) -> str:
    rings = ", ".join(f"{name} x{depth}" for name, depth in schedule.ring_depth.items())
    return (
        f"{graph.name} on {schedule.target}: II {schedule.initiation_interval}, length "
        f"{schedule.length}, {schedule.stages} stages" + (f", rings {rings}" if rings else "")
    )


def _shorten(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _x(cycle: float, interval: int) -> float:
    return LABEL + cycle * (WIDTH - LABEL - 60) / interval


def _ticks(interval: int, top: int, bottom: int) -> list[str]:
    parts: list[str] = []
    for index in range(9):
        cycle = round(index * interval / 8)
        x = _x(cycle, interval)
        parts.append(f'<line class="g" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"/>')
        parts.append(
            f'<text class="s" x="{x:.1f}" y="{top - 4}" text-anchor="middle">{cycle}</text>'
        )
    return parts


def _row(row: Row, top: int, interval: int) -> list[str]:
    middle = top + ROW / 2 + 4
    width = _x(interval, interval) - LABEL
    parts = [
        f'<text x="{LABEL - 8}" y="{middle}" text-anchor="end">{escape(row.name)}</text>',
        f'<rect class="r" x="{LABEL}" y="{top}" width="{width:.1f}" height="{ROW}"/>',
    ]
    nexts = [bar.start for bar in row.bars[1:]] + [interval]
    parts += [
        _bar(bar, top, interval, min(bar.end, max(following, bar.start)))
        for bar, following in zip(row.bars, nexts, strict=True)
    ]
    end = _x(interval, interval) + 8
    parts.append(f'<text class="s" x="{end:.1f}" y="{middle}">{row.busy:.0%}</text>')
    return parts


def _bar(bar: Bar, top: int, interval: int, clear: int) -> str:
    """One bar; its label sits in [start, clear), the part that no later bar covers."""
    left, right = _x(bar.start, interval), _x(bar.end, interval)
    width = max(1.5, right - left - 0.5)
    colour = SHARED if bar.subtile is None else COLOURS[bar.subtile % len(COLOURS)]
    older = bar.back
    opacity = max(0.45, 1 - 0.3 * older)
    age = f", {older} iteration{'s' * (older > 1)} older" if older else ""
    wait = ", after a barrier wait" if bar.wait else ""
    title = f"{bar.node} ({bar.op}): cycles {bar.start} to {bar.end}{age}{wait}"
    text = bar.node + "'" * older
    label = ""
    room = _x(clear, interval) - left
    if room > CHARACTER * len(text) + 2:
        label = (
            f'<text class="n" x="{left + room / 2:.1f}" y="{top + ROW / 2 + 4}" '
            f'text-anchor="middle">{escape(text)}</text>'
        )
    return (
        f'<g><title>{escape(title)}</title><rect x="{left:.1f}" y="{top}" width="{width:.1f}" '
        f'height="{ROW}" rx="3" fill="{colour}" fill-opacity="{opacity:.2f}"/>{label}</g>'
    )


def _legend(graph: Graph, top: int) -> list[str]:
    subtiles = sorted({node.subtile for node in graph.nodes if node.subtile is not None})
    entries = [(f"sub-tile {x}", COLOURS[x % len(COLOURS)]) for x in subtiles]
    entries.append(("shared", SHARED))
    parts: list[str] = []
    x = LABEL
    for text, colour in entries:
        parts.append(f'<rect x="{x}" y="{top}" width="12" height="12" rx="2" fill="{colour}"/>')
        parts.append(f'<text class="s" x="{x + 17}" y="{top + 10}">{text}</text>')
        x += 90
    note = "lighter and ' : an older iteration; a row's bars are the cycles it is held"
    parts.append(f'<text class="s" x="{x + 10}" y="{top + 10}">{note}</text>')
    return parts
