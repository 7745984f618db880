"""Claim `schedule-proof`: time to a proved, checked schedule beside the paper's search times.

    python bench/schedule.py            needs OR-Tools, no GPU; about five minutes on two cores

The paper (Soi et al., OSDI'26, table 1) searched its own graphs with its own costs on one core of
a Xeon Platinum 8570; graphs and costs here are ours, so a ratio compares tools, not machines.
Writes bench/results/schedule_proof.json and docs/img/schedule_growth.svg.
"""

from __future__ import annotations

import datetime
import math
import random
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src")]

from warploom.errors import CheckFailed, WarploomError  # noqa: E402
from warploom.evidence import Evidence, write_rows  # noqa: E402
from warploom.files import write_text_atomically  # noqa: E402
from warploom.schedule import (  # noqa: E402  # noqa: E402
    Edge,
    Graph,
    GroupSpec,
    Node,
    Target,
    Unit,
    UnitUse,
    check,
    lower_bounds,
    verify,
)
from warploom.schedule.catalogue import build  # noqa: E402
from warploom.schedule.costs import costs, target  # noqa: E402
from warploom.schedule.explain import explain  # noqa: E402
from warploom.schedule.solve import Clock, Problem, modulo_schedule, solve  # noqa: E402
from warploom.schedule.solver import NAME, Effort  # noqa: E402
from warploom.schedule.templates import pinned, template  # noqa: E402

RUNS = 5
FULL_SECONDS = 30.0
GROWTH_SECONDS = 10.0
SIZES = (10, 20, 40, 60, 80, 100, 130, 160, 200)


@dataclass(frozen=True)
class Case:
    """A graph of ours beside one of the paper's, and the paper's seconds."""

    label: str
    graph: str
    gpu: str
    paper: float
    registers: int = 0


CASES = (
    Case("forward, Hopper", "attention", "h100", 28),
    Case("forward, Blackwell", "attention", "b200", 18),
    Case("backward, Hopper", "attention_backward", "h100", 84),
    Case("backward, Blackwell, 128 registers", "attention_backward", "b200", 48, 128),
    Case("backward, Blackwell", "attention_backward", "b200", 242),
)


def problem_of(case: Case, seconds: float = FULL_SECONDS) -> Problem:
    """The case's problem with every objective."""
    table = costs(case.gpu)
    where = target(table, registers=case.registers)
    return Problem(build(case.graph, table), where, effort=Effort(seconds))


def measure(case: Case, machine: str) -> Evidence:
    """Median seconds from graph to checked schedule with a proved interval, and what follows."""
    full = problem_of(case)
    bare = replace(full, objectives=())
    seconds: list[float] = []
    for _ in range(RUNS):
        begin = time.perf_counter()
        schedule = solve(bare)
        seconds.append(time.perf_counter() - begin)
    begin = time.perf_counter()
    best = solve(full)
    total = time.perf_counter() - begin
    rates = verify(full.graph, full.target, best)
    report = check(full.graph, full.target, best, full.prices)
    ours = statistics.median(seconds)
    checks: dict[str, Any] = {
        "checker": "pass" if report.passed else "fail",
        "simulated cycles an iteration": rates.ordered,
        "interval proof": schedule.proof.status,
        "initiation interval": best.initiation_interval,
        "all objectives, seconds": round(total, 2),
        "objectives": {
            o.name: "proved" if o.proved else f"gap {o.gap:.1%}" for o in best.objectives
        },
        "nodes": len(full.graph.nodes),
    }
    if (case.graph, case.gpu) == ("attention", "b200"):
        checks |= {"ablations": ablations(full, best.initiation_interval)}
    if case.graph == "attention":
        checks |= {"templates, interval": compare_templates(full)}
    return Evidence(
        claim="schedule-proof",
        kernel=f"{case.graph}@{case.gpu}"
        + (f", {case.registers} registers" * bool(case.registers)),
        shape=" ".join(f"{k}={v}" for k, v in full.graph.params.items()),
        dtype="bf16",
        device=machine,
        driver="none (CPU)",
        compiler=NAME,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        command="python bench/schedule.py",
        unit="s",
        better="lower",
        ours=round(ours, 4),
        baselines={"Twill, as published": case.paper},
        ratio_to_best=round(case.paper / ours, 2),
        ci95=(round(case.paper / max(seconds), 2), round(case.paper / min(seconds), 2)),
        samples=RUNS,
        checks=checks,
        notes=f"{case.label}: paper's graph, costs and CPU (one core, Xeon Platinum 8570) differ "
        "from ours; ours is the time to a checked schedule whose interval is proved, one solver "
        f"thread; ci95 is the range of {RUNS} runs; {load_note()}",
    )


