"""Variants of GEMM: every one gives the sequential result, and what a shape gets is sound."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warploom.codegen.cuda.emit import emit
from warploom.codegen.oracle.simulate import simulate
from warploom.codegen.passes.lower import lower
from warploom.errors import InputError
from warploom.kernels.gemm.program import GemmConfig, gemm
from warploom.kernels.gemm.variant import GEMM, choose_gemm
from warploom.machine import load
from warploom.tile import E4M3, FP32, interpret

PEAK = 989.4e6  # multiply-adds twice, a microsecond: dense bf16 of H100 SXM at its boost clock
SIZES = st.integers(1, 20000)
KIND = GEMM.known["16-bit"]
SMS = load("h200").integer("sm.count")
PROMOTED = "products_in_flight"  # a setting of variants for promoted products alone
SWAPPED = [
    one
    for one in GEMM.variants.values()
    if "swap_operands" in one.point.rules and PROMOTED not in dict(one.point.settings)
]


def microseconds(choice, m, n, k):
    sizes = {"m": m, "n": n, "k": k, "batch": 1}
    return GEMM.predicted(KIND, [choice.name], GemmConfig(), sizes)[choice.name]


@settings(deadline=None, max_examples=50)
@given(SIZES, SIZES, SIZES, st.sampled_from(sorted(KIND.replays)))
def test_no_prediction_is_faster_than_the_tensor_cores(m, n, k, name):
    choice = GEMM.variants[name]
    assert microseconds(choice, m, n, k) > 2 * m * n * k / PEAK


@settings(deadline=None, max_examples=20)
@given(SIZES, SIZES, SIZES)
def test_only_those_who_ask_get_a_sliced_gemm(m, n, k):
    plain, sliced = choose_gemm(m, n, k), choose_gemm(m, n, k, sliced=True)
    assert plain.whole
    if sliced.whole:
        assert sliced is plain
    assert choose_gemm(m, n, k, GemmConfig(batched=True), sliced=True).whole


def test_a_long_sum_for_a_small_result_is_sliced():
    assert choose_gemm(512, 512, 16384, sliced=True).config(GemmConfig()).slices > 1
    assert choose_gemm(8192, 8192, 8192, sliced=True).config(GemmConfig()).slices == 1


def test_every_task_of_a_wave_is_counted():
    """One task more than there are places costs a wave, at a higher clock."""
    choice = GEMM.find("128x256")
    full, more = (microseconds(choice, 128 * SMS + more, 256, 4096) for more in (0, 1))
    assert more > 1.2 * full


@pytest.mark.parametrize("name", GEMM.variants)
def test_every_variant_is_emitted_and_gives_the_sequential_result(name):
    choice = GEMM.find(name)
    promote = "products_in_flight" in dict(choice.point.settings)
    config = choice.config(GemmConfig(promote=promote))
    assert choice.takes(config)
    assert emit(lower(gemm(config), choice.schedule(config))).shared_bytes <= 232448
    # The same plan on a program small enough to simulate: one step of 16, the tile kept.
    high, wide, _ = config.tile
    slices = config.slices if config.in_cluster else min(2, config.slices)
    small = replace(config, tile=(high, wide, 16), slices=slices)
    schedule = choice.having(name, "depth=3").schedule(small)
    rng = np.random.default_rng(0)
    m, n, k = 2 * high + 8, wide + 72, 56
    arrays = {"a": rng.normal(size=(m, k)), "b": rng.normal(size=(k, n))}
    into = "parts" if small.workspace else "c"
    arrays[into] = np.full((2, m, n) if small.workspace else (m, n), np.nan)
    program = gemm(small)
    got = simulate(lower(program, schedule), arrays, seed=1)[into]
    assert got.tobytes() == interpret(program, arrays)[into].tobytes()


@given(st.sampled_from(SWAPPED), st.sampled_from(["mk", "km"]), st.sampled_from(["kn", "nk"]))
@settings(max_examples=25, deadline=None)
def test_every_transposed_tile_is_emitted(choice, a, b):
    """Any multiple of 8 along m: registers and shared memory hold it in every storage order, but
    for rows of 16 bytes."""
    config = choice.config(GemmConfig(a=a, b=b))
    narrow = a == "km" and config.tile[0] < 16
    assert choice.takes(config) != narrow and GEMM.find(choice.name) is choice
    if narrow:
        return
    source = emit(lower(gemm(config), choice.schedule(config)))
    assert source.shared_bytes <= 232448
    assert config.tile[0] % 8 == 0 and choice.point.number("rows", 24) >= 24


def test_whole_waves_are_found():
    """660 tiles of 152 x 256 are five waves of 132: nothing in the table names the shape."""
    rows, cols = 33, 20
    choice = choose_gemm(rows * 152, cols * 256, 5000)
    config = choice.config(GemmConfig())
    tiles = -(-rows * 152 // config.tile[0]) * -(-cols * 256 // config.tile[1])
    assert config.swap_ab
    assert tiles % SMS == 0 or tiles % SMS > 0.9 * SMS


@pytest.mark.parametrize("config", [GemmConfig(residual=True), GemmConfig(out=FP32)])
def test_no_tile_is_chosen_whose_store_would_be_element_by_element(config):
    for choice in SWAPPED:
        assert not choice.takes(choice.config(config))


def test_the_default_of_another_type_keeps_128_bytes_a_step():
    base = GemmConfig(dtype=E4M3, b="nk")
    choice = choose_gemm(8192, 8192, 8192, base)
    config = choice.config(base)
    assert config.tile[2] == 128 and config.dtype is E4M3
    emit(lower(gemm(config), choice.schedule(config)))


def test_what_has_no_variant_is_refused():
    with pytest.raises(InputError, match="expected positive sizes"):
        choose_gemm(0, 8, 8)
    with pytest.raises(InputError, match="expected one of 128x256"):
        GEMM.find("1x1")
