"""A Kernel: one fused region with its loop nest, and where each value lives in it.

The nest is ordered outermost first: `group` loops (independent cores), `split` loops (a removed
axis cut across cores, merged afterwards), then `stream` loops (sequential, state kept on chip). A
value is placed at the innermost loop it depends on; an external array is loaded once each time
control reaches that depth, which is all there is to the transfer count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from warploom.derive.formula.graph import Array, Diagram, Node, followed
from warploom.derive.lemmas.cascade import ancestors, closes
from warploom.derive.lemmas.streaming import Correction
from warploom.errors import InputError

LoopKind = Literal["group", "split", "stream"]
SYMBOL: dict[str, str] = {"group": "g", "split": "w", "stream": "s"}


@dataclass(frozen=True)
class Loop:
    """One partition label: `g_q` (group), `w_x` (split) or `s_x` (stream)."""

    axis: str
    kind: LoopKind

    @property
    def symbol(self) -> str:
        """The tile-size variable."""
        return f"{SYMBOL[self.kind]}_{self.axis}"


@dataclass(frozen=True)
class Kernel:
    """A fused region. `body` is its (rewritten) diagram, `tiles` gives each loop symbol a size.

    `bound_by` names the mask box that bounds a stream loop, when skipping masked slices is exact,
    `padded` axes without a loop whose tiles pass the end of arrays.
    """

    name: str
    body: Diagram
    loops: tuple[Loop, ...]
    corrections: tuple[Correction, ...] = ()
    lemmas: tuple[str, ...] = ()
    tiles: tuple[tuple[str, int], ...] = ()
    bound_by: tuple[tuple[str, str], ...] = ()
    padded: tuple[str, ...] = ()

    @cached_property
    def tile(self) -> dict[str, int]:
        """Loop symbol to tile size."""
        return dict(self.tiles)

    def tiled(self, tiles: Mapping[str, int]) -> Kernel:
        """The kernel with tile sizes; raises `InputError` for a missing or out-of-range one."""
        chosen: dict[str, int] = {}
        for loop in self.loops:
            if loop.symbol not in tiles:
                raise InputError(f"kernel {self.name}: no size for {loop.symbol}")
            size = int(tiles[loop.symbol])
            whole = self.body.size[loop.axis]
            if not 1 <= size <= whole:
                raise InputError(
                    f"kernel {self.name}: {loop.symbol}={size} is outside 1..{whole}; "
                    f"nearest legal is {min(max(size, 1), whole)}"
                )
            chosen[loop.symbol] = size
        return replace(self, tiles=tuple(chosen.items()))

    def resized(self, sizes: Mapping[str, int]) -> Kernel:
        """The same kernel with other axis lengths (of axes it does not have, only constants that
        follow them change)."""
        known = {axis: size for axis, size in sizes.items() if axis in self.body.size}
        body = replace(self.body, nodes=followed(self.body.nodes, sizes))
        return replace(self, body=body.resized(known))

    @cached_property
    def depth_of_axis(self) -> dict[str, int]:
        """Axis to the index of its innermost loop."""
        return {loop.axis: index for index, loop in enumerate(self.loops)}

    @cached_property
    def outer(self) -> int:
        """How many loops are group or split loops: they lead the nest."""
        return sum(loop.kind != "stream" for loop in self.loops)

    @cached_property
    def splits(self) -> tuple[str, ...]:
        """The axes cut across cores and merged."""
        return tuple(loop.axis for loop in self.loops if loop.kind == "split")

    @cached_property
    def stream_index(self) -> dict[str, int]:
        """Streamed axis to loop index."""
        return {each.axis: i for i, each in enumerate(self.loops) if each.kind == "stream"}

    def closed_loops(self, node: Node) -> tuple[int, ...]:
        """The stream or split loops a reduction box closes, outermost first."""
        if node.kind not in ("reduce", "contract"):
            return ()
        return tuple(
            index
            for index, loop in enumerate(self.loops)
            if loop.kind != "group" and loop.axis in node.over
        )

    @cached_property
    def result_depth(self) -> dict[str, int]:
        """Value to the loop index where its final value is known (-1: outside all loops)."""
        depth: dict[str, int] = {}
        base = self.outer - 1
        for array in self.body.inputs:
            axes = set(array.axes)
            for user in self.body.consumers[array.name]:
                if self.body.node[user].kind == "view":
                    axes |= set(self.body.node[user].axes)
            depth[array.name] = max([base, *(self.depth_of_axis.get(a, -1) for a in axes)])
        for node in self.body.nodes:
            closed = self.closed_loops(node)
            own = [self.depth_of_axis.get(axis, -1) for axis in node.axes]
            below = [depth[name] for name in node.inputs]
            if node.kind == "const":
                depth[node.name] = -1
            elif closed:
                depth[node.name] = max(base, min(closed) - 1)
            else:
                depth[node.name] = max([base, *own, *below])
        return depth

    @cached_property
    def taint(self) -> dict[str, frozenset[int]]:
        """Value to the stream loops it needs a whole reduction of."""
        marks: dict[str, frozenset[int]] = {name: frozenset() for name in self.body.array}
        for node in self.body.nodes:
            mine = frozenset(i for i in self.closed_loops(node) if self.loops[i].kind == "stream")
            marks[node.name] = mine.union(*(marks[name] for name in node.inputs))
        return marks

    def work_depth(self, node: Node) -> int:
        """The loop index at which a box's arithmetic happens."""
        closed = self.closed_loops(node)
        if closed:
            return max(closed)
        tainted = [j for j in self.taint[node.name] if self.loops[j].axis in node.axes]
        return max([self.result_depth[node.name], *tainted])

    @cached_property
    def correction_of(self) -> dict[str, Correction]:
        """Corrected reduction to its correction."""
        return {target: item for item in self.corrections for target in item.targets}

    @cached_property
    def states(self) -> tuple[Node, ...]:
        """The reductions that accumulate over a stream or split loop, in order."""
        return tuple(node for node in self.body.nodes if self.closed_loops(node))

    @cached_property
    def parts(self) -> tuple[Node, ...]:
        """The states that every core of a split writes out for the merge."""
        return tuple(
            node
            for node in self.states
            if any(self.loops[j].kind == "split" for j in self.closed_loops(node))
        )

    @cached_property
    def finishing(self) -> frozenset[str]:
        """What the merge of a split needs besides the merged parts: boxes and arrays."""
        merged = {node.name for node in self.parts}
        needed: set[str] = set()
        stack = [name for name in self.body.outputs if name not in merged] if merged else []
        while stack:
            name = stack.pop()
            if name in needed or name in merged:
                continue
            needed.add(name)
            stack += self.body.node[name].inputs if name in self.body.node else ()
        return frozenset(needed)

    @cached_property
    def after_merge(self) -> frozenset[str]:
        """What only the merge needs, so that the cores of a split neither load nor compute it."""
        above = ancestors(self.body)
        before = {name for node in self.parts for name in above[node.name]}
        return self.finishing - before

    @cached_property
    def scans(self) -> tuple[Node, ...]:
        """The boxes that carry a state along a streamed axis."""
        return tuple(
            node
            for node in self.body.nodes
            if node.kind in ("scan", "scan_contract") and self.scan_axis(node) in self.stream_index
        )

    @staticmethod
    def scan_axis(node: Node) -> str:
        """The axis a scan runs along."""
        return str(node.attr("time")) if node.kind == "scan_contract" else node.over[0]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {
            "name": self.name,
            "body": self.body.to_json(),
            "loops": [[loop.axis, loop.kind] for loop in self.loops],
            "corrections": [item.to_json() for item in self.corrections],
            "lemmas": list(self.lemmas),
            "tiles": dict(self.tiles),
            "bound_by": [list(pair) for pair in self.bound_by],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Kernel:
        """Back from JSON; raises `InputError` for a missing field."""
        try:
            return cls(
                data["name"],
                Diagram.from_json(data["body"]),
                tuple(Loop(axis, kind) for axis, kind in data["loops"]),
                tuple(Correction.from_json(item) for item in data["corrections"]),
                tuple(data["lemmas"]),
                tuple((str(k), int(v)) for k, v in data["tiles"].items()),
                tuple((axis, box) for axis, box in data["bound_by"]),
            )
        except (KeyError, ValueError, TypeError) as error:
            raise InputError(f"kernel JSON is incomplete: {error!r}") from None

    def __str__(self) -> str:
        """`kernel k0: group q=256, stream x=64: contract, S, m, ...`."""
        loops = ", ".join(
            f"{each.kind} {each.axis}"
            + (f"={self.tile[each.symbol]}" if each.symbol in self.tile else "")
            for each in self.loops
        )
        return f"{self.name}: {loops or 'no loops'}: {', '.join(n.name for n in self.body.nodes)}"


def subdiagram(diagram: Diagram, names: tuple[str, ...], name: str) -> Diagram:
    """The region made of the named boxes: what it reads becomes its inputs, what others read or the
    diagram returns becomes its outputs."""
    chosen = set(names)
    constants = {n.name for n in diagram.nodes if n.kind == "const"}
    nodes = tuple(n for n in diagram.nodes if n.name in chosen)
    needed = {source for node in nodes for source in node.inputs}
    nodes = tuple(n for n in diagram.nodes if n.name in chosen | (constants & needed))
    inside = {n.name for n in nodes}
    reads = dict.fromkeys(s for n in nodes for s in n.inputs if s not in inside)
    inputs = tuple(
        diagram.array.get(source) or Array(source, diagram.axes_of(source)) for source in reads
    )
    outputs = tuple(
        n.name
        for n in nodes
        if n.kind != "const"
        and (n.name in diagram.outputs or set(diagram.consumers[n.name]) - inside)
    )
    used = {a for n in nodes for a in (*n.axes, *n.over)} | {a for i in inputs for a in i.axes}
    sizes = tuple((axis, size) for axis, size in diagram.sizes if axis in used)
    return Diagram(name, inputs, nodes, outputs, sizes)


def removes(body: Diagram, axis: str) -> tuple[Node, ...]:
    """The boxes that reduce an axis away."""
    return tuple(node for node in body.nodes if closes(node, axis))