def load_note() -> str:
    """Whether other work shared the cores."""
    busy = float(Path("/proc/loadavg").read_text().split()[0])
    return f"load average of the machine {busy:.1f}" + (
        ": other work shared the cores" if busy > 1.3 else ""
    )


def ablations(full: Problem, interval: int) -> dict[str, str]:
    """The paper's ablations at the smallest interval, each with its honest status."""
    # One wide group; a softmax group a sub-tile but none to rescale; values kept in their group.
    few = replace(full, target=full.target.with_groups(1, single=1))
    two = replace(full, target=full.target.with_groups(2, single=1))
    apart = replace(
        full,
        graph=replace(
            full.graph,
            edges=tuple(
                replace(e, spill_cost=10**6)
                if e.kind == "data" and full.graph.by_id[e.src].registers
                else e
                for e in full.graph.edges
            ),
        ),
    )
    asked = {
        "one wide group": explain(few, interval, 3),
        "two wide groups, no rescale group": explain(two, interval, 3),
        "no register value crosses groups": explain(apart, interval, 3),
    }
    found = {name: f"{item.status}: {item}" for name, item in asked.items()}
    table = costs("b200")
    whole = build("attention", table, {"rows": 128, "subtiles": 1})
    single = solve(Problem(whole, full.target, effort=Effort(20), objectives=()))
    found["no sub-tiles"] = (
        f"II {single.initiation_interval} for half the rows ({single.proof.status}): "
        f"{2 * single.initiation_interval / interval:.2f} x the cycles"
    )
    return found


def compare_templates(full: Problem) -> dict[str, str]:
    """Schedules that people wrote, at their best under the same costs."""
    found: dict[str, str] = {}
    for name in ("lcsf", "fa3_pingpong", "fa3_intra", "fa4"):
        try:
            it = pinned(template(name), replace(full, objectives=(), effort=Effort(20)))
            schedule = solve(it)
            rates = verify(it.graph, it.target, schedule)
            found[name] = (
                f"{schedule.initiation_interval} ({schedule.proof.status}, {rates.free:.0f} free)"
            )
        except WarploomError as error:
            found[name] = str(error)
    return found


def random_problem(count: int, seed: int) -> Problem:
    """A layered loop body of `count` operations, three wide groups on offer.

    As in kernels one unit binds (it gets whole multiples of 32 cycles, as instruction tiles do) and
    the other three are about half loaded.
    """
    chance = random.Random(seed)
    units = ("TC", "SFU", "ALU", "STORE")
    nodes = [
        Node(
            f"n{i}",
            f"op{i}",
            (
                UnitUse(
                    units[i % 4], 32 * chance.randint(2, 4) if i % 4 == 0 else chance.randint(8, 64)
                ),
            ),
            latency=chance.randint(16, 96),
            issue=1,
            registers=chance.choice((0, 64, 512)),
            asynchronous=i % 4 == 0,
        )
        for i in range(count)
    ]
    edges: list[Edge] = []
    for i in range(1, count):
        sources = {chance.randrange(max(0, i - 8), i) for _ in range(2)}
        edges += [
            Edge(f"n{j}", f"n{i}", nodes[j].latency, 0, "data", 40, i % 7 == 0) for j in sources
        ]
    edges += [Edge(f"n{i}", f"n{i - 4}", nodes[i].latency, 1) for i in range(4, count, 10)]
    groups = tuple(GroupSpec(f"compute{w}", 4) for w in range(3))
    graph = Graph(f"random-{count}", tuple(nodes), tuple(edges))
    where = Target("four units", tuple(Unit(name) for name in units), {}, groups)
    return Problem(graph, where, effort=Effort(GROWTH_SECONDS))


