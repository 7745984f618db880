"""Sub-tile symmetry: interchangeable halves of a tile give every schedule a mirror image.

When exchanging sub-tiles i and j maps the graph onto itself, a solver may assume that an
operation of sub-tile i issues no later than its image; that halves the search for two sub-tiles
and divides it by k! for k. The exchange is verified, never assumed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from warploom.schedule.model.graph import Graph
from warploom.schedule.model.target import Target


def chains(graph: Graph) -> list[list[str]]:
    """One chain of images, sub-tile 0 first; empty when the sub-tiles are not interchangeable.

    The chain is the first operation of sub-tile 0 that reserves most cycles, and its images.
    """
    roles = _roles(graph)
    count = max((len(images) for images in roles.values()), default=0)
    if count < 2 or any(len(images) != count for images in roles.values()):
        return []
    if not all(_is_automorphism(graph, roles, index) for index in range(count - 1)):
        return []
    heaviest = max(
        roles.values(), key=lambda images: sum(use.cycles for use in graph.by_id[images[0]].uses)
    )
    return [heaviest]


def pins_allow_exchange(graph: Graph, target: Target, pins: Mapping[str, str]) -> bool:
    """Whether exchanging sub-tiles keeps the pins, but for the names of groups of one kind.

    An operation of no sub-tile that is pinned into the group of one of them tells them apart.
    """
    kinds = {group.name: (group.warps, group.loads) for group in target.groups}
    roles = _roles(graph)
    count = max((len(images) for images in roles.values()), default=0)
    if any(len(images) != count for images in roles.values()):
        return False
    return all(
        _is_renaming(pins, kinds, _exchange(graph, roles, index)) for index in range(count - 1)
    )


def _is_renaming(
    pins: Mapping[str, str], kinds: Mapping[str, tuple[int, bool]], image: Mapping[str, str]
) -> bool:
    """Whether the image of every pinned operation sits in the image of its group."""
    renamed: dict[str, str] = {}
    for name, group in pins.items():
        other = pins.get(image.get(name, name))
        if other is None or renamed.setdefault(group, other) != other:
            return False
    several = len(set(renamed.values())) == len(renamed)
    return several and all(kinds[one] == kinds[other] for one, other in renamed.items())


def corresponding(graph: Graph) -> list[list[str]]:
    """Operations of equal role in different sub-tiles, sub-tile 0 first."""
    return list(_roles(graph).values())


def _roles(graph: Graph) -> dict[tuple[str, int], list[str]]:
    """Nodes of equal role, by sub-tile: the k-th node of an op in each sub-tile are images."""
    met: dict[tuple[int, str], int] = defaultdict(int)
    roles: dict[tuple[str, int], list[str]] = defaultdict(list)
    for node in graph.nodes:
        if node.subtile is None:
            continue
        rank = met[node.subtile, node.op]
        met[node.subtile, node.op] += 1
        roles[node.op, rank].append(node.id)
    for images in roles.values():
        images.sort(key=lambda name: graph.by_id[name].subtile or 0)
    return dict(roles)


def _exchange(
    graph: Graph, roles: Mapping[tuple[str, int], list[str]], index: int
) -> dict[str, str]:
    """Every operation's image when sub-tiles `index` and `index + 1` change places."""
    image = {node.id: node.id for node in graph.nodes}
    for images in roles.values():
        first, second = images[index], images[index + 1]
        image[first], image[second] = second, first
    return image


def _is_automorphism(graph: Graph, roles: dict[tuple[str, int], list[str]], index: int) -> bool:
    """Whether exchanging sub-tiles `index` and `index + 1` maps the graph onto itself."""
    image = _exchange(graph, roles, index)

    def cost(name: str, renamed: bool) -> tuple[object, ...]:
        node = graph.by_id[name]
        operand = node.in_place
        if renamed and operand is not None:
            operand = image[operand]
        return (
            node.op,
            node.uses,
            node.latency,
            node.issue,
            node.registers,
            tuple(sorted(node.memory.items())),
            node.min_warps,
            node.asynchronous,
            node.variable_latency,
            operand,
        )

    if any(cost(name, renamed=True) != cost(other, renamed=False) for name, other in image.items()):
        return False
    edges = {
        (e.src, e.dst, e.delay, e.distance, e.kind, e.spill_cost, e.blocking) for e in graph.edges
    }
    mapped = {(image[e[0]], image[e[1]], *e[2:]) for e in edges}
    return mapped == edges
