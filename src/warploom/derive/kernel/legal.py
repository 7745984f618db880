"""Legality as code: guards that give None or a `Refusal` with the nearest fix.

Refusals are results, not exceptions: the search asks thousands of times. G1: a loop is grouped or
split, G2: streamed, G3: boxes are fused; G8, of a streaming form, is `lemmas.streaming`'s.
"""

from __future__ import annotations

from collections.abc import Sequence

from warploom.derive.formula.graph import Diagram, Node
from warploom.derive.kernel.kernel import Kernel, Loop, removes
from warploom.derive.kernel.masks import with_bounds
from warploom.derive.lemmas.cascade import Refusal, ancestors
from warploom.derive.lemmas.streaming import Correction, make_streamable

MOST_UNROLLED = 16
"""Positions of an axis that is walked while tracing."""


def group(body: Diagram, axis: str) -> Refusal | None:
    """G1: every box of the region is weaved over the axis (or ignores it)."""
    if refusal := known_axis(body, axis, "G1 group"):
        return refusal
    for node in body.nodes:
        if refusal := _mixes(body, node, axis, "G1 group"):
            return refusal
    return None


def fuse(diagram: Diagram, names: Sequence[str]) -> Refusal | None:
    """G3: the region is convex: no path leaves it and comes back."""
    chosen = set(names)
    if unknown := sorted(chosen - set(diagram.node)):
        return Refusal("G3 fuse", unknown[0], "", "no such box", f"boxes: {list(diagram.node)}")
    above = ancestors(diagram)
    for node in diagram.nodes:
        if node.name in chosen or node.kind == "const":
            continue
        below = [name for name in chosen if node.name in above[name]]
        if below and above[node.name] & chosen:
            return Refusal(
                "G3 fuse",
                node.name,
                "",
                f"lies between boxes of the region but outside it (feeds {below[0]!r})",
                f"add {node.name!r} to the region or cut before {below[0]!r}",
            )
    return None


def known_axis(body: Diagram, axis: str, rule: str) -> Refusal | None:
    """The axis exists."""
    if axis in body.size:
        return None
    return Refusal(rule, body.name, axis, "no such axis", f"axes are {sorted(body.size)}")


def _mixes(body: Diagram, node: Node, axis: str, rule: str) -> Refusal | None:
    """Whether a box mixes positions of the axis."""
    along = axis in node.over or (node.kind == "scan_contract" and node.attr("time") == axis)
    if along:
        nearest = f"stream {axis!r} instead"
        if node.kind in ("reduce", "contract"):
            nearest += f", or split it across cores and merge {node.name!r}"
        return Refusal(rule, node.name, axis, f"{node.op} mixes positions along it", nearest)
    if node.kind == "view":
        moved = {s for s, terms in dict(node.attr("map")).items() if [t[0] for t in terms] != [s]}
        if axis in moved:
            new = [t[0] for t in dict(node.attr("map"))[axis]]
            return Refusal(rule, node.name, axis, "the view reindexes it", f"partition {new[0]!r}")
    return None


def make_kernel(body: Diagram, loops: Sequence[Loop], lemmas: bool = True) -> Kernel | Refusal:
    """The kernel of a region and a loop nest, with whatever lemmas its streams need; or why not."""
    corrections: list[Correction] = []
    used: list[str] = []
    current = body
    streamed: set[str] = set()
    for loop in loops:
        if refusal := known_axis(current, loop.axis, f"{loop.kind}"):
            return refusal
        if loop.kind == "group":
            if refusal := group(current, loop.axis):
                return refusal
            continue
        if loop.axis in streamed or not removes(current, loop.axis):
            continue  # the parts of a split are streamed, and merged, by the same corrections
        streamed.add(loop.axis)
        answer = make_streamable(current, loop.axis, lemmas=lemmas)
        if isinstance(answer, Refusal):
            return answer
        fresh = [c for c in answer.corrections if c not in corrections]
        corrections += fresh
        used += [lemma.name for lemma in answer.lemmas]
        current = answer.body
    kernel = Kernel("k0", current, tuple(loops), tuple(corrections), tuple(dict.fromkeys(used)))
    if refusal := placed(kernel):
        return refusal
    return with_bounds(kernel)


def placed(kernel: Kernel) -> Refusal | None:
    """The nest computes the body in one pass: no value is asked for after its loop has closed."""
    kinds = [loop.kind for loop in kernel.loops]
    if "stream" in kinds and any(kind != "stream" for kind in kinds[kinds.index("stream") :]):
        late = (
            kernel.loops[len(kinds) - 1 - kinds[::-1].index("group")]
            if "group" in kinds
            else kernel.loops[-1]
        )
        return Refusal(
            "G2 stream",
            kernel.name,
            late.axis,
            "a group loop is inside a stream",
            "put groups first",
        )
    for node in kernel.body.nodes:
        if refusal := _node_placed(kernel, node):
            return refusal
    if refusal := _merge_placed(kernel):
        return refusal
    for output in kernel.body.outputs:
        axes = kernel.body.axes_of(output)
        for j in kernel.taint[output]:
            if kernel.loops[j].axis in axes:
                return Refusal(
                    "G2 stream",
                    output,
                    kernel.loops[j].axis,
                    "is emitted along the axis but needs a whole reduction of it",
                    f"cut the kernel before {output!r} or keep {kernel.loops[j].axis!r} whole",
                )
    return None


