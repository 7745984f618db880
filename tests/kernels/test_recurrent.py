"""Recurrent attention: the program against a loop over rows in float64, and as it is emitted."""

import re
from dataclasses import replace

import numpy as np
import pytest
from tests.codegen import emulate
from tests.gpu.cases import distance
from tests.lowering import lowered

from warploom import tile as t
from warploom.autosched.schedules import Policy, schedule_for
from warploom.codegen.cuda.emit import emit
from warploom.codegen.cuda.emit_sm80 import emit_sm80
from warploom.codegen.ir.block import Pipeline
from warploom.codegen.ir.plan import LaunchPlan
from warploom.codegen.ir.steps import Issue, Run
from warploom.codegen.ir.text import block_text, parse_block
from warploom.codegen.oracle.simulate import simulate
from warploom.codegen.passes.lower import lower
from warploom.errors import CheckFailed, InputError
from warploom.kernels.recurrent.program import (
    RecurrentConfig,
    default_launch,
    default_policy,
    recurrent,
)
from warploom.kernels.recurrent.reference import reference

CASES = {
    "linear": RecurrentConfig("none", key_dim=32, value_dim=48, initial=True, final=True),
    "retention": RecurrentConfig("head", key_dim=128, value_dim=128, final=True),
    "gated": RecurrentConfig("token"),
    "mamba": RecurrentConfig("step", shared=True, skip=True, initial=True, final=True),
    "gla": RecurrentConfig("channel", gates=t.BF16, key_dim=48, initial=True, final=True),
    "delta": RecurrentConfig("none", delta=True, gates=t.BF16, value_dim=128, final=True),
    "gated-delta": RecurrentConfig("token", delta=True, initial=True, final=True),
    "delta-128": RecurrentConfig("token", delta=True, key_dim=128, value_dim=128, final=True),
    "based": RecurrentConfig("none", taylor=True, key_dim=16, value_dim=72),
    "mamba-128": RecurrentConfig(
        "step", softplus=True, gates=t.BF16, key_dim=128, value_dim=64, final=True
    ),
}
DIMS = "m d", "n d", "n e"
SCALE = {"scale": 0.5}
ROUNDING = 4e-3  # of weights, of the state and of the result to bf16


def case(config, rows=150, heads=2, decay=0.1, seed=1):
    """Inputs in their element types; what is written is NaN."""
    random = np.random.default_rng(seed)
    shape = (1, rows, heads)

    def gates(size):
        return (random.exponential(size=size) * decay).astype(np.float32)

    values = {
        name: t.round_to(t.BF16, random.normal(size=(1, rows, count, size)))
        for name, count, size in (
            ("q", 1, config.key_dim), ("k", 1, config.key_dim), ("v", heads, config.value_dim)
        )
    }  # fmt: skip
    given = {
        "none": {}, "head": {"g": -gates(heads)}, "token": {"g": -gates(shape)},
        "step": {"dt": gates(shape) * 8, "a": -gates(heads)},
        "channel": {"g": t.round_to(t.BF16, -gates((*shape, config.key_dim)))},
    }  # fmt: skip
    if config.delta:
        values["k"] /= np.linalg.norm(values["k"].astype(float), axis=-1, keepdims=True)
        values["k"] = t.round_to(t.BF16, values["k"])
        beta = 1.0 / (1.0 + np.exp(-random.normal(size=shape)))
        values["beta"] = t.round_to(config.gates, beta)
    states = (1, heads, config.key_dim, config.value_dim)
    values |= given[config.decay] | {"o": np.full((*shape, config.value_dim), np.nan)}
    if config.gates is t.BF16 and "dt" in values:
        values["dt"] = t.round_to(t.BF16, values["dt"])
    values |= {"bias": random.normal(size=heads).astype(np.float32)} if config.softplus else {}
    values |= {"skip": random.normal(size=heads).astype(np.float32)} if config.skip else {}
    values |= {"initial": random.normal(size=states)} if config.initial else {}
    return values | ({"final": np.full(states, np.nan)} if config.final else {})


