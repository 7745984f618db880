"""What `derive --build` once refused: the programs mean their formulas and have CUDA text."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from warploom.autosched.schedules import Policy, schedule_for
from warploom.codegen.compile.build import emitted
from warploom.derive.derive import Derivation, derive_on
from warploom.derive.formula.frontend import build, reduce, softmax, tensor
from warploom.derive.formula.library import formula
from warploom.derive.lower.lower import check, programs
from warploom.errors import DoesNotFit, InputError, Spills
from warploom.flows import derived
from warploom.flows.derived import build_fitting
from warploom.kernels.formula import launch_plan, narrow_in_full, padded
from warploom.tile import Op

CASES: dict[str, tuple[str, dict[str, int]]] = {
    "latent": ("mla", {}),
    "norm": ("rmsnorm", {}),
    "norm and product": ("layernorm_matmul", {}),
    "windows": ("convolution", {}),
    "wide values": ("attention", {"d": 64, "e": 128}),
    "one row": ("attention", {"q": 1}),
    "77 keys": ("attention", {"q": 70, "x": 77}),
    "a matrix read twice": ("swiglu", {}),
    "states": ("ssm", {}),
}
SMALLER = {"latent": 0.75}
"""Of the memory on chip, where tiles fill more than there is."""


@cache
def made(name: str) -> Derivation:
    known, sizes = CASES[name]
    diagram = formula(known).resized(sizes)
    return derive_on(diagram, "h200", "bf16", streams=1, share=SMALLER.get(name, 1.0))


@pytest.mark.parametrize("name", CASES)
def test_programs_have_cuda_text(name: str) -> None:
    found = made(name)
    for kernel in found.kernels:
        for program in programs(padded(kernel), "bf16", "bf16", narrow_in_full(found)):
            policy = Policy(launch=launch_plan(kernel, program))
            assert emitted(program, schedule_for(program, policy)).text


@pytest.mark.parametrize("name", ["77 keys", "one row", "windows", "norm and product"])
def test_padded_programs_mean_their_formula(name: str) -> None:
    """At lengths that fill no fragment; with a split and without."""
    found = made(name)
    sizes = {"q": 1 if name == "one row" else 70, "x": 77, "m": 19, "n": 23, "d": 24, "e": 40}
    small = found.shrunk({a: n for a, n in sizes.items() if a in found.diagram.size}, 40)
    kernels = tuple(
        whole.tiled({symbol: min(16, whole.body.size[symbol[2:]]) for symbol, _ in whole.tiles})
        for whole in small.kernels
    )
    assert check(small.diagram, kernels, "bf16", traced=padded) < 8e-3


def test_a_mean_over_a_padded_axis_divides_by_its_length() -> None:
    x, w = tensor("x", "m k"), tensor("w", "k n")
    product = x @ w
    centred = product - reduce("mean", product, "n")
    diagram = build("centred", softmax(centred, "n"), {"m": 64, "k": 64, "n": 37})
    found = derive_on(diagram, "h200", "bf16", streams=1)
    assert any("n" in padded(kernel).padded for kernel in found.kernels)
    assert check(diagram, found.kernels, "bf16", traced=padded) < 8e-3


def test_a_program_without_a_stream_has_a_loop_for_its_product() -> None:
    (kernel,) = made("77 keys").kernels
    (program,) = programs(padded(kernel))
    (loop,) = program.loops()
    assert [op.kind for op in loop.body if isinstance(op, Op)].count("mma") == 2


@pytest.mark.parametrize("reason", [DoesNotFit("too much"), Spills("spills 8 B")])
def test_what_does_not_fit_is_derived_for_less(
    reason: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []
    tried: list[Any] = []

    def build_once(found: Any, dtype: str) -> tuple[()]:
        tried.append(found)
        if len(tried) < 3:
            raise reason
        return ()

    def again(share: float) -> Any:
        asked.append(share)
        return share

    monkeypatch.setattr(derived, "build_derivation", build_once)
    found, _, why = build_fitting("whole", again, "bf16")  # type: ignore[arg-type]
    assert found == asked[-1] == 0.5 and str(reason) in why and "50%" in why
    tried.clear()

    def refused(share: float) -> Any:
        raise InputError("nothing fits")

    with pytest.raises(type(reason), match=str(reason)):
        build_fitting("whole", refused, "bf16")  # type: ignore[arg-type]
