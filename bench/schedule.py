"""Claim `schedule-proof`: time to a proved, checked schedule beside the paper's search times.

    python -m bench.schedule                    needs OR-Tools, no GPU; about ten minutes
    python -m bench.schedule --keep-growth      the five graphs only, about six minutes
    python -m bench.schedule --growth-only      the growth only

`ours` and the ratio are about the interval alone, which in all five rows an analytic bound proves:
the checks beside them have the time for every objective, and which of those were proved. Lower
bounds are proved again by `refute.refute`, refutations of ablations too; what was not confirmed
in the time given says so.

Seconds are CPU seconds of the one solver thread, which on an idle core are seconds; the wall's
stand beside them.

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

from bench.evidence import Evidence, read_rows, write_rows
from bench.explain import explain
from bench.published import pinned, published, template
from warploom.errors import WarploomError
from warploom.files import write_text_atomically
from warploom.schedule import (
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
from warploom.schedule.model.costs import CostTable, costs, target
from warploom.schedule.refute.refute import CONFIRMED, refute, settled
from warploom.schedule.solve.solve import Clock, Problem, joint_encoding, modulo_schedule, solve
from warploom.schedule.solve.solver import Effort, run, solver_name

ROOT = Path(__file__).resolve().parent.parent

RUNS = 5
FULL_SECONDS = 60.0
TEMPLATE_SECONDS = 60.0
AGAIN_SECONDS = 20.0  # of the second search
GROWTH_SECONDS = 10.0
GROWTH = "seconds by nodes of random graphs"
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
    return Problem(published(case.graph, case.gpu), where, effort=Effort(seconds))


def measure(case: Case, machine: str) -> Evidence:
    """Median seconds from graph to checked schedule with a proved interval, and what follows."""
    full = problem_of(case)
    bare = replace(full, objectives=())
    seconds: list[float] = []
    wall: list[float] = []
    for _ in range(RUNS):
        begin, before = time.perf_counter(), time.process_time()
        schedule = solve(bare)
        seconds.append(time.process_time() - before)
        wall.append(time.perf_counter() - begin)
    begin, before = time.perf_counter(), time.process_time()
    best = solve(full)
    total, used = time.perf_counter() - begin, time.process_time() - before
    rates = verify(full.graph, full.target, best)
    report = check(full.graph, full.target, best, full.prices)
    proof = settled(full, best, AGAIN_SECONDS).proof
    ours = statistics.median(seconds)
    checks: dict[str, Any] = {
        "checker": "pass" if report.passed else "fail",
        "simulated cycles an iteration": rates.ordered,
        "interval proof": schedule.proof.status,
        "lower bound": f"{proof.lower_bound}, {proof.confirmed}",
        "initiation interval": best.initiation_interval,
        "wall seconds": round(statistics.median(wall), 2),
        "all objectives, seconds": round(used, 2),
        "all objectives, wall seconds": round(total, 2),
        "all objectives, paper / ours": (
            round(case.paper / used, 1) if best.proved else f"not all proved in {total:.0f} s"
        ),
        "all objectives proved": best.proved,
        "objectives": {
            o.name: "proved by the solver" if o.proved else f"gap {o.gap:.1%}"
            for o in best.objectives
        }
        | dict.fromkeys(best.proof.unreached, "not reached"),
        "nodes": len(full.graph.nodes),
    }
    if case.graph == "attention":
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
        compiler=solver_name(),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        command="python -m bench.schedule",
        unit="s",
        better="lower",
        ours=round(ours, 4),
        baselines={"Twill, as published": case.paper},
        ratio_to_best=round(case.paper / ours, 2),
        ci95=(round(case.paper / max(seconds), 2), round(case.paper / min(seconds), 2)),
        samples=RUNS,
        checks=checks,
        notes=f"{case.label}: paper's graph, costs and CPU (one core, Xeon Platinum 8570) differ "
        "from ours; ours is CPU time to a checked schedule whose interval alone is proved, one "
        f"solver thread; ci95 is the range of {RUNS} runs; {load_note()}",
    )


def load_note() -> str:
    """Whether other work shared the cores."""
    busy = float(Path("/proc/loadavg").read_text().split()[0])
    return f"load average of the machine {busy:.1f}" + (
        ": other work shared the cores" if busy > 1.3 else ""
    )


def ablations(full: Problem, interval: int) -> dict[str, str]:
    """The paper's ablations at the smallest interval, each with its honest status."""
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
    tensor_memory = any("tmem" in node.memory for node in full.graph.nodes)
    single = 1 if tensor_memory else 0
    one = replace(full, target=full.target.with_groups(1, single=single))
    found = {
        "one wide group": explained(one, interval),
        "no register value crosses groups": explained(apart, interval),
    }
    if tensor_memory:  # a softmax group a sub-tile, but none of its own to rescale
        two = replace(full, target=full.target.with_groups(2, single=1))
        found["two wide groups, no rescale group"] = explained(two, interval)
    else:
        found["one wide group, longer intervals"] = longer_intervals(one, interval)
    whole = published("attention_half", "b200" if tensor_memory else "h100")
    alone = solve(Problem(whole, full.target, effort=Effort(20), objectives=()))
    found["no sub-tiles"] = (
        f"II {alone.initiation_interval} for half the rows ({alone.proof.status}): "
        f"{2 * alone.initiation_interval / interval:.2f} x the cycles"
    )
    return found