@pytest.fixture(scope="module")
def emitted():
    """Every case by its default schedule, one by the other names, one for GPUs without TMA."""
    blocks = [lowered(recurrent(one), default_policy(one)) for one in CASES.values()]
    mamba = CASES["mamba"]
    named = schedule_for(recurrent(mamba), Policy("lcsf", default_launch(mamba)))
    older = schedule_for(
        recurrent(mamba), Policy("multistage", default_launch(mamba)), arch="sm_80"
    )
    pair = default_launch(mamba).with_options(cluster=("heads_tile", 2))
    shared = schedule_for(recurrent(mamba), Policy("lcsf", pair, registers=(40, 216)))
    blocks += [lower(recurrent(mamba), one) for one in (named, shared, older)]
    sources = [*map(emit, blocks[:-1]), emit_sm80(blocks[-1])]
    return blocks, sources, emulate.compile_all(sources, None)


@pytest.mark.parametrize("number", range(len(CASES) + 3), ids=[*CASES, "lcsf", "pair", "sm80"])
def test_every_kind_of_decay_is_right(emitted, number):
    blocks, sources, library = emitted
    config = (*CASES.values(), *[CASES["mamba"]] * 3)[number]
    program, values = recurrent(config), case(config)
    right = reference(config, values, 0.5)
    meant = t.interpret(program, values, SCALE)
    ran = simulate(blocks[number], values, SCALE, seed=number)
    got = emulate.run(library, number, sources[number], program, values, SCALE, blocks=4)
    for name, want in right.items():
        assert distance(meant[name], want) < ROUNDING, name
        assert distance(ran[name], meant[name]) == 0, name
        assert distance(got[name], meant[name]) < 1e-3, name


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (r" *Send store.*\n", "writes panels that are not copied yet"),
        (r" *PanelSync.*\n", "writes panels that a copy may still read"),
    ],
)
def test_a_late_store_that_lacks_a_step_is_noticed(step, said):
    program, values = recurrent(CASES["gated"]), case(CASES["gated"])
    text = block_text(lowered(program, default_policy(CASES["gated"])))
    with pytest.raises(CheckFailed, match=said):
        simulate(parse_block(re.sub(step, "", text, count=1), program), values, SCALE)


FILLED = re.compile(
    r"s < (?P<s>\d+).*?i < (?P<i>\d+); \+\+i\)\n *"
    r"(?P<name>\w+)\[t\]\[4 \* s \+ i\] = (?P<value>.*);",
    re.DOTALL,
)


def test_elements_of_slots_fill_each_word_of_their_registers_once(emitted):
    """A word has an even element and the one after it; 16 columns have 4 words of a thread."""
    seen = 0
    for source in emitted[1]:
        for part in source.text.split("for (int s = 0; ")[1:]:
            if found := FILLED.match(part.partition("}")[0]):
                words = re.search(rf"unsigned {found['name']}\[\d+\]\[(\d+)\]", source.text)
                assert found["i"] == "4" and int(words[1]) == 4 * int(found["s"])
                seen += 1
                if found["value"].startswith("product_"):  # of whole words
                    assert re.fullmatch(
                        r"\w+\(\w+_words\[i\], (\w+\[t\]\[4 \* s \+ i\]|pack_\w+\(.*\))\)",
                        found["value"],
                    )
                    continue
                low, high = (f"8 * s + 2 * i + {c}" for c in (0, 1))
                first, second = found["value"].find(low), found["value"].find(high)
                assert 0 <= first < second and low not in found["value"][second:]
    assert seen


def test_staged_tiles_are_written_as_matrices_where_the_gpu_can(emitted):
    """stmatrix came with sm_90 (PTX ISA 7.8)."""
    for source in emitted[1]:
        used = re.search(r"stmatrix\([^;]*_room", source.text) is not None
        assert used == (source is not emitted[1][-1])


