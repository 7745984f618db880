"""8-bit operands that warps of the loading group turn: loaded row-major, read with the contracted
axis last and in the order of quads."""

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warploom import tile as t
from warploom.autosched.schedules import Policy, schedule_for
from warploom.codegen.compile.build import build
from warploom.codegen.cuda.emit import emit
from warploom.codegen.ir.plan import LaunchPlan
from warploom.codegen.ir.text import block_text, parse_block
from warploom.codegen.oracle.simulate import simulate
from warploom.codegen.passes.lower import PASSES, lower, verified
from warploom.emulate.kernel import Library
from warploom.emulate.report import Fault
from warploom.errors import CheckFailed
from warploom.kernels.attention.program import AttentionConfig, attention
from warploom.kernels.attention.reference import reference
from warploom.kernels.attention.values import ordered_values
from warploom.perf.replay import replay
from warploom.tile import E4M3, interpret
from warploom.tile.interpret import bind

PLAIN = LaunchPlan()


def scheduled(program, launch, groups):
    policy = Policy("overlapped", launch, groups, depth=2, registers=(40, 232))
    return schedule_for(program, policy)


def case(rows=100, keys=150, seed=0, groups=1, launch=PLAIN, **config):
    """8-bit attention of two heads with values as they are."""
    fields = {"dtype": E4M3, "head_dim": 32, "tile": (64 * groups, 64), "group": 2, **config}
    chosen = AttentionConfig(**fields)
    program = attention(chosen)
    schedule = scheduled(program, launch.with_options(split="rows" if groups > 1 else ""), groups)
    rng, d = np.random.default_rng(seed), chosen.head_dim
    heads = {"q": 2, "o": 2, "k": 1, "v": 1}
    arrays = {x: rng.normal(size=(1, heads[x], keys if x in "kv" else rows, d)) for x in heads}
    arrays |= {f"scale_{x}": np.array([0.5]) for x in "qkv"}
    return chosen, program, schedule, arrays


@settings(max_examples=12, deadline=None)
@given(
    rows=st.integers(1, 150), keys=st.integers(0, 200), causal=st.booleans(),
    groups=st.sampled_from([1, 2]), dynamic=st.booleans(), overlap=st.booleans(),
    seed=st.integers(0, 10**6),
)  # fmt: skip
def test_any_interleaving_gives_the_sequential_result(
    rows, keys, causal, groups, dynamic, overlap, seed
):
    launch = LaunchPlan(
        tile_scheduler="dynamic" if dynamic else "static",
        overlap_next_task=overlap,
        task_rings={"q_t": 2},
    )
    _, program, schedule, arrays = case(rows, keys, seed, groups, launch, causal=causal)
    block = lower(program, schedule, verified)
    got = simulate(block, arrays, seed=seed)["o"]
    assert got.tobytes() == interpret(program, arrays)["o"].tobytes()


def test_the_text_of_the_block_program_says_who_turns():
    _, program, schedule, _ = case()
    block = lower(program, schedule)
    text = block_text(block)
    assert "role transpose: 3 warps, 40 registers, transposes" in text
    assert parse_block(text, program) == block


