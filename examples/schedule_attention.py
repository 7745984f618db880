"""Find, prove, check, run and draw a schedule for attention; then compare it with FA3's.

python examples/schedule_attention.py
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from warploom.schedule import check, lower_bounds, verify
from warploom.schedule.model.costs import costs, target
from warploom.schedule.published.catalogue import build
from warploom.schedule.published.templates import pinned, template
from warploom.schedule.solve.solve import Problem, solve
from warploom.schedule.solve.solver import Effort
from warploom.schedule.view.gantt import show
from warploom.schedule.view.picture import svg


def main() -> None:
    table = costs("h100")
    graph, where = build("attention", table, {"keys": 128, "head": 128}), target(table)
    print(lower_bounds(graph, where).reason)

    problem = Problem(graph, where, effort=Effort(seconds=30))
    schedule = solve(problem)  # every answer has passed the checker
    check(graph, where, schedule, problem.prices).raise_if_failed()
    rates = verify(graph, where, schedule)  # in-order groups, random load latencies
    show(graph, where, schedule)
    print(f"free-running: {rates.free:.0f} cycles an iteration; order needed: {rates.needs_order}")
    Path("out").mkdir(exist_ok=True)
    Path("out/attention.svg").write_text(svg(graph, where, schedule))

    by_hand = solve(pinned(template("fa3_pingpong"), replace(problem, objectives=())))
    print(f"FA3's ping-pong at its best: II {by_hand.initiation_interval}")


if __name__ == "__main__":
    main()
