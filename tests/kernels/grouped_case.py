"""Small inputs of grouped GEMM, and what float64 makes of them."""

import numpy as np

from warploom.kernels.gemm.grouped import SCALED, GroupedConfig


def listed(counts, rows):
    """The list of tasks, counted one by one."""
    begin, found = 0, []
    for expert, count in enumerate(counts):
        found += [(expert, begin + at, begin + count) for at in range(0, count, rows)]
        begin += count
    tiles = -(-begin // rows) + len(counts)
    return np.array([*found, *[(0, 0, 0)] * (tiles - len(found))], np.int32).reshape(-1, 3)


def _blocks(scales, shape):
    """Scales of blocks as those of elements."""
    wide = scales
    for axis, size in enumerate(shape):
        if wide.shape[axis] != size:
            wide = np.repeat(wide, SCALED, axis).take(range(size), axis)
    return wide


def grouped_case(config: GroupedConfig, counts, n, k, seed=0):
    """(arrays, result in float64); rows beyond a length are large and are not to be written."""
    random = np.random.default_rng(seed)
    columns = 2 * n if config.swiglu else n
    room, total = max([1, *counts]) + 3, sum(counts)
    experts = len(counts)
    masked = config.groups == "masked"
    a = random.integers(-4, 5, (experts, room, k) if masked else (total, k)) * 0.25
    b = random.integers(-4, 5, (experts, columns, k)) * 0.25
    deep, wide = -(-k // SCALED), -(-columns // SCALED)
    lead = a.shape[:-1]
    scale_a, scale_b = np.ones((*lead, 1)), np.ones((experts, columns, 1))
    arrays = {}
    if config.scales == "rows":
        scale_a, scale_b = random.uniform(0.5, 2, (*lead, 1)), random.uniform(0.5, 2, scale_b.shape)
        arrays |= {"scale_a": scale_a[..., 0], "scale_b": scale_b[..., 0]}
    if config.scales == "blocks":
        of_a = random.uniform(0.5, 2, (*lead, deep)).astype(np.float32)
        of_b = random.uniform(0.5, 2, (experts, wide, deep)).astype(np.float32)
        arrays |= {"scale_a": np.swapaxes(of_a, -1, -2), "scale_b": of_b}
        scale_a, scale_b = _blocks(of_a, a.shape), _blocks(of_b, b.shape)
    x, w = (a * scale_a).astype(np.float64), (b * scale_b).astype(np.float64)
    want = np.full((*lead, n), np.nan)
    ends = np.cumsum(counts)
    for expert, count in enumerate(counts):
        own = (expert, slice(count)) if masked else slice(ends[expert] - count, ends[expert])
        out = x[own] @ w[expert].T
        if config.swiglu:
            out = out[:, :n] / (1 + np.exp(-out[:, :n])) * out[:, n:]
        want[own] = out
        if masked:
            a[expert, count:] = 100.0
    arrays |= {"a": a, "b": b if config.b == "nk" else b.swapaxes(1, 2)}
    arrays["c"] = np.full(want.shape, np.nan)
    if masked:
        arrays["lengths"] = np.array(counts, np.int32)
    elif config.groups == "rows":
        arrays["tasks"] = listed(counts, config.tile[0])
    else:
        arrays |= {name: arrays[name][0] for name in ("b", "scale_b") if name in arrays}
    return {name: np.ascontiguousarray(one) for name, one in arrays.items()}, want
