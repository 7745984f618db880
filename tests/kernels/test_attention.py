"""Attention forward on the interpreter against float64: masks, ragged sizes, grouped queries."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warploom.errors import InputError
from warploom.kernels.attention import AttentionConfig, attention
from warploom.kernels.attention_reference import reference
from warploom.tile import interpret
from warploom.tile.interpret import bind


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 90), keys=st.integers(1, 90), causal=st.booleans(),
    window=st.sampled_from([None, 1, 20, 64]), group=st.sampled_from([1, 3]),
    bq=st.sampled_from([16, 32]), bk=st.sampled_from([16, 48]), seed=st.integers(0, 999),
)  # fmt: skip
def test_attention_is_close_to_float64(rows, keys, causal, window, group, bq, bk, seed):
    config = AttentionConfig(
        head_dim=16, causal=causal, window=window, group=group, lse=True, tile=(bq, bk)
    )
    rng = np.random.default_rng(seed)
    arrays = {
        "q": rng.normal(size=(1, group, rows, 16)),
        "k": rng.normal(size=(1, 1, keys, 16)),
        "v": rng.normal(size=(1, 1, keys, 16)),
        "o": np.full((1, group, rows, 16), np.nan),
        "lse": np.full((1, group, rows), np.nan),
    }
    program = attention(config)
    got = interpret(program, arrays)
    want, lse = reference(config, bind(program, arrays))
    assert not np.isnan(got["o"]).any()
    norm = np.linalg.norm(want)
    assert np.linalg.norm(got["o"] - want) <= 8e-3 * norm
    finite = np.isfinite(lse)
    assert np.array_equal(np.isfinite(got["lse"]), finite)
    np.testing.assert_allclose(got["lse"][finite], lse[finite], atol=1e-5)


def test_rows_that_see_no_key_give_zero():
    config = AttentionConfig(head_dim=16, causal=True, lse=True, tile=(16, 16))
    arrays = {
        "q": np.ones((1, 1, 8, 16)), "k": np.ones((1, 1, 3, 16)), "v": np.ones((1, 1, 3, 16)),
        "o": np.full((1, 1, 8, 16), np.nan), "lse": np.full((1, 1, 8), np.nan),
    }  # fmt: skip
    got = interpret(attention(config), arrays)
    assert (got["o"][0, 0, :5] == 0).all() and (got["o"][0, 0, 5:] == 1).all()
    assert np.isneginf(got["lse"][0, 0, :5]).all()


def test_large_scores_do_not_overflow():
    config = AttentionConfig(head_dim=16, tile=(16, 16))
    q = np.full((1, 1, 16, 16), 200.0)
    values = np.arange(40 * 16.0).reshape(1, 1, 40, 16) % 7
    arrays = {"q": q, "k": np.full((1, 1, 40, 16), 200.0), "v": values, "o": np.zeros_like(q)}
    got = interpret(attention(config), arrays)["o"]
    np.testing.assert_allclose(got[0, 0, 0], values[0, 0].mean(0), rtol=1e-2)


def test_bad_configs_are_refused():
    with pytest.raises(InputError, match="expected >= 1"):
        AttentionConfig(group=0)
