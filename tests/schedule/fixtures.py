"""Worked graphs A (the paper's) and B (attention in sub-tiles), targets and witness schedules."""

from __future__ import annotations

from warploom.schedule import Edge, Graph, GroupSpec, Node, Schedule, Target, Unit, UnitUse
from warploom.schedule.model.assemble import assemble
from warploom.schedule.model.rules import PAPER, Rules

UNITS = ("TC", "SFU", "CUDA", "TMA")


def graph_a() -> Graph:
    nodes = tuple(
        Node(name, name, (UnitUse(unit, 1),), 1, min_warps=4)
        for name, unit in (("S", "TC"), ("P", "EXP"), ("O", "TC"))
    )
    edges = (Edge("S", "P", 1), Edge("P", "O", 1), Edge("O", "O", 1, 1))
    return Graph("graph A", nodes, edges)


def target_a() -> Target:
    return Target("two units", (Unit("TC"), Unit("EXP")), {}, (GroupSpec("compute0", 4),))


# op, unit, latency, occupancy, registers, spill cost
CHAIN = {
    "S": ("qk", "TC", 512, 512, 8192, 150),
    "M": ("max", "CUDA", 128, 64, 64, 40),
    "A": ("alpha", "SFU", 40, 1, 64, 40),
    "U": ("subtract", "CUDA", 64, 64, 8192, 150),
    "P": ("exp2", "SFU", 512, 512, 8192, 150),
    "R": ("sum", "CUDA", 128, 64, 64, 40),
    "C": ("convert", "CUDA", 32, 32, 4096, 75),
    "X": ("rescale", "CUDA", 64, 64, 8192, 150),
    "O": ("pv", "TC", 512, 512, 8192, 150),
}
# src, dst, delay, distance, blocking
LINKS = (
    ("S", "M", 512, 0, True),
    ("S", "U", 512, 0, True),
    ("M", "M", 128, 1, False),
    ("P", "C", 512, 0, False),
    ("M", "A", 128, 0, False),
    ("M", "U", 128, 0, False),
    ("U", "P", 64, 0, False),
    ("P", "R", 512, 0, False),
    ("R", "R", 128, 1, False),
    ("C", "O", 32, 0, False),
    ("A", "X", 40, 0, False),
    ("O", "X", 512, 1, True),
    ("X", "O", 64, 0, False),
)


def graph_b(*, prime: bool = False) -> Graph:
    nodes = [
        Node(
            name,
            "load",
            (UnitUse("TMA", 100),),
            600,
            issue=1,
            memory={"smem": 32768},
            min_warps=1,
            asynchronous=True,
            variable_latency=True,
        )
        for name in ("K", "V")
    ]
    edges: list[Edge] = []
    for x in (0, 1):
        for name, (op, unit, latency, occupancy, registers, _) in CHAIN.items():
            slow = unit == "TC"
            nodes.append(
                Node(
                    f"{name}{x}",
                    op,
                    (UnitUse(unit, occupancy),),
                    latency,
                    issue=int(slow),
                    registers=registers,
                    asynchronous=slow,
                    subtile=x,
                )
            )
        links = (*LINKS, ("A", "R", 40, 0, False)) if prime else LINKS
        edges += [
            Edge("K", f"S{x}", 0, 0, "ring", 0, True),
            Edge("V", f"O{x}", 0, 0, "ring", 0, True),
        ]
        edges += [
            Edge(f"{a}{x}", f"{b}{x}", delay, distance, "data", CHAIN[a][5], blocking)
            for a, b, delay, distance, blocking in links
        ]
    return Graph("graph B", tuple(nodes), tuple(edges))


def target_b(groups: int = 2) -> Target:
    return Target(
        "worked Hopper",
        tuple(Unit(name) for name in UNITS),
        {"smem": 232448},
        (GroupSpec("load", 1, loads=True), *(GroupSpec(f"compute{i}", 4) for i in range(groups))),
    )


COLUMNS = "S0 M0 U0 A0 P0 R0 C0 X0 O0 S1 M1 U1 A1 P1 R1 C1 X1 O1".split()
WITNESSES = {
    "Wa": "512 1025 1153 1257 1297 1809 1937 1969 3072 0 513 681 641 745 1297 1425 3505 3584",
    "Wb": "512 1025 1280 1216 1344 1888 1856 2624 3072 0 512 640 641 704 1216 1504 1344 1536",
    "Wc": "512 1536 1664 2400 1728 2272 2240 2440 3072 0 576 704 768 808 1352 1320 2560 3584",
}


def witness(name: str, rules: Rules = PAPER, *, prime: bool = False) -> Schedule:
    times = dict(zip(COLUMNS, map(int, WITNESSES[name].split()), strict=True))
    times |= {"K": 0, "V": 100}
    groups = {node: f"compute{node[1]}" for node in COLUMNS} | {"K": "load", "V": "load"}
    return assemble(graph_b(prime=prime), target_b(), rules, 2048, times, groups)