@pytest.mark.parametrize("rows", [1, 64, 65])
def test_rows_that_fill_no_chunk_leave_the_right_state(rows):
    for config in (CASES["retention"], CASES["mamba"]):
        values = case(config, rows)
        want = reference(config, values, 0.5)
        got = simulate(lowered(recurrent(config), default_policy(config)), values, SCALE)
        assert all(distance(got[name], want[name]) < ROUNDING for name in want)


@pytest.mark.parametrize("decay", [0.0, 1e-4, 30.0, 1e4])
def test_decays_near_one_and_near_nothing_keep_their_meaning(decay):
    """A weight is the exponential of a difference that is never above 0: nothing overflows."""
    config = RecurrentConfig("token", final=True)
    values = case(config, 300, decay=decay)
    want, got = reference(config, values, 0.5), t.interpret(recurrent(config), values, SCALE)
    assert all(distance(got[name], want[name]) < ROUNDING for name in want)


@pytest.mark.parametrize(
    "wrong",
    [
        {"decay": "vector"},
        {"softplus": True},
        {"gates": t.FP16},
        {"key_dim": 136},
        {"key_dim": 12},
        {"value_dim": 4},
    ],
)
def test_what_has_no_meaning_or_tile_is_refused(wrong):
    with pytest.raises(InputError, match=f"recurrent {next(iter(wrong))}="):
        RecurrentConfig(**wrong)


@pytest.mark.parametrize("of_places", [True, False])
def test_masks_of_places_alone_are_words_made_once_a_task(of_places):
    def body(q, k, v, o):
        for i in t.loop(t.cdiv(t.size("m"), 64)):
            here, there, all_of = t.span(i * 64, 64), t.span(i * 64, 64, "n"), t.span(0, 64)
            scores = t.load(q, here, all_of) @ t.load(k, there, all_of)
            m, n = t.coordinate("m", 64), t.coordinate("n", 64, 0 if of_places else i)
            seen = t.where(m >= n, scores, 0.0).cast(t.BF16)
            t.store(o, here, all_of, tile=seen @ t.load(v, there, all_of))

    arrays = {name: t.array(t.BF16, dims) for name, dims in zip("qkv", DIMS, strict=True)}
    program = t.trace(body, arrays | {"o": t.array(t.FP32, "m e")}, name="masked")
    random = np.random.default_rng(4)
    values = {name: random.integers(-1, 2, (128, 64)).astype(float) for name in "qkv"}
    values["k"][9] = np.inf  # of which rows before it see nothing
    policy = Policy("multistage", LaunchPlan(keep_masks=True))
    source = emit(lower(program, schedule_for(program, policy)))
    assert ("_mask[t][i] = at_use(" in source.text) == of_places
    given = values | {"o": np.full((128, 64), np.nan)}
    got = emulate.run(emulate.compile_all([source], None), 0, source, program, given)["o"]
    assert np.array_equal(got, t.interpret(program, given)["o"], equal_nan=True)
    rows = slice(0, 9)
    want = np.tril(values["q"][rows] @ values["k"][rows].T) @ values["v"][rows]
    assert np.array_equal(got[rows], want)


def test_scores_of_a_chunk_start_before_the_result_of_the_one_before_is_stored():
    config = CASES["gated"]
    block = lowered(recurrent(config), default_policy(config))
    (loop,) = (one for one in block.roles[1].sections if isinstance(one, Pipeline))
    products = [step for step in loop.steady if isinstance(step, Issue)]
    scores = next(one for one in products if all(map(block.placement.is_shared, one.op.srcs[:2])))
    (stored,) = (one for one in loop.steady if isinstance(one, Run) and one.op.kind == "store")
    assert (scores.stage, stored.stage) == (0, 1)
    assert loop.steady.index(scores) < loop.steady.index(stored)


def test_an_order_that_starts_matmuls_ahead_needs_some_of_loaded_operands_alone():
    config = CASES["gla"]
    with pytest.raises(InputError, match="0 matmuls that take loaded operands alone and"):
        schedule_for(recurrent(config), replace(default_policy(config), order="lcsf-ahead"))
