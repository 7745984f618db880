"""The formula of a program of the kernel library, from its settings and sizes, and its derivation.

The library's kernels stand on a floor above: they are known here by name, by the fields of their
configuration (as a mapping) and by the names of their array dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from warploom.derive.derive import Derivation, derive_on
from warploom.derive.formula import frontend as f
from warploom.derive.formula.frontend import build, tensor
from warploom.derive.formula.graph import Diagram
from warploom.errors import InputError
from warploom.tile import dtype

Settings = Mapping[str, Any]

IMPLEMENTATION = {
    "attention": (
        "dtype",
        "head_dim",
        "rescale_threshold",
        "split_mask_loop",
        "tile",
        "optimistic_threshold",
        "exact",
    ),
    "gemm": (
        "dtype",
        "out",
        "a",
        "b",
        "promote",
        "products_in_flight",
        "slices",
        "in_cluster",
        "swap_ab",
        "tile",
    ),
}
"""Fields that say how a program computes its formula, or that the sizes say again."""
ACTIVATIONS = ("relu", "gelu", "silu")


def derive_program(
    name: str, settings: Settings, sizes: Mapping[str, int], gpu_name: str
) -> Derivation:
    """The derivation of the formula that a program of the library computes, on a GPU.

    `settings` are the fields of its configuration (`vars(config)`), `sizes` the lengths of its
    array dimensions. All values count as elements of `settings["dtype"]`, results too. One stream
    loop a nest, as programs have. Raises `InputError` with the reason where the formula is none of
    this floor's (packed sequences, a window without a causal mask, ...), or the type none of the
    GPU's; `BoundBroken` when the result claims less traffic than is proven necessary.
    """
    diagram = program_formula(name, settings, sizes)
    return derive_on(diagram, gpu_name, _element(settings), streams=1)


def program_formula(name: str, settings: Settings, sizes: Mapping[str, int]) -> Diagram:
    """The diagram of what a program of the library computes; raises as `derive_program`."""
    if name not in FORMULAS:
        raise InputError(f"no formula is known for {name!r}: expected {' or '.join(FORMULAS)}")
    make, known = FORMULAS[name]
    for field, value in settings.items():
        if value and field not in (*IMPLEMENTATION[name], *known):
            raise InputError(f"{name} with {field}={value}: the derivation has no formula for it")
    return make(settings, sizes)


def _attention(settings: Settings, sizes: Mapping[str, int]) -> Diagram:
    """softmax(mask(scale · Q Kᵀ)) V. Axes: n key heads of all batches, h query heads a key head."""
    rows, keys = _size(sizes, "rows"), _size(sizes, "keys")
    heads, shared = _size(sizes, "heads", 1), _size(sizes, "kv_heads", sizes.get("heads", 1))
    if heads % shared:
        raise InputError(f"attention: {heads} query heads for {shared} key heads: expected groups")
    causal, window = bool(settings.get("causal")), settings.get("window")
    if window is not None and not causal:
        raise InputError("attention with a window and no causal mask: no formula masks so")
    if causal and keys < rows:
        raise InputError(
            f"attention, causal, {rows} rows and {keys} keys: rows without a key give 0, which the "
            "formula does not say"
        )
    groups = {"n": _size(sizes, "batch", 1) * shared, "h": heads // shared}
    lengths = {axis: length for axis, length in groups.items() if length > 1}
    outer = [*lengths]
    common = [axis for axis in outer if axis == "n"]
    lengths |= {"q": rows, "x": keys, "d": _size(sizes, "d"), "e": _size(sizes, "d")}
    q, k = tensor("Q", [*outer, "q", "d"]), tensor("K", [*common, "x", "d"])
    scale = settings.get("scale")
    factor = f.power_of_size("d", -0.5) if scale is None else f.const(scale)
    scores = f.contract(q, k, out=(*outer, "q", "x")) * factor
    narrow = _element(settings) == "fp8"
    if narrow:
        scores = scores * (tensor("scale_q", "") * tensor("scale_k", ""))
    scores = scores.named("S")
    if causal:
        scores = f.causal(scores, "q", "x", window or 0)
    weights = f.softmax(scores, "x")
    mixed = f.contract(weights, tensor("V", [*common, "x", "e"]), out=(*outer, "q", "e"))
    results = {"o": mixed * tensor("scale_v", "") if narrow else mixed}
    if settings.get("lse"):
        results["lse"] = f.logsumexp(scores, "x")
    return build("attention", results, lengths)


def _gemm(settings: Settings, sizes: Mapping[str, int]) -> Diagram:
    """activation(scale · A B + bias) · (A B2) · gate + residual, in a batch or not."""
    lengths = {axis: _size(sizes, axis) for axis in ("m", "n", "k")}
    outer: list[str] = []
    if settings.get("batched") and _size(sizes, "batch") > 1:
        lengths["batch"] = sizes["batch"]
        outer = ["batch"]
    a, whole = tensor("A", [*outer, "m", "k"]), (*outer, "m", "n")
    result = f.contract(a, tensor("B", [*outer, "k", "n"]), out=whole)
    scale = settings.get("scale", 1.0)
    if scale != 1.0:
        result = result * scale
    if settings.get("scales"):
        result = result * (tensor("scale_a", "") * tensor("scale_b", ""))
    if settings.get("bias"):
        result = result + tensor("bias", "n")
    activation = settings.get("activation", "none")
    if activation != "none":
        if activation not in ACTIVATIONS:
            raise InputError(f"gemm with activation={activation}: no box of a formula computes it")
        result = f.apply(activation, result)
    if settings.get("dual"):
        result = result * f.contract(a, tensor("B2", [*outer, "k", "n"]), out=whole)
    if settings.get("gate"):
        result = result * tensor("gate", whole)
    if settings.get("residual"):
        result = result + tensor("residual", whole)
    return build("gemm", {"C": result}, lengths)


FORMULAS: dict[str, tuple[Callable[[Settings, Mapping[str, int]], Diagram], tuple[str, ...]]] = {
    "attention": (_attention, ("causal", "window", "group", "lse", "scale")),
    "gemm": (
        _gemm,
        ("batched", "bias", "residual", "activation", "scale", "scales", "gate", "dual"),
    ),
}
"""By name: what makes the formula, and the fields it is made of."""


def _element(settings: Settings) -> str:
    """This floor's name of the operands' type."""
    return dtype(settings.get("dtype", "bf16")).rate


def _size(sizes: Mapping[str, int], dim: str, usual: int | None = None) -> int:
    """The length of an array dimension; raises `InputError` where it is missing or empty."""
    length = sizes.get(dim, usual)
    if length is None or length < 1:
        raise InputError(f"the derivation needs {dim} of at least 1, got {length}")
    return length
