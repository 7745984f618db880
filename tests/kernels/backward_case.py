"""Small inputs of attention backward, and what float64 makes of them."""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.kernels.attention.backward import LOG2E
from warploom.kernels.attention.backward_config import BackwardConfig
from warploom.kernels.attention.shares import lists_of_tasks

Values = dict[str, NDArray[Any]]
SMS = 2  # that lists of tasks are made for


def gradients(config: BackwardConfig, values: Values) -> Values:
    """dq, dk and dv in float64, beside o, lse, and `base` and `delta` of the rows."""
    q, k, v, do = (np.asarray(values[name], np.float64) for name in ("q", "k", "v", "do"))
    k, v = (np.repeat(x, config.group, axis=1) for x in (k, v))
    scale = config.scale if config.scale is not None else q.shape[-1] ** -0.5
    scores, slope = scale * q @ k.swapaxes(-1, -2), 1.0
    if cap := config.softcap:
        scores = cap * np.tanh(scores / cap)
        slope = 1.0 - (scores / cap) ** 2
    if config.causal:
        rows, keys = scores.shape[-2:]
        seen = np.arange(keys) <= np.arange(rows)[:, None] + keys - rows
        scores = np.where(seen, scores, -np.inf)
    if config.window is not None:
        rows, keys = scores.shape[-2:]
        near = np.arange(keys) > np.arange(rows)[:, None] + keys - rows - config.window
        scores = np.where(near, scores, -np.inf)
    top = np.max(scores, axis=-1, keepdims=True)
    exps = np.exp(scores - np.where(np.isinf(top), 0.0, top))
    total = exps.sum(-1, keepdims=True)
    weights = exps / np.where(total == 0.0, 1.0, total)
    with np.errstate(divide="ignore"):
        lse = (np.where(np.isinf(top), 0.0, top) + np.log(total))[..., 0]
    grad = do @ v.swapaxes(-1, -2)
    delta = (do * (weights @ v)).sum(-1)
    change = weights * (grad - delta[..., None]) * slope
    shape = (k.shape[0], -1, config.group, k.shape[2])
    return {
        "dq": scale * change @ k,
        "dk": scale * (change.swapaxes(-1, -2) @ q).reshape(*shape, q.shape[3]).sum(2),
        "dv": (weights.swapaxes(-1, -2) @ do).reshape(*shape, v.shape[3]).sum(2),
        "o": weights @ v,
        "lse": lse,
        "base": np.where(np.isinf(lse), np.inf, lse * LOG2E),
        "delta": delta,
    }


def summed(config: BackwardConfig, arrays: Values, rows: int) -> NDArray[Any]:
    """dq from its sums."""
    sums = arrays["dq_sum"]
    if config.deterministic:  # what nobody has begun is none
        sums = np.where(arrays["turns"][..., None, None] != 0, sums, 0.0)
    if config.transposed:
        sums = sums.swapaxes(-1, -2)
    sums = sums.reshape(*sums.shape[:2], -1, sums.shape[-1])
    return config.factor * sums[:, :, :rows, : config.head_dim]


def backward_case(
    config: BackwardConfig, rows: int, keys: int, batch: int = 1, heads: int = 1, seed: int = 0
) -> tuple[Values, Values]:
    """(arrays of the kernel, the gradients)."""
    random = np.random.default_rng(seed)
    d, e = config.head_dim, config.value_dim or config.head_dim
    shapes = {"q": (batch, heads, rows, d), "do": (batch, heads, rows, e)}
    shapes |= {"k": (batch, heads // config.group, keys, d)}
    shapes |= {"v": (*shapes["k"][:3], e)}
    values: Values = {name: random.integers(-4, 5, shape) * 0.25 for name, shape in shapes.items()}
    want = gradients(config, values)
    values |= {name: want[name].astype(np.float32) for name in ("base", "delta")}
    if config.sums:
        more = config.vectors_shape((rows,))[0] - rows
        values |= {x: np.pad(values[x], ((0, 0), (0, 0), (0, more))) for x in ("base", "delta")}
    if not config.long:
        values["turns"] = np.zeros(config.turns_shape(shapes["q"][:3]), np.int32)
        none = np.nan if config.deterministic else 0.0  # the first to come replaces it
        values["dq_sum"] = np.full(config.sums_shape(shapes["q"][:3]), none, np.float32)
    if config.listed:
        own = replace(config, sms=SMS)
        values |= lists_of_tasks(own, *shapes["k"][:2], rows, keys)
    if config.cut:
        lead = shapes["k"][0] * shapes["k"][1]
        values["piece_sums"] = np.zeros(own.pieces_shape(lead, keys), np.float32)
    values |= {f"d{name}": np.full(shapes[name], np.nan, np.float32) for name in "kv"}
    return values, want
