"""The one chooser: command line and operators get the same kernel, and what is given is kept."""

import pytest

from warploom.errors import InputError
from warploom.kernels.attention.program import AttentionConfig
from warploom.kernels.attention.variants import choose_attention
from warploom.kernels.gemm.program import GemmConfig
from warploom.kernels.gemm.variant import choose_gemm
from warploom.kernels.select import check_sizes, full_sizes, select
from warploom.tile import E4M3

USER = "examples/tile_rmsnorm_linear.py:kernel"


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("causal", ["true", "false"])
@pytest.mark.parametrize("rows", ["1024", "16384"])
def test_attention_is_the_variant_that_the_operator_takes(head_dim, causal, rows):
    settings = {"head_dim": str(head_dim), "causal": causal, "rows": rows, "batch": "1"}
    chosen = select("attention", settings)
    base = AttentionConfig(head_dim=head_dim, causal=causal == "true")
    variant = choose_attention(int(rows), base, int(rows), 16)
    assert chosen.tuned and chosen.name == variant.name
    assert chosen.config == variant.config(base)
    assert chosen.schedule == variant.schedule(chosen.config) and chosen.allow == variant.allow


@pytest.mark.parametrize("sizes", [(4096, 4096, 4096), (1000, 20000, 2000), (128, 8192, 8192)])
def test_gemm_is_the_variant_of_its_sizes(sizes):
    settings = dict(zip("mnk", map(str, sizes), strict=True))
    chosen = select("gemm", {**settings, "b": "nk"})
    base = GemmConfig(b="nk")
    variant = choose_gemm(*sizes, base)
    assert chosen.name == variant.name and chosen.schedule == variant.schedule(chosen.config)


def test_keys_follow_rows_unless_given():
    assert full_sizes("attention", {"rows": "300"})["keys"] == 300
    assert full_sizes("attention", {"rows": "300", "keys": "70"})["keys"] == 70
    assert full_sizes("attention", {})["keys"] == full_sizes("attention", {})["rows"] >= 4096


@pytest.mark.parametrize(
    ("name", "settings"), [("gemm", {"tile": "128,128,64"}), ("attention", {"tile": "128,64"})]
)
def test_a_tile_that_was_given_is_kept(name, settings):
    chosen = select(name, settings)
    assert not chosen.tuned
    assert ",".join(map(str, chosen.config.tile)) == settings["tile"]


def test_element_types_reach_the_variant():
    chosen = select("attention", {"dtype": "e4m3"})
    assert chosen.tuned and chosen.config.dtype is E4M3 and chosen.config.tile[1] % 32 == 0


def test_a_user_program_gets_the_named_schedule_of_its_loops():
    chosen = select(USER, {})
    assert not chosen.tuned and chosen.name == "lcsf"


def test_a_name_is_for_the_program_as_it_was_written():
    chosen = select("attention", {}, policy="pingpong")
    assert chosen.config == AttentionConfig() and chosen.schedule.name == "pingpong"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gpu": "tpu"}, "--gpu 'tpu': code is emitted for"),
        ({"policy": "fast"}, "--schedule 'fast': expected default or one of"),
    ],
)
def test_bad_requests_are_one_line(arguments, message):
    with pytest.raises(InputError, match=message):
        select("gemm", {}, **arguments)


@pytest.mark.parametrize("name", ["gemm", "attention"])
def test_default_sizes_are_such_as_a_gpu_takes_for_every_element_type(name):
    """Arrays that TMA reads have pitches of whole 16 bytes."""
    for kind in ("bf16", "e4m3"):
        settings = {"dtype": kind}
        chosen, sizes = select(name, settings), check_sizes(name, settings)
        for one in chosen.program.arrays:
            if len(one.dims) > 1:
                assert sizes[one.dims[-1]] * one.dtype.bytes % 16 == 0, (kind, one)