def growth() -> list[tuple[int, float, float]]:
    """(nodes, seconds of the modulo problem, seconds of the joint one) for random graphs."""
    rows: list[tuple[int, float, float]] = []
    for count in SIZES:
        problem = random_problem(count, seed=count)
        begin = time.perf_counter()
        bounds = lower_bounds(problem.graph, problem.target)
        modulo = modulo_schedule(problem, bounds, Clock(problem.effort))
        spent = time.perf_counter() - begin - modulo.seconds  # less the shortest length
        times = [spent if modulo.interval_bound >= modulo.interval else math.inf]
        begin = time.perf_counter()
        try:
            proved = solve(replace(problem, objectives=())).proof.status != "unproved"
        except CheckFailed:
            proved = False
        spent = time.perf_counter() - begin
        times.append(spent if proved else math.inf)
        rows.append((count, times[0], times[1]))
        print(f"{count:4} nodes: modulo {times[0]:.2f} s, joint {times[1]:.2f} s", flush=True)
    return rows


def growth_picture(rows: list[tuple[int, float, float]]) -> str:
    """Log-log lines of both columns; a missing point was not proved in the time limit."""
    width, height, left, bottom = 640, 380, 64, 330
    low, high = 0.01, 100.0

    def x(nodes: float) -> float:
        return left + (math.log(nodes / 8) / math.log(240 / 8)) * (width - left - 24)

    def y(seconds: float) -> float:
        return bottom - math.log(max(low, seconds) / low) / math.log(high / low) * (bottom - 48)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}"><style>text{{font:12px sans-serif;fill:#222}}'
        ".g{stroke:#ddd}.s{fill:#667}</style>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="{left}" y="24" font-weight="600">Seconds to a proved interval, random loop '
        "bodies, one solver thread</text>",
    ]
    parts += [
        f'<line class="g" x1="{left}" x2="{width - 24}" y1="{y(seconds):.1f}" '
        f'y2="{y(seconds):.1f}"/><text class="s" x="{left - 8}" y="{y(seconds) + 4:.1f}" '
        f'text-anchor="end">{seconds:g} s</text>'
        for seconds in (0.01, 0.1, 1, 10, 100)
    ]
    parts += [
        f'<text class="s" x="{x(nodes):.1f}" y="{bottom + 20}" text-anchor="middle">{nodes}</text>'
        for nodes in (10, 20, 40, 80, 160, 200)
    ]
    parts.append(
        f'<text class="s" x="{(left + width) / 2}" y="{bottom + 40}" text-anchor="middle">'
        "operations in the loop body</text>"
    )
    series = (("modulo, no warp groups", "#4e9fd1", 1), ("joint with 3 warp groups", "#e8a33d", 2))
    for name, colour, column in series:
        points = [(x(row[0]), y(row[column])) for row in rows if math.isfinite(row[column])]
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5" fill="{colour}"/>' for a, b in points]
        parts.append(
            f'<circle cx="{left + 16}" cy="{44 + 18 * column}" r="4" fill="{colour}"/>'
            f'<text x="{left + 26}" y="{48 + 18 * column}">{name}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def cpu() -> str:
    """The processor's name and how many cores this process may use."""
    names = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return f"{names[0] if names else 'unknown CPU'}, {len(names)} cores"


def main() -> None:
    """Measure, print and write."""
    machine = cpu()
    rows: list[Evidence] = []
    for case in CASES:
        row = measure(case, machine)
        rows.append(row)
        print(f"{row.kernel}: {row.ours:.2f} s, paper {case.paper:g} s, x{row.ratio_to_best}")
        print("   ", row.checks, flush=True)
    path = ROOT / "bench/results/schedule_proof.json"
    write_rows(path, rows)  # at once: what follows only adds to the first row
    grown = growth()
    extra = {
        str(n): {"modulo": _seconds(modulo), "joint": _seconds(joint)} for n, modulo, joint in grown
    }
    first = replace(rows[0], checks={**rows[0].checks, "seconds by nodes of random graphs": extra})
    write_rows(path, [first, *rows[1:]])
    write_text_atomically(ROOT / "docs/img/schedule_growth.svg", growth_picture(grown))


def _seconds(value: float) -> float | str:
    return round(value, 3) if math.isfinite(value) else f"not proved in {GROWTH_SECONDS:g} s"


if __name__ == "__main__":
    main()
