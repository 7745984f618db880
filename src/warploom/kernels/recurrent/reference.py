"""Recurrent attention forward in float64, row by row: what `recurrent.program` is checked by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.kernels.recurrent.program import RecurrentConfig

Wide = NDArray[np.float64]


def reference(
    config: RecurrentConfig, values: Mapping[str, NDArray[Any]], scale: float = 1.0
) -> dict[str, Wide]:
    """{"o": ..., "final": ...} in float64; `values` has the arrays in their element types."""
    wide = {name: np.asarray(value, np.float64) for name, value in values.items()}
    v = wide["v"]
    batch, rows, heads, _ = v.shape
    shared = heads // wide["q"].shape[2]
    q, k = (np.repeat(wide[name], shared, axis=2) for name in "qk")
    decay, added = np.ones((batch, rows, heads)), np.ones((batch, rows, heads))
    if config.decay in ("head", "token"):
        decay *= np.exp(wide["g"])
    if config.delta:
        added = wide["beta"]
    if config.softplus:
        wide["dt"] = np.logaddexp(wide["dt"] + wide["bias"], 0.0)
    if config.decay == "step":
        decay, added = np.exp(wide["dt"] * wide["a"]), wide["dt"]
    erased = 1.0 if config.delta else 0.0
    channels = np.exp(wide["g"]) if config.decay == "channel" else decay[..., None]
    state = np.zeros((batch, heads, q.shape[-1], v.shape[-1]))
    if config.initial:
        state += wide["initial"]
    out = np.zeros(v.shape)
    for i in range(rows):
        state = channels[:, i, :, :, None] * state
        known = erased * np.einsum("bhd,bhde->bhe", k[:, i], state)
        new = added[:, i, :, None] * (v[:, i] - known)
        state = state + k[:, i, :, :, None] * new[:, :, None, :]
        out[:, i] = scale * np.einsum("bhd,bhde->bhe", q[:, i], state)
    if config.skip:
        out += wide["skip"][:, None] * v
    return {"o": out} | ({"final": state} if config.final else {})
