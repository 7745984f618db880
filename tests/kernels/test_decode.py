"""Decode attention against float64: interpreted, under random interleavings, and as emitted."""

import re
from dataclasses import replace

import numpy as np
import pytest
from tests.codegen import emulate
from tests.kernels.decode_case import decode_case, joined
from tests.lowering import lowered

from warploom import tile as t
from warploom.autosched.schedules import compiled, schedule_for
from warploom.codegen.cuda.emit import emit
from warploom.codegen.oracle.simulate import simulate
from warploom.codegen.passes.lower import lower, verified
from warploom.errors import InputError
from warploom.kernels.attention.combine import combine
from warploom.kernels.attention.decode import DecodeConfig, decode, decode_policy
from warploom.kernels.attention.decode_plan import planned

LATENT = DecodeConfig(head_dim=576, value_dim=512)
# name -> (config, lengths, queries)
CASES = {
    "dense": (DecodeConfig(group=4, once=True), (300, 0, 1), 1),
    "one part": (DecodeConfig(group=5, split=False, head_dim=64), (129, 128), 1),
    "pages of 16": (DecodeConfig(group=4, page=16), (150, 0, 33), 1),
    "pages of 128": (DecodeConfig(group=2, page=128, causal=True), (300, 140), 3),
    "pages of 256": (DecodeConfig(page=256, dtype=t.FP16, scale=0.2), (513, 255), 2),
    "causal": (DecodeConfig(group=3, causal=True, head_dim=64), (200, 2, 129), 4),
    "window": (DecodeConfig(group=3, causal=True, window=70, page=32, once=True), (300, 60), 2),
    "sinks": (DecodeConfig(group=4, sinks=True, page=32), (200, 0, 33), 1),
    "soft cap": (DecodeConfig(group=8, softcap=2.0), (200,), 1),
    "parts of one size": (DecodeConfig(group=4, part=64, head_dim=64), (150, 0, 33), 1),
    "long blocks": (DecodeConfig(group=4, page=64, tile=(64, 128)), (150, 64), 1),
    "8 bits": (DecodeConfig(group=4, dtype=t.E4M3, once=True, tile=(64, 128)), (300, 0, 1), 1),
    "8 bits, one part": (DecodeConfig(group=5, dtype=t.E4M3, split=False, head_dim=64), (129,), 1),
    "8 bits, pages of 16": (
        DecodeConfig(group=2, dtype=t.E4M3, page=16, causal=True, window=70, softcap=2.0),
        (150, 33),
        3,
    ),
    "8 bits, pages of 128": (DecodeConfig(dtype=t.E4M3, page=128, part=128), (300, 128), 2),
    "latent": (replace(LATENT, group=20, causal=True), (150, 0, 70), 2),
    "latent, pages, one part": (
        replace(LATENT, group=70, page=64, split=False, once=True, twin=True),
        (130, 33),
        1,
    ),
    "latent, 8 bits": (replace(LATENT, group=20, dtype=t.E4M3, causal=True), (150, 0, 70), 2),
    "latent, 8 bits, pages, one part": (
        replace(LATENT, group=70, dtype=t.E4M3, page=16, split=False),
        (130, 33),
        1,
    ),
    "two groups": (DecodeConfig(group=8, causal=True, tile=(128, 128)), (150,), 10),
    "few rows": (DecodeConfig(group=4, once=True, few=True), (300, 0, 1), 1),
    "few rows, one part": (DecodeConfig(group=8, split=False, few=True, page=32), (129, 70), 1),
    "few rows, 8 bits": (
        DecodeConfig(group=2, dtype=t.E4M3, page=16, causal=True, few=True, tile=(64, 128)),
        (150, 33),
        2,
    ),
}
BOUND, NARROW = 6e-3, 0.05  # weights of 8 bits are rounded by 2^-4 at most


def close(config, got, want):
    out = joined(got["parts"], got["sums"]) if config.split else got["o"]
    found = np.asarray(out, np.float64)
    limit = NARROW if config.narrow else BOUND
    return np.isfinite(found).all() and np.abs(found - want).max() < limit


def same(got, expected):
    return all(np.array_equal(got[x], expected[x], equal_nan=True) for x in expected)


@pytest.mark.parametrize("name", CASES)
def test_interpreter_and_simulator_give_attention(name):
    config, lengths, queries = CASES[name]
    arrays, want = decode_case(config, lengths, queries)
    program, schedule = decode(config), schedule_for(decode(config), decode_policy(config))
    expected = t.interpret(program, arrays)
    assert close(config, expected, want)
    got = simulate(lower(program, schedule, verified), arrays, seed=1)
    assert same(got, expected)