FAULTS = {  # what is found in the text of the block program, and what is put in its place
    "given back first": ("Fill quad_order.{n} into v_turned\n{i}Publish", "Release v\n{i}Publish"),
    "never given back": ("Publish v_turned\n{i}Release v", "Publish v_turned"),
    "not waited for": ("Acquire v_turned\n{i}Wait v\n", "Acquire v_turned\n"),
    "not published": ("Publish v_turned\n{i}", ""),
    "by the producer": ("Acquire v\n", "Acquire v_turned\n"),
    "raw": ("Wait v_turned", "Wait v"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_spec_finds_planted_faults(name):
    _, program, schedule, _ = case()
    text = block_text(lower(program, schedule))
    number = text.split("Fill quad_order.")[1].split()[0]
    before, after = (part.format(n=number, i=" " * 8) for part in FAULTS[name])
    assert text.count(before) >= 1, text
    broken = parse_block(text.replace(before, after, 1), program)
    with pytest.raises(CheckFailed):
        verified(list(PASSES)[-1], broken)


def test_the_simulator_finds_a_slot_that_is_published_before_it_is_turned():
    _, program, schedule, arrays = case(keys=400)
    text = block_text(lower(program, schedule))
    fill = next(line for line in text.splitlines(True) if "into v_turned" in line)
    publish = " " * 8 + "Publish v_turned\n"
    assert fill + publish in text
    early = parse_block(text.replace(fill + publish, publish + fill), program)
    want = interpret(program, arrays)["o"].tobytes()

    def right(seed):
        try:
            return simulate(early, arrays, seed=seed)["o"].tobytes() == want
        except CheckFailed:
            return False

    assert not all(right(seed) for seed in range(5))


@pytest.fixture(scope="module")
def emulated():
    """The case with causal rows over two groups, for values as they are and in order, and what each
    gives on the emulated machine."""
    launch = LaunchPlan(tile_scheduler="dynamic")
    config, program, schedule, arrays = case(groups=2, launch=launch, causal=True, head_dim=64)
    ordered = attention(replace(config, ordered=True))
    again = scheduled(ordered, schedule.launch, 2)
    places = np.zeros((1, 1, 64, 160))
    values = interpret(ordered_values(), {"v": arrays["v"], "out": places})["out"]
    sources = [emit(lower(program, schedule)), emit(lower(ordered, again))]
    library = Library(sources)
    found = (
        library.run(0, program, arrays)["o"],
        library.run(1, ordered, {**arrays, "v": values})["o"],
    )
    return config, program, arrays, sources[0], found


def test_the_emitted_kernel_gives_the_bits_of_ordered_values(emulated):
    config, program, arrays, _, (turned, ordered) = emulated
    assert turned.tobytes() == ordered.tobytes()
    want, _ = reference(config, bind(program, arrays))
    assert np.linalg.norm(turned - want) < 0.035 * np.linalg.norm(want)


MACHINE_FAULTS = {
    "no fence before wgmma reads": ("fence_async();\n", "\n"),
    "published before all lanes have written": ("__syncwarp();  // every lane has written", "//"),
    "columns exchanged": ("0x7531 : 0x6420", "0x6420 : 0x6420"),
    "rows of the wrong matrix": ("(row / 4 ^ (lane / 8 % 2))", "(lane / 8 % 2)"),
}


@pytest.mark.parametrize("name", MACHINE_FAULTS)
def test_the_emulated_machine_finds_planted_faults(emulated, name):
    _, program, arrays, source, (turned, _) = emulated
    before, after = MACHINE_FAULTS[name]
    start = source.text.index("turn operands")
    head, tail = source.text[:start], source.text[start:]
    if before in tail.partition("} else {")[0]:
        text = head + tail.replace(before, after, 1)
    else:
        assert before in head
        text = head.replace(before, after) + tail
    try:
        found = Library([replace(source, text=text)]).run(0, program, arrays)["o"]
    except Fault:
        return
    assert found.tobytes() != turned.tobytes()


def read_and_turned():
    """Products with a tile, times that tile: matmuls read it as it is and turned."""

    def body(q, k, o):
        (i,) = t.grid(m=t.cdiv(t.size("m"), 64))
        rows, every = t.span(i * 64, 64), t.span(0, 64)
        queries, acc = t.load(q, rows, every), t.zeros(m=64, e=64)
        for j in t.loop(t.cdiv(t.size("n"), 64)):
            keys = t.load(k, t.span(j * 64, 64), every)
            scores = queries @ keys
            weights = scores.quad_order("n").cast(E4M3)
            acc += weights @ keys.rename("d", "e").T.quad_order("n")
        t.store(o, rows, every, tile=acc)

    arrays = {"q": t.array(E4M3, "m d"), "k": t.array(E4M3, "n d"), "o": t.array(t.FP32, "m e")}
    program = t.trace(body, arrays, name="twice")
    return program, schedule_for(program, Policy("overlapped", PLAIN, 1, 2, {"k": 3}))


def rows_and_keys(rows, keys, seed=0):
    rng = np.random.default_rng(seed)
    arrays = {}
    for name, count in (("q", rows), ("k", keys)):  # few numbers, whose products 8 bits hold
        some = rng.integers(0, 4, (count, 64)) == 0
        arrays[name] = np.where(some, rng.choice([-1.0, 1.0], (count, 64)), 0.0)
    return arrays | {"o": np.zeros((rows, 64))}


def test_a_slot_may_be_read_by_matmuls_and_turned():
    program, schedule = read_and_turned()
    block = lower(program, schedule, verified)
    assert parse_block(block_text(block), program) == block
    source = emit(block)
    count = re.search(r"barrier_init\(k_empty \+ s \* 8, 7\);", source.text)
    assert count is not None  # three warps that turn, and those of the group
    alone = replace(source, text=source.text.replace(count[0], count[0].replace("7", "4")))
    library = Library([source, alone])
    for seed, (rows, keys) in enumerate(((100, 300), (64, 0), (1, 65))):
        arrays = rows_and_keys(rows, keys, seed)
        want = interpret(program, arrays)["o"]
        assert np.array_equal(want, (arrays["q"] @ arrays["k"].T) @ arrays["k"])
        assert np.array_equal(simulate(block, arrays, seed=seed)["o"], want)
        assert np.array_equal(library.run(0, program, arrays)["o"], want)
    with pytest.raises(Fault):
        library.run(1, program, rows_and_keys(100, 600))


@pytest.mark.parametrize("role", ["role transpose", "role compute0"])
def test_who_keeps_a_slot_that_others_give_back_is_found(role):
    program, schedule = read_and_turned()
    head, found, tail = block_text(lower(program, schedule)).partition(role)
    broken = head + found + re.sub(r" +Release k\n", "", tail, count=1)
    with pytest.raises(CheckFailed):
        verified(list(PASSES)[-1], parse_block(broken, program))


def test_a_replay_waits_for_the_warps_that_turn(monkeypatch):
    """Turning that took longer than everything else would show."""
    _, program, schedule, _ = case(groups=2, head_dim=64)
    cubin = build(program, schedule).cubin
    usual = replay(program, schedule, cubin).cycles
    monkeypatch.setattr("warploom.perf.gates.turn_cycles", lambda costs, kind: 9000.0)
    assert usual < 5000
    assert replay(program, schedule, cubin).cycles > 9000