def explained(problem: Problem, interval: int) -> str:
    """Why there is no schedule, and whether a second search refutes the interval too."""
    found = explain(problem, interval, 3)
    if found.status != "INFEASIBLE":
        return str(found)
    return f"{found} ({again(problem, interval, 3)})"


def again(problem: Problem, interval: int, stages: int) -> str:
    """What the second search says of an interval that the solver refutes."""
    verdict = refute(problem, interval, interval, stages, AGAIN_SECONDS)
    if verdict.schedule is not None:
        raise AssertionError(f"{interval} is refuted, but has a schedule: {verdict.schedule}")
    if verdict.status == "refuted":
        return CONFIRMED
    return f"not confirmed in {AGAIN_SECONDS:g} s"


def longer_intervals(one: Problem, interval: int) -> str:
    """Whether one wide group can hold longer intervals: INFEASIBLE, SAT or UNKNOWN in 10 s each."""
    seen: list[str] = []
    for eighths in (9, 10, 12, 14, 16):
        longer = interval * eighths // 8
        asked = run(joint_encoding(one, longer, 2).model, Effort(10), [])
        status = "SAT" if asked.found else asked.status
        if status == "INFEASIBLE":
            status += f" ({again(one, longer, 2)})"
        seen.append(f"{longer} {status}")
    return ", ".join(seen) + " with up to 2 stages"


def compare_templates(full: Problem) -> dict[str, str]:
    """Schedules that people wrote, at their best under the same costs."""
    found: dict[str, str] = {}
    for name in ("lcsf", "fa3_pingpong", "fa3_intra", "fa4"):
        try:
            limit = Effort(TEMPLATE_SECONDS)
            it = pinned(template(name), replace(full, objectives=(), effort=limit))
            schedule = solve(it)
            rates = verify(it.graph, it.target, schedule)
            proof = settled(it, schedule, AGAIN_SECONDS).proof
            found[name] = (
                f"{schedule.initiation_interval} ({proof.status}; lower bound {proof.lower_bound} "
                f"{proof.confirmed}; {rates.free:.0f} free)"
            )
        except WarploomError as error:
            found[name] = str(error)
    return found


def random_problem(count: int, seed: int) -> Problem:
    """A layered loop body of `count` operations at Hopper's measured costs, three wide groups.

    Every fourth operation is a product of 64 rows (the tensor core binds, as in kernels); between
    them exponentials, elementwise work and row maxima keep their pipes about half busy.
    """
    chance, table = random.Random(seed), costs("h200")
    edges: list[Edge] = []
    nodes = [_random_node(table, chance, number) for number in range(count)]
    for i in range(1, count):
        for j in {chance.randrange(max(0, i - 8), i) for _ in range(2)}:
            source = nodes[j]
            spill = table.cycles("handoff.fixed")
            spill += table.cycles("handoff.per_kib", 4 * source.registers / 1024)
            edges.append(
                Edge(f"n{j}", f"n{i}", source.latency, 0, "data", spill, source.asynchronous)
            )
    edges += [Edge(f"n{i}", f"n{i - 4}", nodes[i].latency, 1) for i in range(4, count, 10)]
    groups = tuple(GroupSpec(f"compute{w}", 4) for w in range(3))
    graph = Graph(f"random-{count}", tuple(nodes), tuple(edges))
    units = (Unit("TC"), Unit("SFU"), Unit("ALU"), Unit("HALF"))
    where = Target("four units", units, {}, groups)
    return Problem(graph, where, effort=Effort(GROWTH_SECONDS))


