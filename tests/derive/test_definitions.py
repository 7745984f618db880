"""The named formulas, the operators and the GPU bench's references against textbook definitions.

Nothing here is read from the front end: every factor follows from the arrays' shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.derive.cases import small

from bench import derived
from warploom.derive.derive import derive
from warploom.derive.formula.evaluate import compare, evaluate, random_inputs
from warploom.derive.formula.frontend import build, power_of_size, softmax, tensor
from warploom.derive.formula.library import FORMULAS, formula
from warploom.derive.formula.ops import MAPS
from warploom.errors import InputError

ROOT = Path(__file__).resolve().parents[2]
Arrays = Mapping[str, Any]


def probabilities(scores: Any) -> Any:
    """Softmax along the last axis."""
    weights = np.exp(scores)
    return weights / weights.sum(-1, keepdims=True)


def attention(q: Any, k: Any, v: Any, seen: Any = True) -> Any:
    """softmax(q kᵀ / √d) v over the keys that are seen; heads by broadcasting."""
    scores = q @ np.swapaxes(k, -1, -2) / math.sqrt(q.shape[-1])
    return probabilities(np.where(seen, scores, -np.inf)) @ v


def before(q: Any, k: Any, window: int) -> Any:
    """Which keys a row sees, the last row standing at the last key."""
    distance = np.arange(q.shape[-2])[:, None] + k.shape[-2] - q.shape[-2] - np.arange(k.shape[-2])
    return (distance >= 0) & (distance < window)


def latent(a: Arrays) -> Any:
    """DeepSeek-V2's absorbed attention: heads of 128 + 64 elements before absorption."""
    scores = np.einsum("hqd,xd->hqx", a["Q"], a["C"]) + np.einsum("hqr,xr->hqx", a["Qr"], a["Kr"])
    return np.einsum("hqx,xd->hqd", probabilities(scores / math.sqrt(192)), a["C"])


def layer_norm(x: Any) -> Any:
    """Mean 0, variance 1 along the last axis (the library adds 1e-6 to the variance)."""
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True))


def rms(x: Any) -> Any:
    """Root mean square 1 along the last axis."""
    return x / np.sqrt(np.square(x).mean(-1, keepdims=True))


def spherical(q: Any, k: Any, v: Any) -> Any:
    """Scores of length 1."""
    scores = q @ k.T
    return scores / np.linalg.norm(scores, axis=-1, keepdims=True) @ v


def gelu(x: Any) -> Any:
    """x times the normal distribution function: what the tanh form approximates."""
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def logistic(x: Any) -> Any:
    """1 / (1 + e^-x)."""
    return 1 / (1 + np.exp(-x))


def state_space(a: Arrays) -> Any:
    """h_t = e^A_t h_(t-1) + B_t x_tᵀ, y_t = C_t h_t."""
    state, rows = 0.0, []
    for decay, b, x, c in zip(a["A"], a["B"], a["X"], a["C"], strict=True):
        state = np.exp(decay)[:, None] * state + np.outer(b, x)
        rows.append(c @ state)
    return np.stack(rows)


def convolution(image: Any, weight: Any) -> Any:
    """Σ_wc image[o + w, c] weight[w, c, n]."""
    width = weight.shape[0]
    rows = range(image.shape[0] - width + 1)
    return np.stack([np.einsum("wc,wcn->n", image[o : o + width], weight) for o in rows])


def largest(x: Any, count: int) -> Any:
    """The largest along the last axis, in order."""
    return np.sort(x, -1)[..., ::-1][..., :count]


DEFINITIONS: dict[str, Callable[[Arrays], Any]] = {
    "matmul": lambda a: a["A"] @ a["B"],
    "attention": lambda a: attention(a["Q"], a["K"], a["V"]),
    "mha": lambda a: attention(a["Q"], a["K"], a["V"]),
    "gqa": lambda a: attention(a["Q"], a["K"][:, None], a["V"][:, None]),
    "gqa_decode": lambda a: attention(a["Q"], a["K"][:, None], a["V"][:, None]),
    "mqa": lambda a: attention(a["Q"], a["K"], a["V"]),
    "mla": latent,
    "causal": lambda a: attention(a["Q"], a["K"], a["V"], before(a["Q"], a["K"], 10**9)),
    "window": lambda a: attention(a["Q"], a["K"], a["V"], before(a["Q"], a["K"], 1024)),
    "spherical": lambda a: spherical(a["Q"], a["K"], a["V"]),
    "cross_entropy": lambda a: (
        np.log(np.exp(a["X"] @ a["W"].T).sum(-1)) - (a["X"] * a["T"]).sum(-1)
    ),
    "rmsnorm": lambda a: rms(a["X"]) * a["G"],
    "rmsnorm_matmul": lambda a: rms(a["X"]) * a["G"] @ a["W"],
    "layernorm": lambda a: layer_norm(a["X"]) * a["G"] + a["B"],
    "layernorm_matmul": lambda a: (layer_norm(a["X"]) * a["G"] + a["B"]) @ a["W"],
    "mlp": lambda a: gelu(a["X"] @ a["W1"]) @ a["W2"],
    "swiglu": lambda a: (
        ((a["X"] @ a["Wg"]) * logistic(a["X"] @ a["Wg"]) * (a["X"] @ a["Wu"])) @ a["W2"]
    ),
    "linear_attention": lambda a: np.tril(a["Q"] @ a["K"].T) @ a["V"],
    "ssm": state_space,
    "variance": lambda a: a["X"].var(-1),
    "logsumexp": lambda a: np.log(np.exp(a["X"]).sum(-1)),
    "softmax": lambda a: probabilities(a["X"]),
    "router": lambda a: probabilities(largest(a["X"] @ a["W"].T, 8)),
    "convolution": lambda a: convolution(a["X"], a["W"]),
}
# What a definition leaves out: the epsilon of a norm, the tanh form of gelu.
ALLOWED = {"rmsnorm": 1e-5, "layernorm": 1e-5, "mlp": 2e-3}


