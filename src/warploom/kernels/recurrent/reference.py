"""Recurrent attention in float64, row by row: what `recurrent.program` and the programs of its
gradients are checked by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.kernels.recurrent.program import RecurrentConfig
from warploom.kernels.recurrent.task import CHUNK

Wide = NDArray[np.float64]
KEY, VALUE, OUTER = "bhde,bhe->bhd", "bhd,bhde->bhe", "bhd,bhe->bhde"


@dataclass(frozen=True)
class _Rows:
    """What the loops over rows read: arrays in float64, q and k of every head, the gates of every
    row and channel, and by what a row is added (`weights`: [batch, rows, heads])."""

    wide: dict[str, Wide]
    q: Wide
    k: Wide
    v: Wide
    gates: Wide
    weights: Wide
    erased: float


def _rows(config: RecurrentConfig, values: Mapping[str, NDArray[Any]]) -> _Rows:
    wide = {name: np.asarray(value, np.float64) for name, value in values.items()}
    v = wide["v"]
    batch, rows, heads, _ = v.shape
    shared = heads // wide["q"].shape[2]
    q, k = (np.repeat(wide[name], shared, axis=2) for name in "qk")
    decay, weights = np.ones((batch, rows, heads)), np.ones((batch, rows, heads))
    if config.decay in ("head", "token"):
        decay *= np.exp(wide["g"])
    if config.delta:
        weights = wide["beta"]
    if config.softplus:
        wide["raw"] = wide["dt"] + wide["bias"]
        wide["dt"] = np.logaddexp(wide["raw"], 0.0)
    if config.decay == "step":
        decay, weights = np.exp(wide["dt"] * wide["a"]), wide["dt"]
    channels = np.exp(wide["g"]) if config.decay == "channel" else decay[..., None]
    gates = np.broadcast_to(channels, q.shape)
    return _Rows(wide, q, k, v, gates, weights, 1.0 if config.delta else 0.0)


def reference(
    config: RecurrentConfig, values: Mapping[str, NDArray[Any]], scale: float = 1.0
) -> dict[str, Wide]:
    """{"o": ..., "final": ..., "states": ...} in float64, the latter two where the configuration
    has them (and without `fresh` and `inverse`); `values` has the arrays in their element types."""
    given = _rows(config, values)
    if config.taylor:
        q, k = (_features(x * scale**0.5) for x in (given.q, given.k))
        gates = np.ones_like(q)
        given, scale = replace(given, q=q, k=k, gates=gates), 1.0
    out = np.zeros(given.v.shape)
    kept: list[Wide] = []
    state = _start(config, given)
    for i in range(given.q.shape[1]):
        if i % CHUNK == 0:
            kept.append(state.swapaxes(-1, -2))
        state = _moved(given, i, state)[0]
        out[:, i] = scale * np.einsum(VALUE, given.q[:, i], state)
    if config.skip:
        out += given.wide["skip"][:, None] * given.v
    found = {"o": out} | ({"final": state} if config.final else {})
    return found | ({"states": np.stack(kept, 1)} if config.states else {})


def _features(x: Wide) -> Wide:
    """1, x and half of all products of two of it, so that phi(q) phi(k) = 1 + q k + (q k)^2 / 2."""
    products = np.einsum("bnhd,bnhe->bnhde", x, x).reshape(*x.shape[:3], -1) / 2**0.5
    return np.concatenate([np.ones((*x.shape[:3], 1)), x, products], -1)


def _start(config: RecurrentConfig, given: _Rows) -> Wide:
    batch, _, heads, depth = given.q.shape
    state = np.zeros((batch, heads, depth, given.v.shape[-1]))
    return state + given.wide["initial"] if config.initial else state


def _moved(given: _Rows, i: int, state: Wide) -> tuple[Wide, Wide, Wide]:
    """(the state after row i, the one before it under its gate, the row without its weight)."""
    under = given.gates[:, i, :, :, None] * state
    new = given.v[:, i] - given.erased * np.einsum(VALUE, given.k[:, i], under)
    return under + np.einsum(OUTER, given.k[:, i], given.weights[:, i, :, None] * new), under, new


def gradients(
    config: RecurrentConfig, values: Mapping[str, NDArray[Any]], scale: float = 1.0
) -> dict[str, Wide]:
    """The gradients in float64 of <do, o> + <dfinal, final> by every input, by the input's name.

    `values` has the inputs of `recurrent`, `do` and with `config.final` `dfinal`.
    """
    given = _rows(config, values)
    q, k, wide = given.q, given.k, given.wide
    states = [_start(config, given)]
    for i in range(q.shape[1]):
        states.append(_moved(given, i, states[-1])[0])
    dq, dk, dv, dg = (np.zeros(x.shape) for x in (q, k, given.v, q))
    dweights = np.zeros(given.weights.shape)
    grad = wide["dfinal"].copy() if config.final else np.zeros(states[0].shape)
    for i in reversed(range(q.shape[1])):
        weight = given.weights[:, i, :, None]
        _, under, new = _moved(given, i, states[i])
        dq[:, i] = scale * np.einsum(KEY, states[i + 1], wide["do"][:, i])
        grad = grad + scale * np.einsum(OUTER, q[:, i], wide["do"][:, i])
        dnew = np.einsum(VALUE, k[:, i], grad)
        dweights[:, i] = (dnew * new).sum(-1)
        dv[:, i] = weight * dnew
        erased = given.erased * weight * dnew
        dk[:, i] = np.einsum(KEY, grad, weight * new) - np.einsum(KEY, under, erased)
        grad = grad - np.einsum(OUTER, k[:, i], erased)
        dg[:, i] = (grad * under).sum(-1)
        grad = given.gates[:, i, :, :, None] * grad
    found = {"v": dv, "initial": grad} if config.initial else {"v": dv}
    if config.skip:
        found["v"] = dv + wide["skip"][:, None] * wide["do"]
        found["skip"] = (wide["do"] * given.v).sum((0, 1, 3))
    batch, rows, groups, depth = wide["q"].shape
    for name, one in (("q", dq), ("k", dk)):
        found[name] = one.reshape(batch, rows, groups, -1, depth).sum(3)
    return found | _of_gates(config, wide, dg, dweights)


def _of_gates(
    config: RecurrentConfig, wide: Mapping[str, Wide], dg: Wide, dweights: Wide
) -> dict[str, Wide]:
    """The gradients of what gates and weights are made from; `dg` are those of logarithms."""
    found: dict[str, Wide] = {"beta": dweights} if config.delta else {}
    rows = dg.sum(-1)
    if config.decay == "channel":
        found["g"] = dg
    elif config.decay == "token":
        found["g"] = rows
    elif config.decay == "head":
        found["g"] = rows.sum((0, 1))
    elif config.decay == "step":
        found["a"] = (wide["dt"] * rows).sum((0, 1))
        found["dt"] = dweights + wide["a"] * rows
        if config.softplus:
            found["dt"] = found["dt"] / (1.0 + np.exp(-wide["raw"]))
            found["bias"] = found["dt"].sum((0, 1))
    return found
