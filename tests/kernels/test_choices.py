"""The tables that choose variants: they agree with what was measured, and every entry is sound."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warploom.codegen.compile.build import build
from warploom.codegen.cuda.emit import emit
from warploom.codegen.oracle.simulate import simulate
from warploom.codegen.passes.lower import lower
from warploom.errors import InputError
from warploom.kernels.attention.program import AttentionConfig, attention
from warploom.kernels.attention.variants import ATTENTION, choose_attention
from warploom.tile import E4M3, FP16, interpret


@pytest.mark.parametrize("name", sorted(ATTENTION.variants))
def test_every_attention_variant_gives_the_sequential_result(name):
    choice = ATTENTION.variants[name]
    config = choice.config(AttentionConfig(head_dim=16, causal=True))
    program = attention(config)
    rng = np.random.default_rng(0)
    lengths = {"q": 200, "k": 330, "v": 330, "o": 200}  # two tiles of rows, and rings go round
    arrays = {x: rng.normal(size=(1, 2, length, 16)) for x, length in lengths.items()}
    got = simulate(lower(program, choice.schedule(config)), arrays, seed=2)["o"]
    assert got.tobytes() == interpret(program, arrays)["o"].tobytes()


@pytest.mark.parametrize(
    ("head_dim", "causal"),
    [(64, False), (64, True), (96, True), (128, False), (128, True), (256, False)],
)
def test_the_defaults_of_every_kind_of_attention_build(head_dim, causal):
    base = AttentionConfig(head_dim=head_dim, causal=causal)
    names = {choose_attention(n, base).name for n in (200, 100000)}
    for name in names:
        chosen = ATTENTION.variants[name]
        config = chosen.config(base)
        build(attention(config), chosen.schedule(config), allow=chosen.allow)


@pytest.mark.parametrize(
    ("head_dim", "causal", "changes"),
    [
        (48, True, {"packed": True}),
        (64, False, {"window": 100}),
        (64, True, {"rescale_threshold": 4.0}),
        (96, True, {"dtype": FP16}),
        (128, False, {"packed": True}),
        (128, True, {"window": 100}),
        (256, False, {"rescale_threshold": 4.0}),
        (256, True, {"dtype": FP16}),
    ],
)
def test_every_kind_of_attention_gets_a_variant_that_there_is(head_dim, causal, changes):
    base = AttentionConfig(head_dim=head_dim, causal=causal, **changes)
    names = {choose_attention(n, base).name for n in (200, 1024, 100000)}
    for choice in (ATTENTION.variants[name] for name in names):
        config = choice.config(base)
        emit(lower(attention(config), choice.schedule(config)))


@pytest.mark.parametrize("name", sorted(ATTENTION.variants))
def test_a_variant_takes_what_it_has_a_kernel_for(name):
    choice = ATTENTION.variants[name]
    for changes in ({"dtype": E4M3}, {"packed": True}, {"rescale_threshold": 4.0}):
        base = AttentionConfig(head_dim=64, **changes)

        def made(base=base):
            config = choice.config(base)
            return emit(lower(attention(config), choice.schedule(config)))

        if choice.takes(base):
            made()
        else:
            with pytest.raises(InputError):
                made()


def test_8_bit_attention_gets_tiles_that_it_can_have():
    base = AttentionConfig(head_dim=128, dtype=E4M3)
    chosen = (choose_attention(n, base).config(base) for n in (500, 4000, 60000))
    assert all(config.tile[1] % 32 == 0 for config in chosen)


@pytest.mark.parametrize("factors", ["head_scales", "block_scales"])
def test_factors_of_heads_and_blocks_have_registers(factors):
    base = AttentionConfig(head_dim=256, dtype=E4M3, causal=True, group=2, **{factors: True})
    choice = choose_attention(500, base)
    config = choice.config(base)
    assert build(attention(config), choice.schedule(config)).resources.spill_bytes == 0


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 900), st.integers(1, 900)), min_size=1, max_size=5),
    causal=st.booleans(),
)
def test_packed_sequences_are_the_work_of_each_together(lengths, causal):
    """Tasks and iterations of a packed launch, which the model reads from its tables, are those of
    a dense launch a sequence."""
    choice = ATTENTION.variants["192x128-serpentine"]

    def work(rows, keys, packed):
        config = choice.config(AttentionConfig(causal=causal, packed=packed))
        launch = choice.launch(config, {"rows": rows, "keys": keys, "heads": 3}, "h200")
        return len(launch.order), sum(int(trips.sum()) for trips in launch.trips)

    rows, keys = zip(*lengths, strict=True)
    each = [work(*one, packed=False) for one in lengths]
    assert work(rows, keys, packed=True) == tuple(map(sum, zip(*each, strict=True)))
    config = AttentionConfig(causal=causal, packed=True)
    assert choose_attention(rows, config, keys, 3).name in ATTENTION.variants


@pytest.mark.parametrize(
    ("head_dim", "causal"),
    [(16, True), (32, False), (80, True), (144, False), (192, True), (208, False), (224, True)],
)
def test_head_sizes_that_were_not_measured_build(head_dim, causal):
    base = AttentionConfig(head_dim=head_dim, causal=causal)
    chosen = choose_attention(4096, base)
    config = chosen.config(base)
    build(attention(config), chosen.schedule(config), allow=chosen.allow)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_long_packed_sequences_build(head_dim):
    base = AttentionConfig(head_dim=head_dim, packed=True)
    chosen = choose_attention([16384], base, heads=16)
    config = chosen.config(base)
    build(attention(config), chosen.schedule(config), allow=chosen.allow)


def test_what_has_no_variant_is_refused():
    with pytest.raises(InputError, match="at most 256"):
        choose_attention(128, AttentionConfig(head_dim=512))


@pytest.mark.parametrize("rows", [2048, 8192, 16384])
def test_three_groups_under_a_causal_window_split_off_no_loop(rows):
    """There is no loop without a mask: the rates of such a variant are those of another kernel."""
    choice = choose_attention(rows, AttentionConfig(causal=True, window=1024), heads=64)
    assert "split_mask_loop" not in choice.point.rules
