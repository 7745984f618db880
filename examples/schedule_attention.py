"""Find, prove, check, run and draw a schedule for the loop of attention.

python examples/schedule_attention.py
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from warploom.autosched.solve import loop_problem
from warploom.kernels.select import written
from warploom.schedule import check, lower_bounds, verify
from warploom.schedule.model.costs import costs
from warploom.schedule.solve.solve import solve
from warploom.schedule.solve.solver import Effort
from warploom.schedule.view.gantt import show
from warploom.schedule.view.picture import svg


def main() -> None:
    program, launch = written("attention", {"head_dim": "128"})
    problem = loop_problem(program, launch, costs("h200", "high"))
    problem = replace(problem, effort=Effort(seconds=30))
    graph, where = problem.graph, problem.target
    print(lower_bounds(graph, where).reason)

    schedule = solve(problem)  # every answer has passed the checker
    check(graph, where, schedule, problem.prices).raise_if_failed()
    rates = verify(graph, where, schedule)  # in-order groups, random load latencies
    show(graph, where, schedule)
    print(f"free-running: {rates.free:.0f} cycles an iteration; order needed: {rates.needs_order}")
    Path("out").mkdir(exist_ok=True)
    Path("out/attention.svg").write_text(svg(graph, where, schedule))


if __name__ == "__main__":
    main()
