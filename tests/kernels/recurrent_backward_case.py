"""Small inputs of recurrent attention backward, and its gradients in float64."""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.gpu.cases import distance
from tests.kernels.test_recurrent import case

from warploom import tile as t
from warploom.kernels.recurrent.backward import (
    backward_arrays,
    made_arrays,
    parts_of,
    recurrent_backward,
    sizes_of,
)
from warploom.kernels.recurrent.config import RecurrentConfig
from warploom.kernels.recurrent.reference import gradients, reference

Values = dict[str, NDArray[Any]]
SCALE = 0.5


def backward_case(
    config: RecurrentConfig, rows: int = 150, heads: int = 2, **more: Any
) -> tuple[Values, Values]:
    """(arrays of the kernel, the gradients by the names of inputs); what is written is NaN."""
    kept, random = replace(config, states=True), np.random.default_rng(5)
    values = case(kept, rows, heads, **more)
    values["do"] = t.round_to(t.BF16, random.normal(size=values.pop("o").shape))
    if config.final:
        values["dfinal"] = random.normal(size=values["final"].shape).astype(np.float32)
    want, before = gradients(config, values, SCALE), reference(kept, values, SCALE)
    values["states"] = t.round_to(t.BF16, before["states"])
    sizes = sizes_of(config, 1, rows, heads)
    for name, one in made_arrays(config).items():
        values[name] = np.full([sizes[dim] for dim in one.dims], np.nan)
    return values, want


def of_part(config: RecurrentConfig, values: Values, part: str) -> Values:
    """The arrays of one kernel."""
    return {name: values[name] for name in backward_arrays(config, part)}


def interpreted(config: RecurrentConfig, values: Values) -> Values:
    """What all kernels leave."""
    for part in parts_of(config):
        program = recurrent_backward(config, part)
        values = values | t.interpret(program, of_part(config, values, part), {"scale": SCALE})
    return values


def summed(got: Values, want: Values) -> Values:
    """The gradients by the names of inputs, from the parts that the kernel leaves."""
    found: Values = {}
    for name, right in want.items():
        one = np.asarray(got[f"d{name}"], np.float64)
        if one.shape != right.shape:
            axis = 2 if right.ndim > 1 else 0
            one = one.sum((0, 2)) if axis == 0 else one
            parts = (right.shape[axis], -1)
            one = one.reshape(*one.shape[:axis], *parts, *one.shape[axis + 1 :]).sum(axis + 1)
        found[name] = one
    return found


def far(got: Values, want: Values) -> dict[str, float]:
    """The relative error in norm of every gradient."""
    found = summed(got, want)
    return {name: distance(found[name], right) for name, right in want.items()}
