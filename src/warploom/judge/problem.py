"""A problem: what a candidate has to compute, its arrays and sizes, and how it is judged.

def reference(x):
    return torch.softmax(x, -1)

problem = Problem(
    reference,
    inputs={"x": tile.array(tile.FP32, "rows n")},
    outputs={"y": tile.array(tile.FP32, "rows n")},
    sizes=[{"rows": 4, "n": 64}, {"rows": 3, "n": 37}],
)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from warploom.errors import InputError
from warploom.judge.tolerance import spreads_of, torch
from warploom.machine import Machine
from warploom.objects import called, load_object
from warploom.runtime.encoding import Bits
from warploom.runtime.patterns import DEFAULT_PATTERNS, check_patterns, generate
from warploom.tile.dtypes import DTYPES, FP32, DType
from warploom.tile.ir import Array
from warploom.tile.rounding import Spread

Sizes = Mapping[str, int]
Values = Mapping[str, Bits]  # arrays by name, their elements as raw bits
EVERYTHING = "*"


@dataclass(frozen=True)
class Signature:
    """What a candidate knows of a problem: its arrays, and which operations it must not call.

    `forbidden` has names of torch's operations ("mm", "_softmax"); "*" is every one that computes.
    """

    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]
    forbidden: tuple[str, ...] = ()


@dataclass(frozen=True)
class Problem:
    """A problem.

    reference   of tensors in the order of `inputs`, gives a tensor or a tuple of them; it is run
                in float64
    inputs, outputs   arrays by name, `tile.array(BF16, "m k")`
    sizes       the length of every dimension; among them some that fit no tile
    timed       sizes to time at, on a GPU, where they are checked, too
    patterns    what floating inputs are filled with, of `runtime.patterns`
    spans       integer inputs: the dimension whose length their values are below
    within      the type in which a candidate may keep intermediate results
    forbidden   operations of torch that it must not call: see `Signature`
    repeatable  two calls on the same inputs must give the same bits
    work        floating-point operations at some sizes, for the percentage of the limit
    """

    reference: Callable[..., Any]
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]
    sizes: Sequence[Sizes]
    timed: Sequence[Sizes] = ()
    patterns: tuple[str, ...] = DEFAULT_PATTERNS
    spans: Mapping[str, str] = field(default_factory=dict[str, str])
    within: DType = FP32
    forbidden: tuple[str, ...] = ()
    repeatable: bool = True
    work: Callable[[Sizes], float] | None = None

    def __post_init__(self) -> None:
        """Refuse sizes and names that do not fit together."""
        check_patterns(self.patterns)
        dims = {dim for one in (*self.inputs.values(), *self.outputs.values()) for dim in one.dims}
        if not (self.inputs and self.outputs and self.sizes):
            raise InputError("a problem needs inputs, outputs and sizes, at least one of each")
        if shared := set(self.inputs) & set(self.outputs):
            raise InputError(f"array {min(shared)} is an input and an output")
        for sizes in (*self.sizes, *self.timed):
            if set(sizes) != dims or any(not 1 <= length < 2**31 for length in sizes.values()):
                raise InputError(
                    f"sizes {dict(sizes)}: expected a length for each of {', '.join(sorted(dims))}"
                )
        for name, one in self.inputs.items():
            if (not one.dtype.is_float) != (self.spans.get(name) in dims):
                raise InputError(
                    f"input {name}: integers, and only they, need a dimension in spans"
                )

    @property
    def signature(self) -> Signature:
        """What a candidate is told."""
        inputs, outputs = (
            tuple(replace(one, name=name) for name, one in table.items())
            for table in (self.inputs, self.outputs)
        )
        return Signature(inputs, outputs, self.forbidden)

    def values(self, sizes: Sizes, pattern: str, seed: int) -> dict[str, Bits]:
        """The inputs of one call, each in its shape."""
        found: dict[str, Bits] = {}
        for salt, one in enumerate(self.signature.inputs):
            shape = shape_of(one, sizes)
            span = (0, sizes[self.spans[one.name]] if one.name in self.spans else 1)
            count = int(np.prod(shape))
            bits = generate(one.dtype, count, pattern, seed, salt, shape[-1], span)
            found[one.name] = bits.reshape(shape)
        return found

    def expected(self, values: Values, sizes: Sizes, seed: int) -> dict[str, Spread]:
        """The right outputs and how far rounding may take them; `InputError` for a reference that
        gives something else."""
        inputs = [tensor_of(values[one.name], one.dtype) for one in self.signature.inputs]
        outputs = self.signature.outputs
        found = called(
            "the reference", lambda: spreads_of(self.reference, inputs, outputs, self.within, seed)
        )
        for one in outputs:
            if found[one.name].exact.shape != shape_of(one, sizes):
                raise InputError(
                    f"the reference gives {one.name} of shape {list(found[one.name].exact.shape)} "
                    f"for {dict(sizes)}, expected {list(shape_of(one, sizes))}"
                )
        return found

    def limit_us(self, sizes: Sizes, gpu: Machine) -> float:
        """Microseconds that no kernel goes below: every array crosses DRAM once, and all `work` is
        done at the rate of the narrowest operands."""
        arrays = (*self.signature.inputs, *self.signature.outputs)
        moved = sum(one.dtype.bytes * int(np.prod(shape_of(one, sizes))) for one in arrays)
        seconds = moved / gpu.value("dram.bandwidth")
        if self.work is not None:
            kind = min((a.dtype for a in arrays if a.dtype.is_float), key=lambda one: one.bits)
            peak = "peak.fp32" if kind.bits == FP32.bits else f"peak.tensor_{kind.rate}"
            seconds = max(seconds, self.work(sizes) / (gpu.value(peak) * 1e12))
        return seconds * 1e6


def load_problem(text: str) -> tuple[Problem, Path]:
    """The problem of `FILE.py`, where it is called `problem`, or `FILE.py:OBJECT`; its file."""
    path, colon, _ = text.rpartition(":")
    name = text if colon and path.endswith(".py") else f"{text}:problem"
    found = load_object(name)
    if not isinstance(found, Problem):
        raise InputError(f"{name} is a {type(found).__name__}, expected a warploom.judge.Problem")
    return found, Path(name.rpartition(":")[0]).resolve()


def shape_of(one: Array, sizes: Sizes) -> tuple[int, ...]:
    """The shape of an array."""
    return tuple(sizes[dim] for dim in one.dims)


def tensor_of(bits: Bits, kind: DType) -> Any:
    """A tensor with these elements, in memory of its own."""
    signed = np.ascontiguousarray(bits).view(f"i{bits.itemsize}")
    return torch.from_numpy(signed.copy()).view(getattr(torch, kind.library))


def bits_of(tensor: Any) -> Bits:
    """The elements of a tensor as raw bits, copied to the host."""
    size = tensor.element_size()
    signed = getattr(torch, f"int{8 * size}")
    plain = tensor.detach().to("cpu", copy=True).contiguous()
    return plain.view(signed).numpy().view(f"u{size}")


KINDS: Mapping[Any, DType] = {getattr(torch, one.library): one for one in DTYPES.values()}