def test_emitted_kernels_give_attention():
    blocks = {n: lowered(decode(c), decode_policy(c)) for n, (c, _, _) in CASES.items()}
    sources = [emit(block) for block in blocks.values()]
    library = emulate.compile_all(sources, None)
    for number, (name, block) in enumerate(blocks.items()):
        config, lengths, queries = CASES[name]
        arrays, want = decode_case(config, lengths, queries, heads=1)
        program = block.placement.program
        got = emulate.run(library, number, sources[number], program, arrays, blocks=2)
        assert close(config, got, want), name


FEW = ("dense", "one part", "pages of 16", "sinks", "soft cap", "8 bits", "8 bits, pages of 16")


def test_kernels_of_few_rows_give_the_bits_of_others_and_refuse_more_rows():
    configs = [one for n in FEW for one in (CASES[n][0], replace(CASES[n][0], few=True))]
    blocks = [lowered(decode(config), decode_policy(config)) for config in configs]
    sources = [emit(block) for block in blocks]
    library = emulate.compile_all(sources, None)
    for number, name in enumerate(FEW):
        config, lengths, queries = CASES[name]
        arrays, _ = decode_case(config, lengths, queries, heads=1)
        every, few = (
            emulate.run(library, n, sources[n], blocks[n].placement.program, arrays, blocks=2)
            for n in (2 * number, 2 * number + 1)
        )
        assert "!(i & 2)" in sources[2 * number + 1].text
        assert same(few, every), name
    arrays, _ = decode_case(replace(CASES["dense"][0], group=9), (70,), heads=1)
    with pytest.raises(emulate.Fault, match="trap"):
        emulate.run(library, 1, sources[1], blocks[1].placement.program, arrays, blocks=2)


@pytest.mark.parametrize("more", [{"tile": (128, 128)}, {"head_dim": 576, "value_dim": 512}])
def test_few_rows_are_of_a_tile_of_64_and_not_latent(more):
    with pytest.raises(InputError, match="few=True"):
        DecodeConfig(few=True, **more)
    assert planned(DecodeConfig(group=8), 8, 1, 1024, 132).config.few
    assert not planned(DecodeConfig(group=9), 8, 1, 1024, 132).config.few


def test_what_is_read_once_leaves_l2_first():
    def loads(config):
        text = emit(lowered(decode(config), decode_policy(config))).text
        found = re.findall(r"(tma_load_4d\w*)\((\w)_base", text)
        return {array: name for name, array in found}

    once, usual = "tma_load_4d_once", "tma_load_4d"
    assert loads(DecodeConfig(page=64)) == {"q": usual, "k": once, "v": once}
    high = DecodeConfig(group=8, causal=True, tile=(128, 128))  # tiles of one sequence share keys
    assert set(loads(high).values()) == {usual}


@pytest.mark.parametrize("page", [None, 32])
def test_a_length_beyond_the_cache_is_all_of_it(page):
    config = DecodeConfig(group=4, head_dim=64, page=page)
    room = 96
    arrays, want = decode_case(config, (room,))
    if page is None:
        arrays |= {name: arrays[name][:, :, :room] for name in "kv"}
    else:
        arrays["table"] = arrays["table"][:, : room // page]
    for length in (room, room + 1000):
        arrays["lengths"][:] = length
        assert close(config, t.interpret(decode(config), arrays), want)


def test_combine_joins_the_parts():
    config, lengths, queries = CASES["causal"]
    arrays, want = decode_case(config, lengths, queries, splits=5)
    given = t.interpret(decode(config), arrays)
    shape = (len(lengths), queries, 2, config.group, config.head_dim)
    parts = {name: given[name] for name in ("parts", "sums")}
    got = t.interpret(combine(config, 8), {**parts, "o": np.full(shape, np.nan)})
    packed = np.asarray(got["o"]).transpose(0, 2, 1, 3, 4).reshape(want.shape)
    assert np.abs(packed - want).max() < BOUND


@pytest.mark.parametrize(("dtype", "page"), [(t.E4M3, None), (t.E4M3, 64), (t.BF16, 64)])
def test_128_heads_over_one_latent_key_have_the_registers_they_need(dtype, page):
    asked = DecodeConfig(dtype=dtype, head_dim=576, value_dim=512, group=128, page=page)
    config = planned(asked, 128, 1, 4096, 132).config
    assert config.twin and not config.split
    assert compiled(decode(config), decode_policy(config)).resources.spill_bytes == 0


def test_a_causal_mask_over_8_bit_latent_keys_has_the_registers_it_needs():
    some = DecodeConfig(dtype=t.E4M3, head_dim=576, value_dim=512, group=20, causal=True)
    for page, splits in ((64, 1), (64, 5), (None, 5)):
        asked = replace(some, page=page)
        config = planned(asked, 4, 2, 1024, 132, splits).config
        assert config.split == (splits > 1)
        assert compiled(decode(config), decode_policy(config)).resources.spill_bytes == 0
