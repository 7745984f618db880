"""The tables that choose variants: they agree with what was measured, and every entry is sound."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warploom.codegen.compile.build import build
from warploom.codegen.cuda.emit import emit
from warploom.codegen.oracle.simulate import simulate
from warploom.codegen.passes.lower import lower
from warploom.errors import InputError
from warploom.kernels.attention.choose import (
    CONSTANTS_FILE,
    SMS,
    START,
    choose_attention,
    microseconds,
    work_of,
)
from warploom.kernels.attention.program import AttentionConfig, attention
from warploom.kernels.attention.reference import task_table
from warploom.kernels.attention.variants import ATTENTION_CHOICES
from warploom.tile import E4M3, FP16, interpret


@pytest.mark.parametrize("name", sorted(ATTENTION_CHOICES))
def test_every_attention_variant_gives_the_sequential_result(name):
    choice = ATTENTION_CHOICES[name]
    config = choice.config(AttentionConfig(head_dim=16, causal=True))
    program = attention(config)
    rng = np.random.default_rng(0)
    arrays = {x: rng.normal(size=(1, 2, 330, 16)) for x in "qkv"}
    arrays["o"] = np.full((1, 2, 330, 16), np.nan)
    got = simulate(lower(program, choice.schedule(config)), arrays, seed=2)["o"]
    assert got.tobytes() == interpret(program, arrays)["o"].tobytes()


@pytest.mark.parametrize(
    ("head_dim", "causal"), [(d, c) for d in (64, 96, 128, 256) for c in (False, True)]
)
def test_the_defaults_of_every_kind_of_attention_build(head_dim, causal):
    base = AttentionConfig(head_dim=head_dim, causal=causal)
    names = {choose_attention(n, base).name for n in (200, 1024, 100000)}
    for name in names:
        chosen = ATTENTION_CHOICES[name]
        config = chosen.config(base)
        build(attention(config), chosen.schedule(config), allow=chosen.allow)


@pytest.mark.parametrize("head_dim", [48, 64, 96, 128, 256])
@pytest.mark.parametrize(
    "changes",
    [{}, {"packed": True}, {"window": 100}, {"rescale_threshold": 4.0}, {"dtype": FP16}],
)
def test_every_kind_of_attention_gets_a_variant_that_there_is(head_dim, changes):
    for causal in (False, True):
        base = AttentionConfig(head_dim=head_dim, causal=causal, **changes)
        names = {choose_attention(n, base).name for n in (200, 1024, 100000)}
        for choice in (ATTENTION_CHOICES[name] for name in names):
            config = choice.config(base)
            emit(lower(attention(config), choice.schedule(config)))


@pytest.mark.parametrize("name", sorted(ATTENTION_CHOICES))
def test_a_variant_takes_what_it_has_a_kernel_for(name):
    choice = ATTENTION_CHOICES[name]
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
    assert all(choose_attention(n, base).tile[1] % 32 == 0 for n in (500, 4000, 60000))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 700), keys=st.integers(1, 700), causal=st.booleans(),
    window=st.sampled_from([None, 1, 100, 300]),
    name=st.sampled_from(["128x64", "192x128-serpentine"]),
)  # fmt: skip
def test_steps_are_the_blocks_that_some_row_sees(rows, keys, causal, window, name):
    choice = ATTENTION_CHOICES[name]
    (bq, bk) = choice.tile
    tiles, steps, least = work_of(choice, AttentionConfig(causal=causal, window=window), rows, keys)
    row, key = np.arange(-(-rows // bq) * bq)[:, None] + keys - rows, np.arange(keys)[None]
    seen = (key <= row) if causal else np.ones((len(row), keys), bool)
    whole = sum(len(at) for at in _blocks(seen, bq, bk))
    assert tiles == -(-rows // bq) and steps <= whole
    if window is None:
        assert steps == whole and least == min(len(at) for at in _blocks(seen, bq, bk))
    for at in _blocks(seen & (key > row - (window or keys + rows)), bq, bk):
        steps -= at[-1] - at[0] + 1 if at else 0
    assert 0 <= steps <= tiles, "a row tile goes over at most one block that no row sees"


@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(0, 900), min_size=1, max_size=6), causal=st.booleans())
def test_packed_sequences_are_the_work_of_each_together(lengths, causal):
    choice, config = (
        ATTENTION_CHOICES["192x128-serpentine"],
        AttentionConfig(causal=causal, packed=True),
    )
    tiles, steps, least = work_of(choice, config, lengths, lengths)
    each = [work_of(choice, config, n, n) for n in lengths]
    assert tiles == sum(one[0] for one in each) and steps == sum(one[1] for one in each)
    assert least == min((one[2] for one in each if one[0]), default=0)
    assert tiles == len(task_table(lengths, lengths, choice.tile[0]))
    assert choose_attention(lengths, config).name in ATTENTION_CHOICES


def _blocks(seen, bq, bk):
    """Of every row tile, the blocks of keys that some row of it sees."""
    return [
        [j // bk for j in range(0, seen.shape[1], bk) if seen[i : i + bq, j : j + bk].any()]
        for i in range(0, len(seen), bq)
    ]


def test_attention_chosen_for_a_measured_length_is_near_the_best_without_its_rows():
    lost = json.loads(CONSTANTS_FILE.read_text())["loss_with_the_length_left_out"]
    # Without its shortest rows head size 96 is told by rows four and eight times as long.
    assert len(lost) >= 20 and max(lost.values()) < 0.05
    assert sorted(lost.values())[-2] < 0.05 and sum(lost.values()) / len(lost) < 0.01


@pytest.mark.parametrize("head_dim", [16, 32, 80, 144, 192, 208, 224])
@pytest.mark.parametrize("causal", [False, True])
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
    with pytest.raises(InputError, match="up to 256"):
        choose_attention(128, AttentionConfig(head_dim=512))


def test_equal_tasks_take_whole_rounds_of_the_sms():
    """One task more than there are SMs leaves all but one of them idle for a round."""
    choice, config = ATTENTION_CHOICES["128x64"], AttentionConfig(causal=False)
    assert choice.tile_scheduler != "dynamic"

    def time(tasks):
        return microseconds(choice, config, choice.tile[0], 4096, tasks, (1.0, 0.5))

    one = time(1) - START
    assert one > 0
    for tasks, rounds in ((SMS, 1), (SMS + 1, 2), (2 * SMS, 2), (2 * SMS + 1, 3)):
        assert time(tasks) - START == pytest.approx(rounds * one), tasks
