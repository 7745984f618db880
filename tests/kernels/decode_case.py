"""Small inputs of decode attention, and what float64 makes of them."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.kernels.attention.decode import DecodeConfig

Values = dict[str, NDArray[Any]]


def attended(
    config: DecodeConfig, q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], causal_rows: int
) -> NDArray[np.float64]:
    """The result of one sequence and key head in float64: packed rows `q`, all keys it has."""
    scale = config.scale if config.scale is not None else q.shape[-1] ** -0.5
    scores = scale * q.astype(np.float64) @ k.astype(np.float64).T
    if config.softcap:
        scores = config.softcap * np.tanh(scores / config.softcap)
    at = np.arange(len(k)) - (len(k) - causal_rows)
    query = np.arange(len(q))[:, None] // config.group
    seen = np.ones(scores.shape, bool)
    if config.causal:
        seen &= at <= query
    if config.window is not None:
        seen &= at > query - config.window
    scores = np.where(seen, scores, -np.inf)
    top = np.max(scores, axis=-1, keepdims=True, initial=-np.inf)
    exps = np.exp(scores - np.where(np.isinf(top), 0.0, top))
    total = exps.sum(-1, keepdims=True)
    return exps / np.where(total == 0.0, 1.0, total) @ v.astype(np.float64)


def decode_case(
    config: DecodeConfig,
    lengths: tuple[int, ...],
    queries: int = 1,
    heads: int = 2,
    splits: int = 3,
    seed: int = 0,
) -> tuple[Values, NDArray[np.float64]]:
    """(arrays of `decode`, the result in packed rows); `heads` are key heads.

    Pages lie in random order, with some that belong to nobody; beyond a length the caches hold
    large numbers, and the table numbers of other pages.
    """
    random = np.random.default_rng(seed)
    batch, rows, d = len(lengths), queries * config.group, config.head_dim
    most = max(lengths) + 5
    q = random.integers(-4, 5, (batch, heads, rows, d)) * 0.25
    kv = random.integers(-4, 5, (2, batch, heads, most, d)) * 0.25
    values = config.value_dim or d
    kv = kv[: 1 if config.value_dim else 2]
    want = np.stack(
        [
            np.stack(
                [
                    attended(config, q[b, h], kv[0, b, h, :n], kv[-1, b, h, :n, :values], queries)
                    for h in range(heads)
                ]
            )
            for b, n in enumerate(lengths)
        ]
    )
    for b, n in enumerate(lengths):
        kv[:, b, :, n:] = 50.0
    arrays: Values = {"q": q, "lengths": np.array(lengths, np.int32)}
    if config.page is None:
        arrays |= dict(zip("kv", kv, strict=False))
    else:
        columns = -(-most // config.page)
        place = random.permutation(batch * columns + 3)[: batch * columns]
        arrays["table"] = place.reshape(batch, columns).astype(np.int32)
        for name, source in zip("kv", kv, strict=False):
            pages = np.full((batch * columns + 3, config.page, heads, d), 50.0)
            for b in range(batch):
                for column in range(columns):
                    part = source[b, :, column * config.page : (column + 1) * config.page]
                    pages[arrays["table"][b, column], : part.shape[1]] = part.swapaxes(0, 1)
            arrays[name] = pages
    if config.sinks:  # some of them larger than all scores
        arrays["sinks"] = np.float32(random.integers(-3, 12, (heads, rows)))
        for b, h in np.ndindex(want.shape[:2]):
            n = lengths[b]
            scores = config.factor * q[b, h] @ kv[0, b, h, :n].T.astype(np.float64)
            weights = np.exp(scores).sum(-1)
            want[b, h] *= (weights / (weights + np.exp(arrays["sinks"][h])))[:, None]
    if config.narrow:  # factors of q and k that cancel, and one of v for every head
        ones = np.ones((batch, heads))
        own = 1.0 + 0.5 * np.arange(heads) * ones
        arrays |= {"scale_q": 0.5 * ones, "scale_k": 2.0 * ones, "scale_v": own}
        if config.value_dim:
            own = arrays.pop("scale_v") * 0.0 + 2.0
        want = want * own[..., None, None]
    if config.split:
        shape = (batch, heads, splits, rows)
        arrays |= {"parts": np.full((*shape, values), np.nan), "sums": np.full(shape, np.nan)}
    else:
        arrays["o"] = np.full((*q.shape[:-1], values), np.nan)
    return arrays, want


def joined(parts: NDArray[Any], sums: NDArray[Any]) -> NDArray[np.float64]:
    """One softmax from those of the parts, in float64."""
    top = sums.max(2, keepdims=True)
    weights = np.exp2(sums.astype(np.float64) - np.where(np.isinf(top), 0.0, top))
    total = weights.sum(2)
    out = (weights[..., None] * parts).sum(2)
    return out / np.where(total == 0.0, 1.0, total)[..., None]