def _random_node(table: CostTable, chance: random.Random, number: int) -> Node:
    name, kind = f"n{number}", number % 4
    if kind == 0:
        columns, depth = chance.choice((64, 128)), chance.choice((64, 128))
        busy = table.tensor(2 * 64 * columns * depth)
        return Node(
            name,
            "mma",
            (UnitUse("TC", busy),),
            latency=busy + table.cycles("mma.latency"),
            issue=table.cycles("mma.issue"),
            registers=64 * chance.choice((0, 8, 16)),
            asynchronous=True,
        )
    elements = 1024 * chance.randint(1, 3)
    unit, busy, tail = (
        ("SFU", table.exponentials(elements), "mufu.latency"),
        ("ALU", table.lanes(6 * elements), "alu.latency"),
        ("HALF", table.comparisons(4 * elements), "reduce.latency"),
    )[kind - 1]
    return Node(
        name,
        unit.lower(),
        (UnitUse(unit, busy),),
        latency=busy + table.cycles(tail),
        issue=max(1, table.issue_slots(elements)),
        registers=64 * chance.choice((0, 1, 8)),
    )


def growth() -> list[tuple[int, float, float, float]]:
    """(nodes, seconds to the proved modulo interval, to the joint one, its gap) of random graphs.

    Seconds are those of the processor, so other work on it does not count.
    """
    rows: list[tuple[int, float, float, float]] = []
    for count in SIZES:
        problem = random_problem(count, seed=count)
        bounds = lower_bounds(problem.graph, problem.target)
        modulo = modulo_schedule(problem, bounds, Clock(problem.effort))
        alone = modulo.seconds if modulo.interval_bound >= modulo.interval else math.inf
        begin, wall = time.process_time(), time.perf_counter()
        best = solve(replace(problem, objectives=()))
        spent, took = time.process_time() - begin, time.perf_counter() - wall
        interval, bound = best.initiation_interval, best.proof.lower_bound
        joint = spent if best.proof.status != "unproved" else math.inf
        rows.append((count, alone, joint, (interval - bound) / interval))
        print(
            f"{count:4} nodes: modulo {alone:.2f} s, joint {joint:.2f} s, interval {interval}, "
            f"bound {bound}, {took:.1f} s on the wall",
            flush=True,
        )
    return rows


def growth_picture(rows: list[tuple[int, float, float, float]]) -> str:
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
    path = ROOT / "bench/results/schedule_proof.json"
    kept = {GROWTH: before[0].checks.get(GROWTH, {})} if (before := read_rows(path)) else {}
    rows: list[Evidence] = before if "--growth-only" in sys.argv[1:] else []
    for case in CASES[len(rows) :]:
        row = measure(case, machine)
        rows.append(row)
        print(f"{row.kernel}: {row.ours:.2f} s, paper {case.paper:g} s, x{row.ratio_to_best}")
        print("   ", row.checks, flush=True)
    rows[0] = replace(rows[0], checks={**rows[0].checks, **kept})
    write_rows(path, rows)  # at once: what follows only adds to the first row
    if "--keep-growth" in sys.argv[1:]:
        return
    grown = growth()
    extra = {
        str(n): {"modulo": _seconds(modulo), "joint": _seconds(joint), "gap": round(gap, 4)}
        for n, modulo, joint, gap in grown
    }
    first = replace(rows[0], checks={**rows[0].checks, GROWTH: extra})
    write_rows(path, [first, *rows[1:]])
    write_text_atomically(ROOT / "docs/img/schedule_growth.svg", growth_picture(grown))


def _seconds(value: float) -> float | str:
    return round(value, 3) if math.isfinite(value) else f"not proved in {GROWTH_SECONDS:g} s"


if __name__ == "__main__":
    main()
