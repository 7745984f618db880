"""Attention backward against float64: interpreted, under random interleavings, and as emitted."""

import re
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from tests.codegen import emulate
from tests.gpu.cases import distance
from tests.kernels.backward_case import (
    backward_case,
    gradients,
    summed,
)
from tests.lowering import lowered

from warploom import tile as t
from warploom.autosched.schedules import Policy, compiled, schedule_for
from warploom.codegen.compile.build import build
from warploom.codegen.cuda.emit import emit
from warploom.codegen.cuda.emit_sm80 import emit_sm80
from warploom.codegen.cuda.simt.emit import emit_simt
from warploom.codegen.ir.plan import LaunchPlan
from warploom.codegen.oracle.simulate import simulate
from warploom.codegen.passes.lower import lower, verified
from warploom.codegen.simt.choose import simt
from warploom.codegen.simt.schedule import SimtSchedule
from warploom.errors import CheckFailed, InputError
from warploom.kernels.attention.backward import (
    backward,
    backward_policy,
    finish,
    prepare,
)
from warploom.kernels.attention.backward_config import (
    LONG_STYLES,
    BackwardConfig,
    Style,
    fitted,
)
from warploom.kernels.attention.gradients import FRAGMENTS, kernel
from warploom.sass.decode.cubin import parse
from warploom.sass.decode.kernel import decode

# name -> (config, rows, keys, heads)
CASES = {
    "full": (BackwardConfig(), 132, 200, 1),
    "causal": (BackwardConfig(causal=True, group=2, style=Style()), 200, 140, 2),
    "short": (BackwardConfig(head_dim=64, causal=True), 150, 260, 1),
    "fp16": (BackwardConfig(head_dim=64, dtype=t.FP16, scale=0.2), 40, 30, 1),
    "whole": (BackwardConfig(style=Style(turns=True)), 132, 400, 1),
    "kept": (
        BackwardConfig(head_dim=96, style=Style(turns=True, behind=True, kept=True)),
        132,
        200,
        1,
    ),
    "three-groups": (
        BackwardConfig(head_dim=64, causal=True, style=LONG_STYLES[64, True]),
        200,
        400,
        1,
    ),
    "held": (BackwardConfig(group=2), 132, 200, 2),
    "first": (
        BackwardConfig(causal=True, style=Style(turns=True, behind=True, held=True, first=True)),
        332,
        400,
        1,
    ),
    "first-of-each": (BackwardConfig(style=Style(taken=True, first=True)), 132, 200, 1),
    "deterministic": (BackwardConfig(causal=True, deterministic=True, group=2), 260, 300, 2),
    "both-ways": (
        BackwardConfig(causal=True, deterministic=True, group=2, listed=True),
        400,
        440,
        8,
    ),
    "both-ways-three": (
        BackwardConfig(
            head_dim=64, causal=True, deterministic=True, listed=True, style=LONG_STYLES[64, True]
        ),
        300,
        400,
        4,
    ),
    "in-turn": (BackwardConfig(head_dim=64, window=50, deterministic=True), 300, 400, 1),
    "alternating": (
        BackwardConfig(deterministic=True, style=Style(turns=True, behind=True)),
        300,
        300,
        1,
    ),
    "alternating-three": (
        BackwardConfig(head_dim=64, causal=True, deterministic=True, style=LONG_STYLES[64, True]),
        300,
        400,
        1,
    ),
    "window": (BackwardConfig(causal=True, window=70), 200, 180, 1),
    "padded": (BackwardConfig(head_dim=80, causal=True), 100, 200, 1),
    "wide": (BackwardConfig(head_dim=96), 132, 200, 1),
    "capped": (BackwardConfig(causal=True, softcap=2.0), 200, 140, 1),
    "capped-64": (BackwardConfig(head_dim=64, causal=True, softcap=2.0, window=90), 140, 200, 1),
}
BOUND = 6e-3  # of the largest element: weights and their changes are rounded to 16 bits


def close(got, want):
    return float(np.abs(np.asarray(got, np.float64) - want).max() / np.abs(want).max()) < BOUND


