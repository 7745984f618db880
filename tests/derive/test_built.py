"""Derivations of the library's programs: their formulas are what its references compute."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from warploom.derive.bounds.bounds import check
from warploom.derive.formula.evaluate import compare, evaluate
from warploom.derive.program import derive_program, program_formula
from warploom.errors import InputError
from warploom.kernels.attention import reference as attention_reference
from warploom.kernels.gemm import reference as gemm_reference
from warploom.kernels.library import configure
from warploom.tile.typing import quad_places

ATTENTION: tuple[dict[str, str], ...] = (
    {},
    {"heads": "6", "group": "3", "batch": "2"},
    {"causal": "true", "lse": "true", "keys": "19"},
    {"causal": "true", "window": "5", "heads": "1"},
    {"head_dim": "8", "scale": "0.3"},
    {"dtype": "e4m3", "heads": "4", "group": "2"},
)


def configured(name: str, settings: dict[str, str]) -> tuple[Any, dict[str, int]]:
    """A configuration at small lengths."""
    small = {"rows": "13", "keys": "13", "head_dim": "16"} if name == "attention" else {}
    return configure(name, {**small, **settings})


def ordered(v: Any) -> Any:
    """v as 8-bit attention takes it: keys last, of a multiple of 16, as threads hold them."""
    keys = np.swapaxes(v, -1, -2)
    padded = np.pad(keys, [(0, 0)] * (v.ndim - 1) + [(0, -v.shape[-2] % 16)])
    return padded[..., quad_places(padded.shape[-1])]


@pytest.mark.parametrize("settings", ATTENTION)
def test_attention_is_what_its_kernel_computes(settings: dict[str, str]) -> None:
    config, sizes = configured("attention", settings)
    rng = np.random.default_rng(5)
    b, n, h = sizes["batch"], sizes["kv_heads"], sizes["heads"]
    q = rng.standard_normal((b, h, sizes["rows"], sizes["d"]))
    k, v = rng.standard_normal((2, b, n, sizes["keys"], sizes["d"]))
    factors = {f"scale_{x}": np.array([f]) for x, f in zip("qkv", (0.5, 2.0, 3.0), strict=True)}
    last = ordered(v) if config.ordered else v
    out, lse = attention_reference.reference(config, {"q": q, "k": k, "v": last, **factors})
    diagram = program_formula("attention", vars(config), sizes)
    given = {"Q": q, "K": k, "V": v, **{x: f[0] for x, f in factors.items()}}
    shaped = {
        array.name: np.reshape(given[array.name], [diagram.size[a] for a in array.axes])
        if array.name not in "QKV" or len(array.axes) < 4
        else given[array.name].reshape(b * n, h // n, *given[array.name].shape[2:])
        for array in diagram.inputs
    }
    got = {name: value.reshape(-1) for name, value in evaluate(diagram, shaped).items()}
    want = {"o": out.reshape(-1)} | ({"lse": lse.reshape(-1)} if config.lse else {})
    assert set(got) == set(want)
    assert compare(got, want) < 1e-12


GEMM: tuple[dict[str, str], ...] = (
    {},
    {"batched": "true", "bias": "true", "activation": "relu"},
    {"activation": "silu", "dual": "true"},
    {"scale": "0.25", "residual": "true", "gate": "true"},
    {"scales": "true", "activation": "gelu"},
)


@pytest.mark.parametrize("settings", GEMM)
def test_a_gemm_is_what_its_kernel_computes(settings: dict[str, str]) -> None:
    config, sizes = configured("gemm", settings)
    rng = np.random.default_rng(5)
    lengths = {**sizes, "one": 1}
    values = {
        name: rng.standard_normal([lengths[axis] for axis in spec.dims]) / 4
        for name, spec in config.arrays.items()
        if name != "c"
    }
    diagram = program_formula("gemm", vars(config), sizes)
    lower = {name.lower(): name for name in diagram.array}
    given = {lower[n]: v[0] if n.startswith("scale_") else v for n, v in values.items()}
    want = {"C": gemm_reference.reference(config, values)}
    # The tensor core's kernels compute gelu by erf, a box its tanh form.
    assert compare(evaluate(diagram, given), want) < (1e-3 if "gelu" in str(config) else 1e-12)


@pytest.mark.parametrize(
    ("name", "settings"), [("attention", s) for s in ATTENTION] + [("gemm", s) for s in GEMM]
)
def test_a_programs_derivation_keeps_its_bound(name: str, settings: dict[str, str]) -> None:
    config, sizes = configured(name, settings)
    large = {"rows": 2048, "keys": 2048} if name == "attention" else {"m": 2048, "n": 2048}
    found = derive_program(name, vars(config), {**sizes, **large}, "h200")
    bound = check(found.diagram, found.traffic, found.capacity, found.recomputes)
    assert 0 < bound.value <= found.traffic
    assert found.verify()[0] < 1e-12
    assert all(len(kernel.stream_index) <= 1 for kernel in found.kernels)


def test_a_mask_a_type_and_a_head_dimension_change_the_derivation() -> None:
    def seconds(**settings: str) -> float:
        config, sizes = configure("attention", {"rows": "8192", "keys": "8192", **settings})
        return derive_program("attention", vars(config), sizes, "h200").seconds

    whole = seconds()
    assert 0.4 < seconds(causal="true") / whole < 0.75
    assert 0.3 < seconds(head_dim="64") / whole < 0.75
    assert seconds(dtype="e4m3") < 0.75 * whole


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("attention", {"packed": True}, "packed=True"),
        ("attention", {"softcap": 30.0}, "softcap=30.0"),
        ("attention", {"window": 64}, "no causal mask"),
        ("attention", {"causal": True, "keys": 8}, "rows without a key"),
        ("attention", {"rows": 0}, "rows of at least 1"),
        ("gemm", {"activation": "leaky_relu"}, "leaky_relu"),
        ("attention_backward", {}, "expected attention or gemm"),
    ],
)
def test_what_no_formula_says_is_refused_with_the_reason(
    name: str, changes: dict[str, Any], says: str
) -> None:
    config, sizes = configured("gemm" if name == "gemm" else "attention", {})
    settings = dataclasses.asdict(config) | {k: v for k, v in changes.items() if k not in sizes}
    sizes |= {k: v for k, v in changes.items() if k in sizes}
    with pytest.raises(InputError, match=says):
        derive_program(name, settings, sizes, "h200")


def test_a_type_without_a_unit_is_refused() -> None:
    config, sizes = configured("attention", {"dtype": "e4m3"})
    with pytest.raises(InputError, match="no fp8 tensor core"):
        derive_program("attention", vars(config), sizes, "a100")
