"""Terms: algorithms as compositions, in the paper's grammar; they compile to a `Diagram`.

    term ::= Box | Weave(term, axis, mask) | Seq(term, term) | Par(term, term)
           | Identity | Copy | Delete | Permute

Data between terms is a tuple of arrays, each a tuple of named axes. Every constructor checks its
types; terms are immutable and compared by structure. `of_diagram` goes back: one column a box, so
any diagram can be read, printed and drawn as a term.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from warploom.derive.formula.graph import Array, Attr, Diagram, Node
from warploom.derive.formula.ops import op
from warploom.errors import InputError

Axes = tuple[str, ...]
Type = tuple[Axes, ...]


@dataclass(frozen=True)
class Term(ABC):
    """Any term: `dom` and `cod` are the arrays it takes and gives."""

    @property
    @abstractmethod
    def dom(self) -> Type:
        """The arrays taken."""

    @property
    @abstractmethod
    def cod(self) -> Type:
        """The arrays given."""

    def __rshift__(self, other: Term) -> Seq:
        """`f >> g`: f, then g."""
        return Seq(self, other)

    def __and__(self, other: Term) -> Par:
        """`f & g`: side by side."""
        return Par(self, other)


@dataclass(frozen=True)
class Box(Term):
    """One function on its own axes; dot product: `Box("contract", (("d",),) * 2, (), ("d",))`."""

    op: str
    inputs: Type
    output: Axes
    over: Axes = ()
    attrs: tuple[tuple[str, Attr], ...] = ()

    def __post_init__(self) -> None:
        """The operator exists and takes that many arrays."""
        spec = op(self.op)
        if spec.arity not in (-1, len(self.inputs)):
            raise InputError(f"box {self.op} takes {spec.arity} arrays, got {len(self.inputs)}")

    @property
    def dom(self) -> Type:
        """Its inputs."""
        return self.inputs

    @property
    def cod(self) -> Type:
        """Its single output."""
        return (self.output,)


@dataclass(frozen=True)
class Weave(Term):
    """Map a one-output term over a new axis: `mask` says which inputs carry it."""

    term: Box | Weave
    axis: str
    mask: tuple[bool, ...]

    def __post_init__(self) -> None:
        """The mask fits, at least one input carries the axis, and the axis is new."""
        if len(self.mask) != len(self.term.dom):
            raise InputError(
                f"weave over {self.axis!r}: a mask of {len(self.mask)} for "
                f"{len(self.term.dom)} inputs"
            )
        if not any(self.mask):
            raise InputError(f"weave over {self.axis!r}: no input carries it; mark at least one")
        taken = {a for axes in (*self.term.dom, *self.term.cod) for a in axes}
        if self.axis in taken | set(core(self).over):
            raise InputError(
                f"weave over {self.axis!r}: the axis is already there; choose another name"
            )

    @property
    def dom(self) -> Type:
        """The inputs, the new axis in front where the mask says so."""
        return tuple(
            (self.axis, *axes) if carries else axes
            for axes, carries in zip(self.term.dom, self.mask, strict=True)
        )

    @property
    def cod(self) -> Type:
        """The output with the new axis in front."""
        return ((self.axis, *self.term.cod[0]),)


@dataclass(frozen=True)
class Seq(Term):
    """Composition: what the first gives is what the second takes (as sets of named axes)."""

    first: Term
    second: Term

    def __post_init__(self) -> None:
        """Types meet; a mismatch names the position and both arrays."""
        gives, takes = self.first.cod, self.second.dom
        if len(gives) != len(takes):
            raise InputError(f"sequence: {len(gives)} arrays meet {len(takes)}")
        for place, (left, right) in enumerate(zip(gives, takes, strict=True)):
            if set(left) != set(right):
                raise InputError(
                    f"sequence: array {place} has axes {left}, the next term expects {right}; "
                    f"weave or reduce {sorted(set(left) ^ set(right))}"
                )

    @property
    def dom(self) -> Type:
        """What the first takes."""
        return self.first.dom

    @property
    def cod(self) -> Type:
        """What the second gives."""
        return self.second.cod


@dataclass(frozen=True)
class Par(Term):
    """Side by side."""

    above: Term
    below: Term

    @property
    def dom(self) -> Type:
        """Both inputs, one under the other."""
        return self.above.dom + self.below.dom

    @property
    def cod(self) -> Type:
        """Both outputs, one under the other."""
        return self.above.cod + self.below.cod


@dataclass(frozen=True)
class Identity(Term):
    """Wires that pass."""

    arrays: Type

    @property
    def dom(self) -> Type:
        """The arrays."""
        return self.arrays

    @property
    def cod(self) -> Type:
        """The same arrays."""
        return self.arrays


@dataclass(frozen=True)
class Wiring(Term):
    """Rearrangement: output i is input `order[i]`. Repeating copies, leaving out deletes."""

    arrays: Type
    order: tuple[int, ...]

    def __post_init__(self) -> None:
        """Every position exists."""
        if bad := [i for i in self.order if not 0 <= i < len(self.arrays)]:
            raise InputError(f"wiring: no array {bad[0]} among {len(self.arrays)}")

    @property
    def dom(self) -> Type:
        """The arrays."""
        return self.arrays

    @property
    def cod(self) -> Type:
        """The arrays rearranged."""
        return tuple(self.arrays[i] for i in self.order)


def copy(axes: Axes) -> Wiring:
    """One array twice."""
    return Wiring((axes,), (0, 0))


def delete(axes: Axes) -> Wiring:
    """One array dropped."""
    return Wiring((axes,), ())


def permute(arrays: Type, order: Sequence[int]) -> Wiring:
    """Arrays in another order; raises `InputError` when it is no permutation."""
    if sorted(order) != list(range(len(arrays))):
        raise InputError(f"permute: {tuple(order)} is no order of {len(arrays)} arrays")
    return Wiring(arrays, tuple(order))


def core(term: Box | Weave) -> Box:
    """The box inside its weaves."""
    while isinstance(term, Weave):
        term = term.term
    return term


def compile_term(
    term: Term, inputs: Sequence[str], sizes: Mapping[str, int], name: str = "term"
) -> Diagram:
    """The diagram of a term; `inputs` names its external arrays in order."""
    if len(inputs) != len(term.dom):
        raise InputError(f"term takes {len(term.dom)} arrays, {len(inputs)} names were given")
    arrays = tuple(Array(n, axes) for n, axes in zip(inputs, term.dom, strict=True))
    nodes: list[Node] = []
    outputs = _compile(term, tuple(inputs), nodes)
    used = {a for array in arrays for a in array.axes} | {
        a for node in nodes for a in (*node.axes, *node.over)
    }
    return Diagram(
        name, arrays, tuple(nodes), outputs, tuple((a, sizes.get(a, 64)) for a in sorted(used))
    )


def _compile(term: Term, values: tuple[str, ...], nodes: list[Node]) -> tuple[str, ...]:
    """Push values through a term, appending boxes."""
    if isinstance(term, Seq):
        return _compile(term.second, _compile(term.first, values, nodes), nodes)
    if isinstance(term, Par):
        cut = len(term.above.dom)
        above = _compile(term.above, values[:cut], nodes)
        return above + _compile(term.below, values[cut:], nodes)
    if isinstance(term, Wiring):
        return tuple(values[i] for i in term.order)
    if isinstance(term, (Box, Weave)):
        box = core(term)
        label = f"{box.op}{len(nodes)}"
        nodes.append(Node(label, box.op, values, term.cod[0], box.over, box.attrs))
        return (label,)
    return values


def of_diagram(diagram: Diagram) -> Term:
    """The term of a diagram: before each box a wiring, then the woven box beside what passes."""
    live = [array.name for array in diagram.inputs]
    term: Term = Identity(tuple(diagram.axes_of(v) for v in live))
    remaining = list(diagram.nodes)
    while remaining:
        node = remaining.pop(0)
        later = {s for n in remaining for s in n.inputs} | set(diagram.outputs)
        passing = [v for v in dict.fromkeys(live) if v in later]
        wanted = [*passing, *node.inputs]
        types = tuple(diagram.axes_of(v) for v in live)
        wiring = Wiring(types, tuple(live.index(v) for v in wanted))
        rest = Identity(tuple(diagram.axes_of(v) for v in passing))
        term = term >> wiring >> (rest & _woven(diagram, node))
        live = [*passing, node.name]
    types = tuple(diagram.axes_of(v) for v in live)
    return term >> Wiring(types, tuple(live.index(v) for v in diagram.outputs))


def _woven(diagram: Diagram, node: Node) -> Box | Weave:
    """A box on the axes it acts on, woven over the others (innermost axis first)."""
    inputs = tuple(diagram.axes_of(name) for name in node.inputs)
    carried = {axis for axes in inputs for axis in axes}
    own = set(node.over) | (set(node.axes) - carried)
    if node.kind in ("view", "mask", "scan", "scan_contract"):
        own = carried | set(node.axes)
    woven = [axis for axis in node.axes if axis not in own]
    term: Box | Weave = Box(
        node.op,
        tuple(tuple(a for a in axes if a not in woven) for axes in inputs),
        tuple(a for a in node.axes if a not in woven),
        node.over,
        node.attrs,
    )
    for axis in reversed(woven):
        term = Weave(term, axis, tuple(axis in axes for axes in inputs))
    return term