def main_case(name):
    """(program, schedule, arrays, gradients, config) of the kernel that goes over tiles of keys."""
    config, rows, keys, heads = CASES[name]
    values, want = backward_case(config, rows, keys, heads=heads)
    if not config.deterministic:
        values.pop("turns")
    return (
        backward(config),
        schedule_for(backward(config), backward_policy(config)),
        values,
        want,
        config,
    )


CUT = {  # name -> (config, rows, keys, heads): one tile is cut for two SMs
    "cut": (
        BackwardConfig(style=Style(turns=True), listed=True, cut=True),
        332,
        300,
        1,
    ),
    "cut-96": (BackwardConfig(head_dim=80, listed=True, cut=True), 200, 300, 3),
}


def run_cut(name, run):
    """What main kernel, pieces and `settle` give, each run by `run(program, policy, arrays)`."""
    config, rows, keys, heads = CUT[name]
    values, want = backward_case(config, rows, keys, heads=heads)
    for part in ("main", "tail", "settle"):
        program, policy, _ = kernel(config, part)
        values |= run(program, policy, {array.name: values[array.name] for array in program.arrays})
    return right(config, values, want)


@pytest.mark.parametrize("name", CUT)
def test_pieces_of_tasks_add_up_to_their_gradients(name):
    assert run_cut(name, lambda program, _, arrays: t.interpret(program, arrays))

    def simulated(program, policy, arrays):
        if isinstance(schedule := schedule_for(program, policy), SimtSchedule):
            return t.interpret(program, arrays)
        return simulate(lower(program, schedule, verified), arrays, seed=1)

    assert run_cut(name, simulated)


@pytest.mark.parametrize("name", CUT)
def test_the_emitted_code_of_pieces_gives_the_gradients(name):
    def emulated(program, policy, arrays):
        source = compiled(program, policy, allow=("spills", "stack")).source
        library = emulate.compile_all([source], None)
        return emulate.run(library, 0, source, program, arrays, seed=1)

    assert run_cut(name, emulated)


def planned(case, **changes):
    """The case under another launch plan."""
    program, schedule, *rest = case
    return program, replace(schedule, launch=schedule.launch.with_options(**changes)), *rest


def right(config, got, want):
    found = {name: got[name] for name in ("dk", "dv", "dq") if name in got}
    if "dq_sum" in got:
        found["dq"] = summed(config, got, want["dq"].shape[2])
    return found and all(close(found[name], want[name]) for name in found)


@pytest.mark.parametrize("name", CASES)
def test_interpreter_and_simulator_give_the_gradients(name):
    program, schedule, values, want, config = main_case(name)
    expected = t.interpret(program, values)
    assert right(config, expected, want)
    for seed in range(2):
        got = simulate(lower(program, schedule, verified), values, seed=seed)
        assert all(distance(got[x], expected[x]) == 0 for x in expected)


@pytest.mark.parametrize(("causal", "softcap"), [(False, 0.0), (True, 0.0), (True, 1.5)])
def test_the_gradients_are_those_of_finite_differences(causal, softcap):
    config = BackwardConfig(head_dim=64, causal=causal, softcap=softcap)
    values, want = backward_case(config, 5, 7)
    random, step = np.random.default_rng(1), 1e-5

    def loss(changed):
        return float((gradients(config, values | changed)["o"] * values["do"]).sum())

    for name in "qkv":
        way = random.standard_normal(values[name].shape)
        high, low = (loss({name: values[name] + sign * step * way}) for sign in (1, -1))
        slope = float((want[f"d{name}"] * way).sum())
        assert abs((high - low) / (2 * step) - slope) < 1e-6 * max(1.0, abs(slope))


