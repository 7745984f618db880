"""A loop body of your own: three operations, two units, one warp group.

python examples/schedule_custom.py
"""

from __future__ import annotations

from warploom.schedule import Edge, Graph, GroupSpec, Node, Target, Unit, UnitUse
from warploom.schedule.model.rules import PAPER
from warploom.schedule.solve.objectives import LENGTH
from warploom.schedule.solve.solve import Problem, solve


def main() -> None:
    # S = Q K, P = exp(S), O += P V: the worked example of the paper, every operation one cycle.
    graph = Graph(
        "three operations",
        (
            Node("S", "qk", (UnitUse("TC", 1),), latency=1),
            Node("P", "exp", (UnitUse("EXP", 1),), latency=1),
            Node("O", "pv", (UnitUse("TC", 1),), latency=1),
        ),
        (Edge("S", "P", 1), Edge("P", "O", 1), Edge("O", "O", 1, distance=1)),
    )
    where = Target("toy", (Unit("TC"), Unit("EXP")), {}, (GroupSpec("compute0", 4),))
    print(solve(Problem(graph, where, PAPER, objectives=(LENGTH,))))


if __name__ == "__main__":
    main()
