"""A built kernel's launch as data: the same parameters that the launcher packs."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from warploom import machine
from warploom.autosched.schedules import compiled
from warploom.codegen.compile.build import Built, build
from warploom.codegen.ir.plan import LaunchPlan
from warploom.errors import InputError
from warploom.kernels.attention.decode import DecodeConfig, decode, decode_policy
from warploom.kernels.attention.program import AttentionConfig, attention
from warploom.kernels.attention.variants import ATTENTION
from warploom.kernels.gemm.program import GemmConfig, default_policy, gemm
from warploom.runtime.interface import COUNTER
from warploom.runtime.launch import LaunchSpec, Pointer, Scalar, TensorMap

GPU = machine.load("h200")


@pytest.fixture(scope="module")
def matmul() -> Built:
    """The default GEMM: pairs of blocks, persistent."""
    return compiled(gemm(GemmConfig()), default_policy(GemmConfig()))


@pytest.fixture(scope="module")
def drawn() -> Built:
    """Attention whose blocks draw their tasks from a counter."""
    choice = ATTENTION.variants["128x128-dynamic16"]
    config = choice.config(AttentionConfig(causal=True))
    return build(attention(config), choice.schedule(config))


def test_descriptors_describe_contiguous_arrays_innermost_first(matmul: Built) -> None:
    spec = matmul.interface.launch_spec({"m": 1024, "n": 512, "k": 256}, GPU)
    maps = {m.buffer: m for m in spec.arguments if isinstance(m, TensorMap)}
    assert maps["a"].dims == (256, 1024) and maps["a"].strides == (512,)
    assert maps["b"].dims == (512, 256) and maps["b"].promotion == 256
    assert [s.value for s in spec.arguments if isinstance(s, Scalar)] == [
        {"m": 1024, "n": 512, "k": 256}[p["name"]]
        for p in matmul.source.parameters
        if p["kind"] == "dim"
    ]
    assert {b.name: b.role for b in spec.buffers} == {"a": "in", "b": "in", "c": "out"}
    assert LaunchSpec.from_json(spec.to_json()) == spec


def test_rows_that_straddle_sectors_are_fetched_as_asked(matmul: Built) -> None:
    spec = matmul.interface.launch_spec({"m": 128, "n": 512, "k": 264}, GPU)
    a = next(m for m in spec.arguments if isinstance(m, TensorMap) and m.buffer == "a")
    assert a.strides == (528,) and a.promotion == 0


def test_a_plan_says_how_much_is_fetched_around_a_copy() -> None:
    config = DecodeConfig(page=16)
    built = compiled(decode(config), decode_policy(config))
    sizes = {"batch": 1, "kv_heads": 2, "rows": 4, "d": 128, "splits": 3}
    sizes |= {"pages": 4, "page_keys": 16, "columns": 4}
    shapes = {name: tuple(sizes[d] for d in a.dims) for name, a in config.arrays.items()}
    strides = {
        name: tuple(prod(shape[at + 1 :]) for at in range(len(shape)))
        for name, shape in shapes.items()
    }
    found = built.interface.arguments(shapes, strides, sizes, {})
    assert {m.promotion for m in found if isinstance(m, TensorMap)} == {128}
    with pytest.raises(InputError, match="l2_promotion=64, expected 128 or 256"):
        LaunchPlan(l2_promotion=64)


@pytest.mark.parametrize("more", [{}, {"store": "direct", "skip_unit": True}])
def test_lower_rows_want_stores_from_registers_and_no_votes(more):
    with pytest.raises(InputError, match="lower_rows with store="):
        LaunchPlan(lower_rows=True, **more)


def test_the_grid_is_one_block_a_task_up_to_what_the_gpu_holds(matmul: Built) -> None:
    few = matmul.interface.launch_spec({"m": 256, "n": 256, "k": 64}, GPU)
    many = matmul.interface.launch_spec({"m": 8192, "n": 8192, "k": 64}, GPU)
    assert few.grid == (2, 1, 1)
    assert many.grid == (matmul.interface.resident_blocks(GPU), 1, 1) == (132, 1, 1)
    assert many.grid[0] % matmul.source.cluster == 0


def test_a_counter_is_a_buffer_that_starts_at_zero(drawn: Built) -> None:
    sizes = {"batch": 1, "heads": 2, "kv_heads": 2, "rows": 256, "keys": 256, "d": 128}
    spec = drawn.interface.launch_spec(sizes, GPU)
    (counter,) = (buffer for buffer in spec.buffers if buffer.name == COUNTER)
    assert counter.zero and counter.role == "inout"
    assert Pointer(COUNTER) in spec.arguments


def test_bad_sizes_are_refused(matmul: Built) -> None:
    with pytest.raises(InputError, match="needs a size for k"):
        matmul.interface.launch_spec({"m": 128, "n": 128}, GPU)
    heavy = replace(matmul, source=replace(matmul.source, shared_bytes=300_000))
    with pytest.raises(InputError, match="does not fit"):
        heavy.interface.launch_spec({"m": 4096, "n": 4096, "k": 64}, GPU)