def _merge_placed(kernel: Kernel) -> Refusal | None:
    """After a split only merged states, arrays and maps of them are left to finish the outputs."""
    if not kernel.splits:
        return None
    kept = {node.name for node in kernel.parts}
    stack = list(kernel.body.outputs)
    while stack:
        name = stack.pop()
        node = kernel.body.node.get(name)
        if node is None and kernel.splits[0] in kernel.body.axes_of(name):
            return Refusal(
                "G1 split",
                name,
                kernel.splits[0],
                "is read again after the merge",
                "cut the kernel",
            )
        if node is None or name in kept:
            continue
        if node in kernel.states or node in kernel.scans:
            return Refusal(
                "G1 split",
                name,
                kernel.splits[0],
                "is needed after the merge but is not summed over the split axis",
                f"compute {name!r} in another kernel",
            )
        stack += node.inputs
    return None


def _node_placed(kernel: Kernel, node: Node) -> Refusal | None:
    """One box against the nest."""
    streams = kernel.stream_index
    closed = kernel.closed_loops(node)
    inner = [axis for axis in node.axes if closed and streams.get(axis, -1) > min(closed)]
    if inner:
        return Refusal(
            "G2 stream",
            node.name,
            inner[0],
            f"its sum over {kernel.loops[min(closed)].axis!r} would keep a state for all of it",
            f"put {inner[0]!r} outside {kernel.loops[min(closed)].axis!r}",
        )
    if node.name in kernel.correction_of and len({kernel.loops[j].axis for j in closed}) > 1:
        return Refusal(
            "G2 stream",
            node.name,
            kernel.loops[closed[-1]].axis,
            "a corrected sum can run over one streamed axis only",
            "keep the other axis whole",
        )
    touched = {streams[a] for a in (*node.axes, *node.over) if a in streams}
    for source in node.inputs:
        for j in kernel.taint[source]:
            late = [i for i in touched if i > j and j not in touched]
            if late:
                return Refusal(
                    "G2 stream",
                    node.name,
                    kernel.loops[late[0]].axis,
                    f"needs {source!r} complete over {kernel.loops[j].axis!r}: a second pass",
                    f"put {kernel.loops[late[0]].axis!r} outside or cut before {node.name!r}",
                )
    for j in sorted(kernel.taint[node.name]):
        if kernel.loops[j].axis not in node.axes and kernel.result_depth[node.name] >= j:
            early = [i for i in node.inputs if kernel.result_depth[i] >= j]
            return Refusal(
                "G2 stream",
                node.name,
                kernel.loops[j].axis,
                f"waits for the whole of it, but {', '.join(early)} is recomputed in every step",
                f"compute {', '.join(early)} in another kernel",
            )
    return _scan_placed(kernel, node) or _view_placed(kernel, node)


def _scan_placed(kernel: Kernel, node: Node) -> Refusal | None:
    """A scan runs once along its axis, on values that are known slice by slice."""
    streams = kernel.stream_index
    if node.kind in ("scan", "scan_contract"):
        axis = kernel.scan_axis(node)
        inside = [a for a in node.axes if a != axis and streams.get(a, -1) > streams.get(axis, 99)]
        if inside:
            return Refusal(
                "G2 stream",
                node.name,
                inside[0],
                f"the scan along {axis!r} would restart",
                f"put {inside[0]!r} outside",
            )
        if axis in streams and kernel.taint[node.name] & {streams[axis]}:
            return Refusal(
                "G2 stream",
                node.name,
                axis,
                "scans a value that needs the whole axis",
                "cut before it",
            )
    return None


def _view_placed(kernel: Kernel, node: Node) -> Refusal | None:
    """A window reads an external array; its source axes are no loop axes."""
    if node.kind == "view":
        if node.inputs[0] in kernel.body.node:
            moved = {t[0] for s, terms in node.attr("map") for t in terms if [t[0]] != [s]}
            hit = [each.axis for each in kernel.loops if each.axis in moved]
            if hit:
                return Refusal(
                    "G1 group",
                    node.name,
                    hit[0],
                    "reindexes a computed value",
                    "cut before the view",
                )
        return _mixes(kernel.body, node, "", "G2 stream") or _view_streams(kernel, node)
    return None


def _view_streams(kernel: Kernel, node: Node) -> Refusal | None:
    """A view's source axes cannot be loop axes themselves."""
    for loop in kernel.loops:
        if refusal := _mixes(kernel.body, node, loop.axis, "G2 stream"):
            return refusal
    return None


def has_code(kernel: Kernel) -> bool:
    """Whether the emitter has code for a nest: of the axes that move a window one is in loops and
    the others are short, and arithmetic does not read the second matrix of a product (its rows
    would lie across)."""
    for node in kernel.body.nodes:
        if node.kind == "view":
            for _, terms in node.attr("map"):
                loose = walked(kernel, terms)
                long = [a for a in loose if kernel.body.size[a] > MOST_UNROLLED]
                if long or loose & {*kernel.depth_of_axis}:
                    return False
    products = [node for node in kernel.body.nodes if _is_product(kernel.body, node)]
    seconds = {
        name
        for node in products
        for name in node.inputs
        if name in kernel.body.array and node.axes[0] not in kernel.body.axes_of(name)
    }
    return not any(seconds & {*node.inputs} for node in kernel.body.nodes if node not in products)


def walked(kernel: Kernel, terms: Sequence[tuple[str, int]]) -> frozenset[str]:
    """The axes of a window that are walked position by position: all that move it but one, which
    is in loops where any is."""
    names = [name for name, _ in terms]
    kept = [name for name in names if name in kernel.depth_of_axis] or names[:1]
    return frozenset(names) - {*kept[:1]}


def _is_product(body: Diagram, node: Node) -> bool:
    """Whether a box is a product of matrices."""
    frames = [set(body.axes_of(name)) - set(node.over) for name in node.inputs]
    return (
        node.kind == "contract"
        and len(frames) == 2
        and all(a - b for a, b in (frames, frames[::-1]))
    )