def test_what_comes_before_and_after_the_matmuls():
    config, rows, keys, heads = CASES["causal"]
    values, want = backward_case(config, rows, keys, heads=heads)
    arrays = {x: np.full(values[x].shape, np.nan) for x in ("base", "delta")}
    arrays |= {"o": want["o"], "lse": want["lse"], "do": values["do"]}
    got = t.interpret(prepare(config), arrays | {"dq_sum": np.full_like(values["dq_sum"], np.nan)})
    base, delta = (got[x][..., :rows] for x in ("base", "delta"))
    assert np.isinf(want["base"]).any() and (np.isinf(base) == np.isinf(want["base"])).all()
    seen = np.isfinite(want["base"])
    assert np.abs(base[seen] - want["base"][seen]).max() < 1e-5
    assert np.abs(delta - want["delta"]).max() < 0.1
    assert not got["dq_sum"].any()
    sums = {"dq_sum": values["dq_sum"].copy(), "dq": arrays["o"] * np.nan}
    values |= {"base": got["base"], "delta": got["delta"]}
    sums["dq_sum"] = t.interpret(backward(config), values)["dq_sum"]
    assert close(t.interpret(finish(config), sums)["dq"], want["dq"])


@pytest.mark.parametrize("head_dim", [64, 128])
def test_sums_that_nobody_begins_are_gradients_of_zero(head_dim):
    config, rows, seen = (
        BackwardConfig(head_dim=head_dim, causal=True, deterministic=True),
        400,
        140,
    )
    values, want = backward_case(config, rows, seen)
    added = t.interpret(backward(config), values)
    assert np.isnan(added["dq_sum"]).any()
    sums = {x: added[x] for x in ("dq_sum", "turns")} | {"dq": want["o"] * np.nan}
    program, policy, _ = kernel(config, "finish")
    source = compiled(program, policy).source
    library = emulate.compile_all([source], None)
    for got in (t.interpret(program, sums), emulate.run(library, 0, source, program, sums)):
        assert close(got["dq"], want["dq"]) and not got["dq"][:, :, : rows - seen].any()


@pytest.mark.parametrize("name", ["causal", "wide"])
def test_kernels_without_a_matmul_do_not_spill(name):
    config = CASES[name][0]
    for program in (prepare(config), finish(config)):
        assert build(program, simt(program)).resources.spill_bytes == 0


def test_exponentials_stay_before_the_wait_for_what_they_do_not_need():
    """What the compiler does without `held`, too, or the style would say nothing."""
    before = {}
    for held in (True, False):
        config = BackwardConfig(whole_keys=True, style=Style(held=held))
        program, policy, allow = kernel(config, "main")
        built = build(program, schedule_for(program, policy), allow=allow)
        code = [one.line.opcode for one in decode(parse(built.cubin)).instructions]
        waits = [n for n, name in enumerate(code) if name.startswith("WARPGROUP.DEPBAR")]
        powers = [n for n, name in enumerate(code) if name == "MUFU.EX2"]
        before[held] = sum(n < waits[1] for n in powers), len(powers)
    assert before[True] == (32, 32) and before[False][0] < 8


@pytest.mark.parametrize("held", [{"q_t": (0,)}, {"v_t": (8,)}, {"acc": (0,)}])
def test_columns_stay_in_registers_of_what_a_task_loads_once_alone(held):
    program, schedule, *_ = planned(main_case("first"), held_steps=held)
    with pytest.raises(InputError, match="held_steps"):
        emit(lower(program, schedule))


@pytest.fixture(scope="module")
def kernels():
    """The emitted text of some cases, compiled as one library."""
    made = [main_case(name) for name in CASES]
    sources = [emit(lower(case[0], case[1])) for case in made]
    return emulate.compile_all(sources, None), made, sources


@pytest.mark.parametrize("number", range(len(CASES)))
def test_the_emitted_code_gives_the_gradients(kernels, number):
    library, made, sources = kernels
    program, _, values, want, config = made[number]
    for seed in range(2 if config.deterministic else 1):  # turns depend on who comes first
        got = emulate.run(library, number, sources[number], program, values, seed=seed)
        assert right(config, got, want)


