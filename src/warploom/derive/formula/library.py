"""Named formulas: what `warploom derive NAME` knows. Each is a few lines of the front end.

None of them says how to fuse, tile or stream: that is what the floor derives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from warploom.derive.formula import frontend as f
from warploom.derive.formula.frontend import Expr, build, tensor
from warploom.derive.formula.graph import Diagram
from warploom.errors import InputError


@dataclass(frozen=True)
class Formula:
    """One entry: the formula as a reader writes it, its builder, the source."""

    name: str
    text: str
    make: Callable[[], Expr | Mapping[str, Expr]]
    sizes: Mapping[str, int]
    source: str = ""


LATENT_WIDTH = 128 + 64
"""Elements of a head's query in DeepSeek-V2 (2405.04434, section 3.1.2: d_h and d_h^R):
the scores are divided by its root. It is no axis once the queries are multiplied into the latent
space, whose width is `d`."""


def _qkv(heads: str = "", groups: str = "") -> tuple[Expr, Expr, Expr]:
    """Q, K, V; `heads` batch axes of Q, `groups` the batch axes K and V share."""
    q = tensor("Q", f"{heads} q d".split())
    return q, tensor("K", f"{groups} x d".split()), tensor("V", f"{groups} x e".split())


def _scores(q: Expr, k: Expr) -> Expr:
    """q·kᵀ / √d with the batch axes that both or one of them carry."""
    out = (*(a for a in q.axes if a != "d"), "x")
    return (f.contract(q, k, out=out) * f.power_of_size("d", -0.5)).named("S")


def _attend(p: Expr, v: Expr) -> Expr:
    """Σ_x p v."""
    return f.contract(p, v, out=(*(a for a in p.axes if a != "x"), "e"))


def _attention(heads: str = "", groups: str = "") -> Expr:
    q, k, v = _qkv(heads, groups)
    return _attend(f.softmax(_scores(q, k), "x"), v)


def _latent() -> Expr:
    q, c = tensor("Q", "h q d"), tensor("C", "x d")
    qr, kr = tensor("Qr", "h q r"), tensor("Kr", "x r")
    score = f.contract(q, c, out=("h", "q", "x")) + f.contract(qr, kr, out=("h", "q", "x"))
    scaled = (score * LATENT_WIDTH**-0.5).named("S")
    return f.contract(f.softmax(scaled, "x"), c, out=("h", "q", "d"))


def _causal(window: int = 0) -> Expr:
    q, k, v = _qkv()
    return _attend(f.softmax(f.causal(_scores(q, k), "q", "x", window), "x"), v)


def _spherical() -> Expr:
    q, k, v = _qkv()
    score = _scores(q, k)
    length = f.apply("sqrt", f.reduce("sum", f.apply("square", score), "x").named("z"))
    return _attend((score / length).named("p"), v)


def _cross_entropy() -> Mapping[str, Expr]:
    x, w = tensor("X", "m d"), tensor("W", "v d")
    logits = f.contract(x, w, out=("m", "v")).named("L")
    target = tensor("T", "m d")
    picked = f.contract(x, target, out=("m",)).named("t")
    return {"loss": f.logsumexp(logits, "v") - picked}


def _rmsnorm() -> Expr:
    return f.rms_norm(tensor("X", "m d"), tensor("G", "d"))


def _layernorm() -> Expr:
    return f.layer_norm(tensor("X", "m d"), tensor("G", "d"), tensor("B", "d"))


def _mlp() -> Expr:
    x, up, down = tensor("X", "m d"), tensor("W1", "d h"), tensor("W2", "h n")
    return f.apply("gelu", x @ up) @ down


def _swiglu() -> Expr:
    x = tensor("X", "m d")
    gate, up, down = tensor("Wg", "d h"), tensor("Wu", "d h"), tensor("W2", "h n")
    return (f.apply("silu", x @ gate) * (x @ up)) @ down


def _linear_attention() -> Expr:
    q, k, v = tensor("Q", "t d"), tensor("K", "t d"), tensor("V", "t e")
    state = Expr("cumsum", (f.contract(k, v, out=("t", "d", "e")),), ("t", "d", "e"), ("t",))
    return f.contract(q, state, out=("t", "e"))


def _ssm() -> Expr:
    decay, b, x = f.apply("exp", tensor("A", "t n")), tensor("B", "t n"), tensor("X", "t c")
    drive = f.contract(b, x, out=("t", "n", "c"))
    state = Expr("affine_scan", (decay, drive), ("t", "n", "c"), ("t",))
    return f.contract(tensor("C", "t n"), state, out=("t", "c"))


def _variance() -> Expr:
    x = tensor("X", "m x")
    centred = x - f.reduce("mean", x, "x").named("mu")
    return f.reduce("mean", f.apply("square", centred), "x")


def _router() -> Expr:
    logits = f.contract(tensor("X", "m d"), tensor("W", "n d"), out=("m", "n"))
    best = Expr("topk", (logits,), ("m", "k"), ("n",), (("k", 8), ("axis", "k")), "best")
    return f.softmax(best, "k")


def _convolution() -> Expr:
    image, weight = tensor("X", "i c"), tensor("W", "w c n")
    windows = f.view(image, "i", o=1, w=1)
    return f.contract(windows, weight, out=("o", "n"))


_ATTN = {"q": 4096, "x": 4096, "d": 128, "e": 128}

FORMULAS: tuple[Formula, ...] = (
    Formula(
        "matmul",
        "A B",
        lambda: (tensor("A", "a b") @ tensor("B", "b c")).named("C"),
        {"a": 8192, "b": 8192, "c": 8192},
    ),
    Formula("attention", "softmax(Q Kᵀ / √d) V", _attention, _ATTN, "2205.14135"),
    Formula("mha", "softmax(Q_h K_hᵀ / √d) V_h", lambda: _attention("h", "h"), {"h": 32, **_ATTN}),
    Formula(
        "gqa",
        "softmax(Q_nh K_nᵀ / √d) V_n",
        lambda: _attention("n h", "n"),
        {"n": 8, "h": 4, **_ATTN},
        "2305.13245",
    ),
    Formula(
        "gqa_decode",
        "gqa with one query",
        lambda: _attention("n h", "n"),
        {"n": 8, "h": 8, **_ATTN, "q": 1, "x": 32768},
    ),
    Formula(
        "mqa", "softmax(Q_h Kᵀ / √d) V", lambda: _attention("h"), {"h": 32, **_ATTN}, "1911.02150"
    ),
    Formula(
        "mla",
        "softmax((Q Cᵀ + Q_r K_rᵀ) / √192) C",
        _latent,
        {"h": 128, "q": 1, "x": 8192, "d": 512, "r": 64},
        "2405.04434",
    ),
    Formula("causal", "softmax(mask(Q Kᵀ / √d)) V", _causal, _ATTN),
    Formula("window", "softmax(window(Q Kᵀ / √d)) V", lambda: _causal(1024), _ATTN, "2004.05150"),
    Formula("spherical", "(Q Kᵀ / |Q Kᵀ|) V", _spherical, _ATTN, "2505.09326"),
    Formula(
        "cross_entropy",
        "logsumexp(X Wᵀ) - X·T",
        _cross_entropy,
        {"m": 8192, "d": 4096, "v": 131072},
    ),
    Formula("rmsnorm", "rms(X) G", _rmsnorm, {"m": 8192, "d": 4096}, "1910.07467"),
    Formula(
        "rmsnorm_matmul",
        "(rms(X) G) W",
        lambda: _rmsnorm() @ tensor("W", "d n"),
        {"m": 8192, "d": 4096, "n": 4096},
    ),
    Formula("layernorm", "ln(X)", _layernorm, {"m": 8192, "d": 4096}, "1607.06450"),
    Formula(
        "layernorm_matmul",
        "ln(X) W",
        lambda: _layernorm() @ tensor("W", "d n"),
        {"m": 8192, "d": 4096, "n": 4096},
    ),
    Formula("mlp", "gelu(X W1) W2", _mlp, {"m": 8192, "d": 512, "h": 2048, "n": 512}),
    Formula(
        "swiglu",
        "(silu(X Wg) · X Wu) W2",
        _swiglu,
        {"m": 8192, "d": 512, "h": 2048, "n": 512},
        "2002.05202",
    ),
    Formula(
        "linear_attention",
        "Q · cumsum(K Vᵀ)",
        _linear_attention,
        {"t": 8192, "d": 128, "e": 128},
        "2006.16236",
    ),
    Formula("ssm", "C · scan(exp A, B Xᵀ)", _ssm, {"t": 8192, "n": 64, "c": 64}, "2405.21060"),
    Formula("variance", "mean (x - mean x)²", _variance, {"m": 4096, "x": 65536}, "Welford 1962"),
    Formula(
        "logsumexp",
        "log Σ exp x",
        lambda: f.logsumexp(tensor("X", "m x"), "x"),
        {"m": 4096, "x": 65536},
        "1805.02867",
    ),
    Formula(
        "softmax", "softmax(x)", lambda: f.softmax(tensor("X", "m x"), "x"), {"m": 4096, "x": 4096}
    ),
    Formula("router", "softmax(top-k(X Wᵀ))", _router, {"m": 8192, "d": 1024, "n": 256, "k": 8}),
    Formula(
        "convolution",
        "Σ_wc X[o+w,c] W[w,c,n]",
        _convolution,
        {"i": 8196, "o": 8192, "w": 5, "c": 64, "n": 64},
    ),
)

BY_NAME: dict[str, Formula] = {formula.name: formula for formula in FORMULAS}


def formula(name: str) -> Diagram:
    """The diagram of a named formula; raises `InputError` with the nearest names."""
    entry = BY_NAME.get(name)
    if entry is None:
        near = get_close_matches(name, BY_NAME, n=3)
        known = f"nearest: {', '.join(near)}" if near else f"expected one of {', '.join(BY_NAME)}"
        raise InputError(f"no formula {name!r}: {known}")
    return build(entry.name, entry.make(), entry.sizes)
