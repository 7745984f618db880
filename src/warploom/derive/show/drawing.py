"""Pictures of a derivation: the formula and its kernels, or every rewrite from one to the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import escape
from typing import Protocol

from warploom.derive.cost.cost import numbers, traffic
from warploom.derive.cost.counts import exact_traffic
from warploom.derive.cost.structure import alone
from warploom.derive.formula.graph import Diagram
from warploom.derive.kernel.chunk import exchange
from warploom.derive.kernel.kernel import Kernel, subdiagram
from warploom.derive.lemmas.cascade import Refusal
from warploom.derive.lemmas.streaming import make_streamable
from warploom.derive.show.svg import legend, panel

Panel = tuple[str, float, float]


class Derived(Protocol):
    """What a picture needs of a derivation."""

    @property
    def diagram(self) -> Diagram:
        """The formula."""
        ...

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """Its kernels."""
        ...

    @property
    def capacity(self) -> float:
        """Values of memory it was derived for."""
        ...


def draw(derivation: Derived) -> str:
    """The formula with every box its own kernel, then each kernel as derived."""
    panels = [_written(derivation)]
    for kernel in derivation.kernels:
        lemmas = f"   (lemmas: {', '.join(kernel.lemmas)})" if kernel.lemmas else ""
        title = f"derived kernel {kernel.name}{lemmas}"
        panels.append(panel(kernel.body, kernel, title, _moved(kernel)))
    return stacked(derivation.diagram.name, panels)


def draw_steps(derivation: Derived) -> str:
    """Before and after every rewrite: lemma by lemma, then fused, grouped, split and streamed."""
    panels = [_written(derivation)]
    diagram = exchange(derivation.diagram)
    if diagram != derivation.diagram:
        panels.append(panel(diagram, None, "sums exchanged: a chunk needs two products"))
    for kernel in derivation.kernels:
        panels += _steps(diagram, kernel)
    return stacked(derivation.diagram.name, panels)


def _written(derivation: Derived) -> Panel:
    """The formula, and what it moves when nothing is fused."""
    cost = alone(derivation.diagram, derivation.capacity)
    note = (
        f"H = {cost:.4g} values at M = {derivation.capacity:.0f}: every box loads, computes in its "
        "best tiles, saves"
        if cost
        else f"some box does not fit {derivation.capacity:.0f} values on its own"
    )
    title = f"{derivation.diagram.name}: every box its own kernel"
    return panel(derivation.diagram, None, title, note)


def _moved(kernel: Kernel) -> str:
    """The kernel's transfer as a number."""
    return f"H = {exact_traffic(kernel):.4g} values" if kernel.tiles or not kernel.loops else ""


def _steps(diagram: Diagram, kernel: Kernel) -> Iterator[Panel]:
    """One kernel's rewrites: lemmas, fusion (recolouring), then its loops kind by kind."""
    name = kernel.name
    region = _region(diagram, kernel)
    body = region
    for axis in kernel.stream_index:
        for lemma, correction, after in rewrites(body, axis):
            body = after
            note = (
                f"when the base moves: {correction}" if correction else "applied once, at the end"
            )
            yield panel(after, None, f"{name}, lemma: {lemma}", note)
    bare = replace(kernel, loops=(), tiles=())
    title = f"{name}, fused: one kernel, nothing between the boxes leaves the chip"
    yield panel(kernel.body, bare, title, f"H = {numbers(bare, traffic(bare)):.4g} values")
    words = {"group": "grouped", "split": "split", "stream": "streamed"}
    for kind, word in words.items():
        mine = [each for each in kernel.loops if each.kind == kind]
        if not mine:
            continue
        upto = kernel.loops[: kernel.loops.index(mine[-1]) + 1]
        kept = {each.symbol for each in upto}
        tiles = tuple((symbol, tile) for symbol, tile in kernel.tiles if symbol in kept)
        step = replace(kernel, loops=upto, tiles=tiles)
        labels = ", ".join(f"{each.axis} by {each.symbol}" for each in mine)
        yield panel(kernel.body, step, f"{name}, {word}: {labels}", _moved(step))


def rewrites(body: Diagram, axis: str) -> tuple[tuple[str, str, Diagram], ...]:
    """(lemma, correction, diagram after it) for every lemma that makes the axis streamable."""
    made = make_streamable(body, axis)
    return () if isinstance(made, Refusal) else made.steps


def _region(diagram: Diagram, kernel: Kernel) -> Diagram:
    """The boxes of the formula that the kernel computes, before its lemmas."""
    given = {array.name for array in kernel.body.inputs}
    found: set[str] = set()
    stack = list(kernel.body.outputs)
    while stack:
        value = stack.pop()
        if value in diagram.node and value not in given and value not in found:
            found.add(value)
            stack += diagram.node[value].inputs
    names = tuple(n.name for n in diagram.nodes if n.name in found and n.kind != "const")
    return subdiagram(diagram, names, "region")


def stacked(name: str, panels: Sequence[Panel]) -> str:
    """Panels one under the other as one SVG, with a legend behind the last."""
    panels = [*panels, legend()]
    width = max(w for _, w, _ in panels)
    height = sum(h for _, _, h in panels)
    parts: list[str] = []
    offset = 0.0
    for body, _, tall in panels:
        parts.append(f"<g transform='translate(0,{offset:.0f})'>{body}</g>")
        offset += tall
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width:.0f} {height:.0f}' "
        f"width='{width:.0f}' height='{height:.0f}' role='img'>"
        f"<title>{escape(name)}</title>"
        f"<rect width='100%' height='100%' fill='white'/>{''.join(parts)}</svg>\n"
    )
