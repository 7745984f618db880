"""Attention forward in float64 with numpy: what `attention.program` is checked against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.kernels.attention.program import SCALE_BLOCK, AttentionConfig
from warploom.tile.typing import quad_places

Wide = NDArray[np.float64]


def task_table(row_lengths: Sequence[int], key_lengths: Sequence[int], rows: int) -> NDArray[Any]:
    """`tiles` of packed attention: (sequence, row tile) of every task, most keys first.

    `rows` is the tile's. Sorting by work is the longest-first rule for the last wave.
    """
    tasks = [
        (length, sequence, tile)
        for sequence, (count, length) in enumerate(zip(row_lengths, key_lengths, strict=True))
        for tile in range(-(-count // rows))
    ]
    tasks.sort(key=lambda task: (-task[0], task[1], -task[2]))
    return np.array([task[1:] for task in tasks], dtype=np.int32).reshape(-1, 2)


def natural_order(v: NDArray[Any]) -> NDArray[Any]:
    """`v: [..., places]` in the order of quads with its keys one after another."""
    return v[..., np.argsort(quad_places(v.shape[-1]))]


def reference(config: AttentionConfig, values: dict[str, NDArray[Any]]) -> tuple[Wide, Wide]:
    """(o, lse) in float64; `values` has q, k, v already in their element type."""
    wide = {name: value.astype(np.float64) for name, value in values.items()}
    if config.packed:
        return _packed(config, wide)
    if config.narrow:
        if config.ordered:
            natural = natural_order(wide["v"])[..., : wide["k"].shape[-2]]
            wide["v"] = np.swapaxes(natural, -1, -2)
        for name in "qkv":
            factor = wide[f"scale_{name}"]
            if config.block_scales and name != "v":
                rows = wide[name].shape[-2]
                factor = np.repeat(factor, SCALE_BLOCK, axis=-1)[..., :rows, None]
            elif config.head_scales or config.block_scales:
                factor = factor[..., None, None]
            wide[name] = wide[name] * factor
    out, lse = _dense(config, wide)
    return out * wide["scale_o"][0] if config.result.bits == 8 else out, lse


def _packed(config: AttentionConfig, wide: dict[str, Wide]) -> tuple[Wide, Wide]:
    out = np.zeros((*wide["q"].shape[:2], wide["v"].shape[2]))
    lse = np.zeros(wide["q"].shape[1::-1])
    rows, keys = (wide[name].astype(int) for name in ("row_bounds", "key_bounds"))
    for s in range(len(rows) - 1):
        r, k = slice(rows[s], rows[s + 1]), slice(keys[s], keys[s + 1])
        part = {"q": wide["q"][r], "k": wide["k"][k], "v": wide["v"][k]}
        one = {name: value.transpose(1, 0, 2)[None] for name, value in part.items()}
        o, natural = _dense(config, one)
        out[r], lse[:, r] = o[0].transpose(1, 0, 2), natural[0]
    return out, lse


def _dense(config: AttentionConfig, values: dict[str, Wide]) -> tuple[Wide, Wide]:
    q = values["q"]
    k, v = (np.repeat(values[n], config.group, axis=1) for n in ("k", "v"))
    scale = config.scale if config.scale is not None else q.shape[-1] ** -0.5
    scores = np.einsum("bhrd,bhkd->bhrk", q, k) * scale
    if config.softcap:
        scores = config.softcap * np.tanh(scores / config.softcap)
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
