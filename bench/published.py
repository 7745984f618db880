"""Loops of the papers as graphs, and the schedules that people wrote for them, as data.

Graphs: data/graphs/NAME@GPU.json, a loop body at the costs of one machine. On Hopper an accumulator
lives in registers and its wgmma runs on after the issue; on Blackwell it lives in tensor memory and
must be loaded to be read; on Ampere mma.sync holds its warps. `attention`: Dao, FlashAttention-2
(arXiv 2307.08691), in the shape of FlashAttention-3 (arXiv 2407.08608) and, on Blackwell,
FlashAttention-4. `_half`: half the rows, no sub-tiles; `_low`, `_high`: at that end of the costs.
The builders of these files are in the history up to commit 7c81a12.

Templates: data/templates.toml, sources there. A template pins structure, not times: groups by
operation, the stage of some operations relative to others, extra order edges such as ping-pong
barriers. Times are then the best that structure allows, found by the same solver with the pins as
constraints, and checked and simulated like any other. So a comparison with the free solution is
fair to the template: it is shown at its best.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from warploom.errors import InputError
from warploom.schedule.model.graph import Edge, Graph
from warploom.schedule.model.target import GroupSpec
from warploom.schedule.solve.solve import Problem

DATA = Path(__file__).parent / "data"
GRAPHS = (
    "gemm",
    "gemm_epilogue",
    "attention",
    "attention_causal",
    "attention_backward",
    "linear_attention",
    "ssd",
)


def published(name: str, gpu: str) -> Graph:
    """The graph of a loop at the costs of a machine; raises `InputError` where there is none."""
    return Graph.read(DATA / "graphs" / f"{name}@{gpu}.json")


@dataclass(frozen=True)
class Template:
    """assign: (op pattern, group) with `{x}` for the sub-tile, first match wins. pinned: (group,
    warps, loads). ahead: (op pattern, iterations it runs ahead of the rest of its iteration).
    turns: ops whose groups take turns, in sub-tile order. serial: no overlap inside a group."""

    name: str
    about: str
    source: str
    assign: tuple[tuple[str, str], ...]
    groups: tuple[tuple[str, int, bool], ...]
    ahead: tuple[tuple[str, int], ...] = ()
    turns: tuple[str, ...] = ()
    serial: bool = False


@cache
def templates() -> Mapping[str, Template]:
    """Every named schedule that ships."""
    text = (DATA / "templates.toml").read_text()
    return {name: _read(name, table) for name, table in tomllib.loads(text).items()}


def _read(name: str, table: Mapping[str, Any]) -> Template:
    return Template(
        name,
        str(table["about"]),
        str(table["source"]),
        tuple((str(pattern), str(group)) for pattern, group in table["assign"]),
        tuple((str(g), int(w), bool(loads)) for g, w, loads in table["groups"]),
        tuple((str(pattern), int(count)) for pattern, count in table.get("ahead", [])),
        tuple(table.get("turns", ())),
        bool(table.get("serial", False)),
    )


def template(name: str) -> Template:
    """A named schedule; raises `InputError` listing those there are."""
    if name not in templates():
        raise InputError(f"no schedule template {name!r}, expected one of {sorted(templates())}")
    return templates()[name]


def pinned(named: Template, problem: Problem) -> Problem:
    """before: a free problem -> after: the same with the template's structure as constraints.

    keeps: every node, edge and rule of the problem; adds pins and order edges only.
    """
    subtiles = 1 + max((node.subtile or 0 for node in problem.graph.nodes), default=0)
    groups = tuple(
        GroupSpec(name.format(x=x), warps, loads)
        for name, warps, loads in named.groups
        for x in (range(subtiles) if "{x}" in name else (0,))
    )
    target = replace(problem.target, groups=groups)
    pins = {node.id: _group_of(named, problem.graph, node.id) for node in problem.graph.nodes}
    for node, group in pins.items():
        spec = next(spec for spec in groups if spec.name == group)
        if not target.fits(problem.graph, node, spec):
            raise InputError(
                f"template {named.name} puts {node} in {group}, which on target {target.name} "
                f"cannot hold it ({spec.warps} warps{', loads only' * spec.loads})"
            )
    graph = _with_stages(named, _with_turns(named, problem.graph), pins)
    return replace(problem, graph=graph, target=target, pins=pins)


def _group_of(named: Template, graph: Graph, name: str) -> str:
    node = graph.by_id[name]
    for pattern, group in named.assign:
        if fnmatchcase(node.op, pattern):
            return group.format(x=node.subtile or 0)
    raise InputError(
        f"template {named.name} does not say which group runs {name} (op {node.op}); it knows "
        f"{[pattern for pattern, _ in named.assign]}"
    )


def _with_turns(named: Template, graph: Graph) -> Graph:
    """Order edges of a ping-pong barrier: sub-tile x's op, then x + 1's, round the interval."""
    extra: list[Edge] = []
    for op in named.turns:
        nodes = sorted((n for n in graph.nodes if n.op == op), key=lambda n: n.subtile or 0)
        for first, second in pairwise(nodes):
            extra.append(Edge(first.id, second.id, first.drain, 0, "order"))
        if len(nodes) > 1:
            extra.append(Edge(nodes[-1].id, nodes[0].id, nodes[-1].drain, 1, "order"))
    return replace(graph, edges=graph.edges + tuple(extra))


def _with_stages(named: Template, graph: Graph, pins: Mapping[str, str]) -> Graph:
    """Program order of a serial group: one trip of its loop ends before the next begins.

    An operation that is `ahead` by a works on iteration k + a in trip k, so u of one trip before
    w of the next means distance 1 + ahead(w) - ahead(u). Loads run ahead by their ring alone.
    """
    if not named.serial:
        return graph
    ahead = {node.id: _ahead(named, node.op) for node in graph.nodes}
    own = [node for node in graph.nodes if not node.variable_latency]
    extra = [
        Edge(u.id, w.id, max(1, u.issue), 1 + ahead[w.id] - ahead[u.id], "order")
        for u in own
        for w in own
        if u.id != w.id and pins[u.id] == pins[w.id] and 1 + ahead[w.id] >= ahead[u.id]
    ]
    return replace(graph, edges=graph.edges + tuple(extra))


def _ahead(named: Template, op: str) -> int:
    return next((count for pattern, count in named.ahead if fnmatchcase(op, pattern)), 0)
