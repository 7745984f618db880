"""What the operators of `torch_rows` take and give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from warploom.kernels.rows.program import OPS, RowConfig, row_program
from warploom.kernels.user import written_names
from warploom.tile import Array

FLAGS = {"softmax": "log", "softmax_backward": "log", "gated": "gelu", "gated_backward": "gelu"}
SCALARS = {"eps": 1e-6, "p": 0.0}  # what an operator takes them to be


@dataclass(frozen=True)
class Signature:
    """What an operator takes and gives, from its program with every option.

    `optional` says with which option an array goes; `flags` are options without an input.
    """

    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]
    optional: Mapping[str, str]
    scalars: tuple[str, ...]
    flags: tuple[str, ...]

    @property
    def schema(self) -> str:
        """The operator's schema in torch's words."""
        optional = [one for one in self.inputs if one.name in self.optional]
        words = [f"Tensor {one.name}" for one in self.inputs if one not in optional]
        words += [f"Tensor? {one.name}=None" for one in optional]
        words += [f"float {name}={SCALARS[name]}" for name in self.scalars]
        words += [f"bool {name}=False" for name in self.flags]
        given = ", ".join(["Tensor"] * len(self.outputs))
        return f"({', '.join(words)}) -> {given if len(self.outputs) == 1 else f'({given})'}"

    @property
    def names(self) -> tuple[str, ...]:
        """The operator's arguments in order."""
        first = [one.name for one in self.inputs if one.name not in self.optional]
        last = [one.name for one in self.inputs if one.name in self.optional]
        return (*first, *last, *self.scalars, *self.flags)


def signature(op: str) -> Signature:
    """The signature of an operation."""
    entry = OPS[op]
    program = row_program(RowConfig(op, 8, options=frozenset(name for name, _ in entry.optional)))
    optional = {
        word.split(":")[0].strip(): option
        for option, text in entry.optional
        for word in text.split(",")
    }
    written = written_names(program)
    given = {option for name, option in optional.items() if name not in written}
    flags = dict.fromkeys(option for option in optional.values() if option not in given)
    return Signature(
        tuple(one for one in program.arrays if one.name not in written),
        tuple(one for one in program.arrays if one.name in written),
        optional,
        tuple(name for name in SCALARS if name in {var.name for var in program.scalars}),
        (*flags, *((FLAGS[op],) if op in FLAGS else ())),
    )


SIGNATURES = {op: signature(op) for op, entry in OPS.items() if not entry.in_place}