# fault -> (pattern, which of how many in turn)
# of groups that make dq in turn
TURNING = {
    "no-group-that-says-so": (r"if \(whose == \d\) named_arrive<[56], 256>\(\);", (0, 1)),
    "no-wait-for-the-others": (r"if \(part == \d\) named_sync<[56], 256>\(\);", (0, 1)),
    "no-wait-for-copies": (r"barrier_wait\(carried_empty, [^;]*;(?=\n +// Meet)", (0, 1)),
    "no-wait-for-last-copies": (r"barrier_wait\(carried_empty, [^;]*;(?=\n +if)", (0, 1)),
}
# of warps that copy what groups leave in turn, in an order of all tasks
ALTERNATING = {
    "no-wait-for-panels": (r"barrier_wait\(carried_full[^;]*;", (0, 1)),
    "lanes-apart": (r"__syncwarp\(\);(?=  // or lanes)", (0, 1)),
    "no-turn-passed": (r"turn_pass\([^;]*;", (0, 1)),
    "no-room-given-back": (r"barrier_arrive\(carried_empty\);", (0, 1)),
}
FAULTS = {
    "no-meeting": (r"named_sync<5, 256>\(\);", (0, 1)),
    "no-group-that-shares": (r"named_sync<[12], 128>\(\);", (0, 1)),
    "no-fence-before-matmuls": (r"fence_async\(\);", (0, 1)),
    "no-fence-before-copies": (r"fence_async\(\);(?=  // here)", (0, 1)),
    "no-wait-for-matmuls": (r"wgmma_wait<\d>\(\);", (0, 1)),
    "no-wait-for-panels": (r"barrier_wait\(carried_full[^;]*;", (0, 1)),
    "no-wait-for-copies": (r"barrier_wait\(carried_empty[^;]*;", (0, 1)),
    "no-panels-handed-over": (r"if \(lane == 0\) barrier_arrive\(carried_full[^;]*;", (0, 1)),
}


BROKEN = {"full": FAULTS, "whole": TURNING, "alternating": ALTERNATING}


@pytest.mark.parametrize(
    ("case", "fault"),
    [(case, fault) for case, faults in BROKEN.items() for fault in faults],
)
def test_what_is_left_out_is_noticed(kernels, case, fault):
    _, made, sources = kernels
    place = list(CASES).index(case)
    program, _, values, want, config = made[place]
    source = sources[place]
    body = source.text.index('extern "C"')
    pattern, (which, turns) = BROKEN[case][fault]
    number = count()
    text = source.text[:body] + re.sub(
        pattern, lambda m: ";" if next(number) % turns == which else m[0], source.text[body:]
    )
    assert text != source.text
    broken = replace(source, text=text)
    library = emulate.compile_all([broken], None)
    for seed in range(8):
        try:
            got = emulate.run(library, 0, broken, program, values, seed=seed)
        except emulate.Fault:
            return
        if not right(config, got, want):
            return
    raise AssertionError("8 interleavings did not notice")


def test_the_simulator_notices_a_meeting_left_out():
    program, schedule, values, _, _ = main_case("full")
    block = lower(program, schedule)

    def without(role, section):
        if role.loads or not hasattr(section, "steady"):
            return [section]
        meets = [n for n, step in enumerate(section.steady) if str(step).startswith("Meet")]
        kept = (step for n, step in enumerate(section.steady) if n != meets[-1])
        return [replace(section, steady=tuple(kept))]

    with pytest.raises(CheckFailed, match="race: "):
        for seed in range(8):
            simulate(block.rewritten(without), values, seed=seed)


@pytest.mark.parametrize("plan", [{"store": "direct"}, {"store_panels": 1}])
def test_stores_that_no_warp_can_copy_are_refused(plan):
    program, schedule, *_ = planned(main_case("causal"), store_warps=True, **plan)
    with pytest.raises(InputError, match="a store through panels of its own, each with a slot"):
        emit(lower(program, schedule))


def test_a_store_in_turn_needs_a_warp_that_waits():
    program, schedule, *_ = planned(main_case("deterministic"), store_warps=False, in_turn=False)
    with pytest.raises(InputError, match="a store in turn needs store_warps"):
        emit(lower(program, schedule))


