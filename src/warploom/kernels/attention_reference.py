"""Attention forward in float64 with numpy: what `kernels.attention` is checked against."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.kernels.attention import AttentionConfig


def reference(
    config: AttentionConfig, values: dict[str, NDArray[Any]]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(o, lse) in float64; `values` has q, k, v already in their element type."""
    q = values["q"].astype(np.float64)
    k, v = (np.repeat(values[n].astype(np.float64), config.group, axis=1) for n in ("k", "v"))
    scores = np.einsum("bhrd,bhkd->bhrk", q, k) * config.factor
    rows, keys = scores.shape[-2:]
    row_at, key_at = np.indices((rows, keys), dtype=np.int64)
    row_at = row_at + (keys - rows)
    seen: NDArray[Any] = np.ones((rows, keys), bool)
    if config.causal:
        seen &= key_at <= row_at
    if config.window is not None:
        seen &= key_at > row_at - config.window
    scores = np.where(seen, scores, -np.inf)
    top = scores.max(-1, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(np.isinf(top), 0.0, top))
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = np.where(total == 0, -np.inf, np.where(np.isinf(top), 0, top) + np.log(total))
    out = np.einsum("bhrk,bhkd->bhrd", weights / np.where(total == 0, 1.0, total), v)
    return out, lse[..., 0]