@pytest.mark.parametrize("name", [entry.name for entry in FORMULAS])
def test_a_named_formula_is_its_definition(name: str) -> None:
    for limit in (14, 30):  # two lengths of every axis: no factor may be a constant of one
        diagram = small(name, limit)
        arrays = random_inputs(diagram, limit)
        (output,) = diagram.outputs
        got = evaluate(diagram, arrays)[output]
        allowed = ALLOWED.get(name.removesuffix("_matmul"), 1e-12)
        assert compare({"out": got}, {"out": DEFINITIONS[name](arrays)}) < allowed


@pytest.mark.parametrize("width", [3, 16, 64, 128])
def test_a_derivation_follows_the_head_dimension(width: int) -> None:
    found = derive(formula("attention").resized({"q": 40, "x": 48, "d": width}), memory=2048)
    for depth in (2, 7):  # where its kernels are run at other lengths, too
        error, _ = found.verify({"d": depth})
        assert error < 1e-12
    whole = found.diagram.resized({"q": 5, "x": 6, "e": 4})
    arrays = random_inputs(whole)
    want = attention(arrays["Q"], arrays["K"], arrays["V"])
    assert compare(evaluate(whole, arrays), {"out": want}) < 1e-12


def test_a_power_of_a_size_needs_one_axis_of_that_name() -> None:
    q, k, v = tensor("Q", "q d"), tensor("K", "x d"), tensor("V", "x d")
    with pytest.raises(InputError, match="expected one axis"):
        build("two", softmax(q @ k.T * power_of_size("d", -0.5)) @ v)
    with pytest.raises(InputError, match="expected one axis"):
        build("none", q * power_of_size("y", 2))


def test_a_constant_that_follows_an_axis_is_not_folded_into_a_lemma() -> None:
    """Where it stands behind a running statistic, a lemma moves it: it has to stay a box."""
    q, k, v = tensor("Q", "q d"), tensor("K", "x d"), tensor("V", "x e")
    weights = softmax(q @ k.T) * power_of_size("d", -0.5)
    found = derive(build("late", weights @ v, {"q": 40, "x": 48, "d": 16, "e": 16}), memory=2048)
    assert found.verify()[0] < 1e-12


PLAIN: dict[str, Callable[[float], float]] = {
    "exp": math.exp,
    "log": math.log,
    "sqrt": math.sqrt,
    "rsqrt": lambda x: 1 / math.sqrt(x),
    "square": lambda x: x * x,
    "recip": lambda x: 1 / x,
    "neg": lambda x: -x,
    "abs": abs,
    "relu": lambda x: max(x, 0.0),
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "silu": lambda x: x / (1 + math.exp(-x)),
    "gelu": lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2,
    "tanh": math.tanh,
    "sin": math.sin,
    "cos": math.cos,
}


@pytest.mark.parametrize("spec", [s for s in MAPS if s.arity == 1], ids=lambda s: s.name)
def test_operators_mean_what_they_are_called(spec: Any) -> None:
    positive = spec.name in ("log", "sqrt", "rsqrt")
    for x in (0.1, 0.7, 2.5) if positive else (-2.5, -0.7, 0.1, 2.5):
        want = PLAIN[spec.name](x)
        # The largest distance of the tanh form from gelu is 4.7e-4.
        assert float(spec.apply(x)) == pytest.approx(
            want, abs=5e-4 if spec.name == "gelu" else 1e-14
        )


def test_the_gpu_bench_compares_with_the_definitions() -> None:
    torch = pytest.importorskip("torch")
    for name, _ in derived.CASES:
        for limit in (14, 30):
            arrays = random_inputs(small(name, limit), limit)
            given = {k: torch.from_numpy(v) for k, v in arrays.items()}
            got = derived.reference(torch, name, given).numpy()
            error = compare({"out": got}, {"out": DEFINITIONS[name](arrays)})
            assert error < ALLOWED.get(name, 1e-5), name
