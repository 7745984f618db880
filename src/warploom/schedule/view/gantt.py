"""The steady state in a terminal: one line a warp group and a unit, one column a slice of II."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from warploom.schedule.model.graph import Graph
from warploom.schedule.model.schedule import Schedule
from warploom.schedule.model.target import Target
from warploom.schedule.view.steady import Bar, Row, steady_rows

STYLES = ("black on cyan", "black on yellow", "black on green", "black on magenta")
SHARED = "black on white"
LABEL = 14


def gantt(graph: Graph, target: Target, schedule: Schedule, width: int = 100) -> RenderableType:
    """A picture of one interval `width` columns wide, and what its marks mean."""
    columns = max(24, width - LABEL - 8)
    lines: list[Text] = [_scale(schedule.initiation_interval, columns)]
    kind = ""
    for row in steady_rows(graph, target, schedule):
        if row.kind != kind:
            kind = row.kind
            title = "warp groups" if kind == "group" else "units"
            lines.append(Text(title, style="bold"))
        lines.append(_line(row, schedule.initiation_interval, columns))
    note = "colour: sub-tile; ' marks: iterations older than the newest"
    lines.append(Text(" " * LABEL + note, style="dim"))
    return Group(*lines)


def _scale(interval: int, columns: int) -> Text:
    text = " " * LABEL
    step = max(1, columns // 6)
    for column in range(0, columns, step):
        mark = f"|{round(column * interval / columns)}"
        text += mark.ljust(min(step, columns - column))[: columns - column]
    return Text(f"{text}|{interval}", style="dim")


def _line(row: Row, interval: int, columns: int) -> Text:
    cells: list[tuple[str, str]] = [("·", "dim")] * columns
    for bar in row.bars:
        first = bar.start * columns // interval
        last = max(first + 1, -(-bar.end * columns // interval))
        aged = bar.node + "'" * bar.back
        label = (aged if len(aged) <= last - first else bar.node[: last - first]).center(
            last - first
        )
        for offset, character in enumerate(label[: columns - first]):
            cells[first + offset] = (character, _style(bar))
    text = Text(f"{row.name:<{LABEL - 1}} ")
    for character, style in cells:
        text.append(character, style)
    text.append(f" {row.busy:4.0%}", "bold" if row.busy > 0.995 else "dim")
    return text


def _style(bar: Bar) -> str:
    return SHARED if bar.subtile is None else STYLES[bar.subtile % len(STYLES)]


def describe(graph: Graph, schedule: Schedule) -> Table:
    """Groups: warps, registers, and their operations in the order of one interval."""
    table = Table(box=None, pad_edge=False)
    for name in ("group", "warps", "regs/thread", "one interval, in issue order (stage)"):
        table.add_column(name)
    for group in schedule.groups:
        interval = schedule.initiation_interval
        own = [n.id for n in graph.nodes if schedule.group[n.id] == group.name]
        own.sort(key=lambda name: schedule.time[name] % interval)
        body = "  ".join(f"{name}({schedule.stage(name)})" for name in own)
        table.add_row(group.name, str(group.warps), str(group.registers), body)
    return table


def show(graph: Graph, target: Target, schedule: Schedule, console: Console | None = None) -> None:
    """Print everything a person wants to see of a schedule."""
    out = console or Console(highlight=False)
    proof = schedule.proof
    interval = schedule.initiation_interval
    out.print(
        f"[bold]{graph.name}[/] on {target.name}: "
        f"[bold]II {interval} cycles[/] (an iteration begins so often), each takes "
        f"{schedule.length} cycles, {schedule.stages} iterations in flight"
    )
    if graph.flops:
        per = graph.flops / interval
        out.print(f"  {per:.0f} useful FLOP a cycle and SM ({graph.flops} an iteration)")
    word = "unproved" if proof.status in ("unproved", "written") else "proved"
    out.print(f"  II {word}: {proof.reason} [dim]({proof.seconds:.2f} s)[/]")
    if proof.confirmed:
        out.print(f"  lower bound {proof.lower_bound}: {proof.confirmed}")
    for name in proof.unreached:
        out.print(f"  {name}: not reached in time")
    for objective in schedule.objectives:
        out.print(f"  {objective} [dim]({objective.seconds:.2f} s)[/]")
    rings = ", ".join(f"{name} x{depth}" for name, depth in schedule.ring_depth.items())
    out.print(f"  slots of rings: {rings or 'none'}")
    out.print()
    out.print(describe(graph, schedule))
    out.print()
    out.print(gantt(graph, target, schedule, min(out.width, 140)))