def test_sums_added_in_turn_have_the_same_bits():
    config = BackwardConfig(head_dim=64, deterministic=True)
    values, _ = backward_case(config, 128, 512)
    program = backward(config)
    source = emit(lowered(program, backward_policy(config)))
    free = replace(source, text=re.sub(r"if \(lane == 0\) turn_wait[^;]*;", "", source.text))
    # A turn that is passed on before the sums are in memory.
    early = replace(source, text=source.text.replace(".wait_group 0;", ".wait_group.read 0;"))
    assert early.text != source.text != free.text
    library = emulate.compile_all([source, free, early], None)
    for number, one in enumerate((source, free, early)):
        runs = [
            emulate.run(library, number, one, program, values, blocks=4, seed=seed)["dq_sum"]
            for seed in range(4)
        ]
        assert all((sums == runs[0]).all() for sums in runs) == (one is source)


@pytest.mark.parametrize("begins", ["false", "true"])
def test_the_first_turn_alone_begins_a_sum(kernels, begins):
    _, made, sources = kernels
    place = list(CASES).index("deterministic")
    program, _, values, want, config = made[place]
    text = sources[place].text.replace("if (turn == 0)", f"if ({begins})")
    broken = replace(sources[place], text=text)
    assert text != sources[place].text
    library = emulate.compile_all([broken], None)
    assert not right(config, emulate.run(library, 0, broken, program, values), want)


def test_older_gpus_have_no_warps_that_copy():
    program, schedule, *_ = main_case("fp16")
    options = {"store": "direct", "store_warps": False, "staged_slots": 1}
    options |= {"fence_at_meeting": False, "in_turn": False}
    plan = schedule.launch.with_options(**options)
    with pytest.raises(InputError, match="expected store_warps"):
        emit_sm80(lowered(program, Policy("multistage", plan, groups=2)))


@pytest.mark.parametrize("rows", [100, 333])
def test_vectors_are_left_in_fragments(rows):
    config = BackwardConfig(head_dim=64)
    values, want = backward_case(config, rows, 90)
    program = prepare(config)
    source = compiled(program, kernel(config, "prepare")[1]).source
    arrays = {"o": want["o"], "lse": want["lse"], "do": values["do"]}
    arrays |= {x: np.full_like(values[x], np.nan) for x in ("base", "delta", "dq_sum")}
    library = emulate.compile_all([source], None)
    got = emulate.run(library, 0, source, program, arrays)
    expected = t.interpret(program, arrays)
    for name in ("base", "delta"):
        assert np.abs(got[name] - expected[name]).max() < 1e-3


def test_sums_in_fragments_are_read_in_order():
    config = CASES["short"][0]
    values, want = backward_case(config, 100, 90)
    program, policy, _ = kernel(config, "finish")
    source = compiled(program, policy).source
    library = emulate.compile_all([source], None)
    sums = np.random.default_rng(0).standard_normal(values["dq_sum"].shape).astype(np.float32)
    arrays = {"dq_sum": sums, "dq": np.full(want["dq"].shape, np.nan)}
    got = emulate.run(library, 0, source, program, arrays)["dq"]
    assert close(got, summed(config, arrays, 100))


def test_sums_in_fragments_do_not_run_ahead():
    with pytest.raises(InputError, match="runs ahead, and arrays in fragments"):
        emit_simt(
            finish(BackwardConfig()), replace(FRAGMENTS, launch=LaunchPlan(), stages=2), "sm_90a"
        )


def test_other_heads_are_refused():
    with pytest.raises(InputError, match="heads of 132: expected a multiple of 8 up to 256"):
        BackwardConfig(head_dim=132)
    with pytest.raises(InputError, match="window=0: expected >= 1"):
        BackwardConfig(window=0)


@pytest.mark.parametrize(("keys", "same"), [(1024, True), (16384, False)])
def test_short_sequences_have_sums_of_one_order(keys, same):
    plain = BackwardConfig(causal=True)
    for config in (plain, replace(plain, style=Style()), replace(plain, window=100)):
        assert fitted(config, keys, keys).deterministic == (same and config is plain)
    assert fitted(replace(plain, deterministic=True), keys, keys).deterministic
    assert fitted(plain, keys, keys, 256).deterministic == same
    assert not fitted(plain, keys, keys, 16).deterministic
