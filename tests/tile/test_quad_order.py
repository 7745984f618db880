"""`quad_order`: its meaning, its refusals, and the code it saves."""

import numpy as np
import pytest

from warploom.autosched.schedules import schedule_for
from warploom.codegen.compile.build import emitted
from warploom.codegen.cuda.simt.emit_exchange import quad_place_text
from warploom.errors import InputError
from warploom.kernels.attention.program import AttentionConfig, attention, default_policy
from warploom.kernels.attention.reference import natural_order
from warploom.kernels.attention.values import ordered_values
from warploom.tile import E4M3, FP32, array, grid, interpret, load, size, span, store, trace
from warploom.tile.typing import quad_places


def test_a_thread_of_a_quad_gives_the_columns_that_it_holds():
    """PTX ISA, wgmma register fragments: thread q of four holds columns 2 q and 2 q + 1 of every 8
    of an accumulator, and gives columns 4 q to 4 q + 3 of every 16 of an 8-bit operand."""
    places = quad_places(32)
    assert sorted(places) == list(range(32))
    for place, column in enumerate(places):
        assert place % 16 // 4 == column % 8 // 2
        assert place // 16 == column // 16


def test_values_are_put_in_order_and_back():
    v = np.random.default_rng(0).integers(-8, 8, (1, 2, 70, 16)).astype(float)
    out = interpret(ordered_values(), {"v": v, "out": np.full((1, 2, 16, 80), np.nan)})["out"]
    assert (natural_order(out)[..., :70] == np.swapaxes(v, -1, -2)).all()
    assert not natural_order(out)[..., 70:].any()


def test_lengths_that_are_no_multiple_are_refused():
    def body(x, y):
        (at,) = grid(rows=size("rows"))
        tile = load(x, span(at * 8, 8), span(0, 24))
        store(y, span(at * 8, 8), span(0, 24), tile=tile.quad_order("n"))

    arrays = {"x": array(FP32, "rows n"), "y": array(FP32, "rows n")}
    with pytest.raises(InputError, match="expected a multiple of 16"):
        trace(body, arrays)


def test_attention_of_8_bits_exchanges_no_words():
    config = AttentionConfig(dtype=E4M3, head_dim=64, tile=(128, 64))
    assert (
        "quad_fragment"
        not in emitted(
            attention(config), schedule_for(attention(config), default_policy(config))
        ).text
    )


def test_threads_without_matmuls_read_each_element_from_its_place():
    text = quad_place_text("place")
    assert [eval(text, {"place": place}) for place in range(48)] == quad_places(48)
