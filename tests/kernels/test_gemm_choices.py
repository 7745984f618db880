"""The GEMM chooser: constants fitted to measured rows; no shape needs its own to be chosen for."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import fit_gemm, gemm_shares
from warploom.codegen.cuda.emit import emit
from warploom.codegen.oracle.simulate import simulate
from warploom.codegen.passes.lower import lower
from warploom.errors import InputError
from warploom.evidence import read_rows
from warploom.kernels.gemm.choose import (
    GEMM_CHOICES,
    TIE,
    TRANSPOSED,
    choose_gemm,
    gemm_choice,
    preferred,
)
from warploom.kernels.gemm.program import GemmConfig, gemm
from warploom.kernels.gemm.variant import CONSTANTS, CONSTANTS_FILE, SMS, read_constants
from warploom.tile import E4M3, FP32, interpret

ROWS = fit_gemm.read(fit_gemm.RESULTS)
SHAPES = list(dict.fromkeys(row.shape for row in ROWS))
PEAK = 989.4e6  # multiply-adds twice, a microsecond: dense bf16 of H100 SXM at its boost clock
SIZES = st.integers(1, 20000)


def losses(of):
    return [fit_gemm.pick(shape, ROWS, of)[1] for shape in SHAPES]


def test_the_stored_constants_are_the_fit_of_the_stored_rows():
    stored = fit_gemm.error(ROWS, CONSTANTS)
    held = json.loads(CONSTANTS_FILE.read_text())["held"]
    again = fit_gemm.error(ROWS, fit_gemm.fit(ROWS, CONSTANTS, 3, held))
    assert stored <= 1.02 * again
    assert math.sqrt(stored) < 0.08


def test_the_stored_constants_choose_well_where_it_was_measured():
    assert max(losses(CONSTANTS)) < 0.08
    # Variants of different runs differ by 2 % themselves.
    assert sum(losses(CONSTANTS)) / len(SHAPES) < 0.025


@pytest.mark.parametrize("shape", SHAPES[3:8:2])
def test_a_shape_is_chosen_for_without_its_own_rows(shape):
    others = [row for row in ROWS if row.shape != shape]
    assert fit_gemm.pick(shape, ROWS, fit_gemm.fit(others, CONSTANTS, 4))[1] < 0.1


def test_the_shares_of_power_are_those_of_kernels_that_ran_alone():
    """L2 and DRAM count together in the model: both fall with the rows a multiply asks for."""
    found = gemm_shares.points(read_rows(gemm_shares.RESULTS))
    base = next(point for point in found if point.name == "128x256")
    costs = gemm_shares.fit(found)
    shares = costs * [1.0, base.operands, base.requests, base.dram]
    shares = shares / shares.sum()
    assert abs(CONSTANTS.operands - shares[1]) < 0.03
    assert abs(CONSTANTS.requested - (shares[2] + shares[3])) < 0.03
    # Every variant within 3 %, and the wider tile before the narrow one.
    for point in found:
        fitted = costs @ [1.0, point.operands, point.requests, point.dram]
        assert abs(fitted / point.energy - 1) < 0.03
    by_name = {point.name: point.energy for point in found}
    assert by_name["192x256"] < by_name["128x256"] < by_name["128x128"]


def test_of_equal_times_the_one_of_less_power_is_chosen():
    wide, narrow = gemm_choice("192x256"), gemm_choice("128x128")
    config = GemmConfig()
    assert wide.power(config) < 1.0 < narrow.power(config)
    assert gemm_choice("128x256").power(config) == pytest.approx(1.0)
    assert preferred([(1000.0, narrow), (1000.0, wide)], config) is wide
    # A short kernel's clock is not its own.
    assert preferred([(20.0, narrow), (20.3, wide)], config) is narrow
    assert preferred([(900.0, narrow), (1000.0, wide)], config) is narrow


def test_constants_that_ignore_pitches_are_told_from_right_ones():
    """A planted fault: the rows must be able to tell a wrong model."""
    wrong = replace(CONSTANTS, ragged=CONSTANTS.aligned)
    assert fit_gemm.error(ROWS, wrong) > 1.2 * fit_gemm.error(ROWS, CONSTANTS)


@given(SIZES, SIZES, SIZES, st.sampled_from([*GEMM_CHOICES.values()]))
def test_no_prediction_is_faster_than_the_tensor_cores(m, n, k, choice):
    time = choice.microseconds(GemmConfig(), m, n, k)
    assert time > 2 * m * n * k / PEAK
    assert choice.microseconds(GemmConfig(), m, n, k + 640) >= time


@settings(deadline=None)
@given(SIZES, SIZES, SIZES)
def test_only_those_who_ask_get_a_sliced_gemm(m, n, k):
    plain, sliced = choose_gemm(m, n, k), choose_gemm(m, n, k, sliced=True)
    assert not plain.workspace
    times = [choice.microseconds(GemmConfig(), m, n, k) for choice in (sliced, plain)]
    assert times[0] <= TIE * times[1]
    assert choose_gemm(m, n, k, GemmConfig(batched=True), sliced=True).slices == 1


def test_a_long_sum_for_a_small_result_is_sliced():
    assert choose_gemm(512, 512, 16384, sliced=True).slices > 1
    assert choose_gemm(8192, 8192, 8192, sliced=True).slices == 1


def test_every_task_of_a_wave_is_counted():
    """One task more than there are places costs a wave, at a higher clock."""
    choice = gemm_choice("128x256")
    full = choice.microseconds(GemmConfig(), 128 * SMS, 256, 4096)
    more = choice.microseconds(GemmConfig(), 128 * SMS + 1, 256, 4096)
    assert more > 1.2 * full


@pytest.mark.parametrize("name", GEMM_CHOICES)
def test_every_variant_is_emitted_and_gives_the_sequential_result(name):
    choice = gemm_choice(name)
    config = choice.config(GemmConfig(promote=choice.products_in_flight > 1))
    assert choice.fits(config)
    assert emit(lower(gemm(config), choice.schedule(config))).shared_bytes <= 232448
    # The same plan on a program small enough to simulate: one step of 16, the tile kept.
    slices = choice.slices if choice.in_cluster else min(2, choice.slices)
    small = replace(config, tile=(*choice.tile, 16), slices=slices)
    schedule = replace(choice, depth=3).schedule(small)
    rng = np.random.default_rng(0)
    m, n, k = 2 * choice.tile[0] + 8, choice.tile[1] + 72, 56
    arrays = {"a": rng.normal(size=(m, k)), "b": rng.normal(size=(k, n))}
    into = "parts" if small.workspace else "c"
    arrays[into] = np.full((2, m, n) if small.workspace else (m, n), np.nan)
    program = gemm(small)
    got = simulate(lower(program, schedule), arrays, seed=1)[into]
    assert got.tobytes() == interpret(program, arrays)[into].tobytes()


@given(st.sampled_from(TRANSPOSED), st.sampled_from(["mk", "km"]), st.sampled_from(["kn", "nk"]))
@settings(max_examples=25, deadline=None)
def test_every_transposed_tile_is_emitted(choice, a, b):
    """Any multiple of 8 along m: registers and shared memory hold it in every storage order."""
    config = choice.config(GemmConfig(a=a, b=b))
    assert choice.fits(config) and gemm_choice(choice.name) is choice
    source = emit(lower(gemm(config), choice.schedule(config)))
    assert source.shared_bytes <= 232448
    assert choice.tile[0] % 8 == 0 and choice.store_rows >= 24


def test_whole_waves_are_found():
    """660 tiles of 152 x 256 are five waves of 132: nothing in the table names the shape."""
    rows, cols = 33, 20
    choice = choose_gemm(rows * 152, cols * 256, 5000)
    tiles = -(-rows * 152 // choice.tile[0]) * -(-cols * 256 // choice.tile[1])
    assert choice.swap_ab
    assert tiles % SMS == 0 or tiles % SMS > 0.9 * SMS


@pytest.mark.parametrize("config", [GemmConfig(residual=True), GemmConfig(out=FP32)])
def test_no_tile_is_chosen_whose_store_would_be_element_by_element(config):
    for choice in TRANSPOSED:
        assert not choice.fits(choice.config(config))


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
        gemm_choice("1x1")


def test_a_file_of_other_constants_is_refused(tmp_path):
    path = tmp_path / "model.json"
    path.write_text(CONSTANTS_FILE.read_text().replace('"ragged"', '"raged"'))
    with pytest.raises(InputError, match="not the constants"):
        read_constants(path)
