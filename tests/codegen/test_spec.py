"""The spec of the block program: what passes make keeps every rule, and no planted fault does."""

import re
from dataclasses import replace
from functools import cache

import pytest
from tests.codegen.programs import attention_case, gemm_case
from tests.codegen.random_program import random_case
from tests.codegen.shared_program import shared_case
from tests.codegen.tiny_program import tiny_case
from tests.kernels.test_machine_code import kernels

from warploom.autosched.schedules import Policy, schedule_for
from warploom.codegen.ir.plan import LaunchPlan
from warploom.codegen.ir.spec import RULES, verify
from warploom.codegen.ir.text import block_text, parse_block
from warploom.codegen.passes.lower import PASSES, START, lower, verified
from warploom.errors import CheckFailed
from warploom.kernels.recurrent import solved
from warploom.kernels.recurrent.backward import backward_policy, recurrent_backward
from warploom.kernels.recurrent.config import RecurrentConfig
from warploom.kernels.recurrent.program import default_policy, recurrent
from warploom.tile import BF16

OVERLAP = {"overlap_next_task": True, "task_rings": {"q_t": 2}}


def shared(depth):
    program = shared_case()[0]
    return program, schedule_for(program, Policy("inflight", LaunchPlan(), groups=1, depth=depth))


def stages_apart():
    program = shared_case()[0]
    return program, schedule_for(program, Policy("overlapped", LaunchPlan(), groups=1, depth=3))


def staged():
    """Chunks under the delta rule with decays of channels: one of a group's own tiles is written
    three times."""
    config = RecurrentConfig("channel", delta=True, gates=BF16)
    program, policy = list(solved.kernels(config))[1]
    return program, schedule_for(program, policy)


def late():
    """Simple GLA: what is stored is copied behind the fence for the next matmul."""
    config = RecurrentConfig("token")
    return recurrent(config), schedule_for(recurrent(config), default_policy(config))


def carried():
    """Based: the copies of a chunk's result begin behind the fence of the next chunk."""
    config = RecurrentConfig("none", taylor=True, key_dim=16)
    return recurrent(config), schedule_for(recurrent(config), default_policy(config))


def several_late():
    """Gradients of RetNet: several late stores in a row share one room of panels."""
    config = RecurrentConfig("head")
    policy = backward_policy(config)
    policy = replace(policy, launch=replace(policy.launch, late_stores=True))
    program = recurrent_backward(config)
    return program, schedule_for(program, policy)


CASES = {
    "gemm": lambda: gemm_case(64, 64, 64),
    "gemm, one slot": lambda: gemm_case(64, 64, 64, 1, flying=0),
    "gemm, cluster": lambda: gemm_case(64, 64, 64, 5, cluster=2, bias=True),
    "attention": lambda: attention_case(64, 64),
    "attention, one group": lambda: attention_case(64, 64, groups=1),
    "attention, one after the other": lambda: attention_case(64, 64, kind="multistage"),
    "attention, window": lambda: attention_case(64, 64, 3, True, 3, causal=True, window=33),
    "attention, apart": lambda: attention_case(64, 64, 3, False, causal=True, split_mask_loop=True),
    "one operand, two readers": lambda: shared(2),
    "readers stages apart": stages_apart,
    "staged": staged,
    "late": late,
    "carried": carried,
    "late, several": several_late,
    "tiny": tiny_case,
    "tiny, turns": lambda: tiny_case(True),
    "tiny, early": lambda: tiny_case(early_release=True),
    "tiny, overlap": lambda: tiny_case(**OVERLAP),
    "tiny, all": lambda: tiny_case(True, early_release=True, overlap_next_task=True),
    **{f"random {seed}": lambda seed=seed: random_case(seed) for seed in range(8)},
}


@pytest.mark.parametrize("name", CASES)
def test_what_every_pass_makes_keeps_the_rules(name):
    program, schedule, *_ = CASES[name]()
    lower(program, schedule, verified)


def test_every_kernel_that_a_measured_shape_gets_keeps_the_rules():
    for program, schedule, _ in kernels().values():
        verified(list(PASSES)[-1], lower(program, schedule))


LAST = list(PASSES)[-1]
MMA_9 = r"Issue mma.9 \(iteration -1\)\n"
# By rule: the case, the pass after which its text is changed, what is found there (the first, or
# the one of that number), and what is put in its place.
FAULTS = {
    "one producer, then the groups": [
        ("tiny", START, r"Run fill.1", "Fill load.0 into q"),
        ("tiny", START, r", part 1", ", part 2"),
    ],
    "steps name rings of the program": [
        ("tiny", LAST, "Fill load.2 into k", "Fill load.2 into v"),
        ("tiny", LAST, r"Wait v \(iteration -1\)", "Wait w (iteration -1)", 1),
    ],
    "every op is there once": [
        ("tiny", START, " *Run store.10\n", ""),
        ("tiny", START, "( *Run store.10\n)", r"\1\1"),
        ("tiny", START, "Issue mma.3", "Run mma.3"),
        ("tiny", START, " *at 0: Fill load.2 into k\n", ""),
    ],
    "a slot is acquired and published once an iteration": [
        ("tiny", "loader_slots", " *at 0: Publish k\n", "")
    ],
    "a slot is taken and given back once an iteration": [
        ("tiny", "waits", r" *at \d+: Wait v\n", ""),
        ("tiny", "waits", r"( *at \d+: Release v\n)", r"\1\1"),
    ],
    "matmuls of loops know their turn": [("tiny, turns", "number_turns", ", turn 0", "")],
    "the program's meaning": [
        # An op is done on another iteration; two that touch one tile change places; one is left
        # out of the epilogue; one is done twice; and sums are halved in the wrong iteration.
        ("tiny", "pipeline", r"mma.9 \(iteration -1\)", "mma.9"),
        ("tiny", "pipeline", r"( *Issue mma.3\n)(.*?)( *Run cast.7\n)", r"\3\1\2"),
        ("tiny", "pipeline", f" *{MMA_9}", "", 1),
        ("tiny", "pipeline", r"( *Run mul.5\n)", r"\1\1"),
        ("tiny", "pipeline", rf"(steady.*?)( *{MMA_9})(.*?)( *Run mul.5\n)", r"\1\4\2\3"),
    ],
    "the producer's slots": [
        ("tiny", "pipeline", r"( *Acquire k\n)( *Fill load.2 into k\n)", r"\2\1"),
        ("tiny", "pipeline", r"( *Fill load.2 into k\n)( *Publish k\n)", r"\2\1"),
    ],
    "the groups' slots": [
        ("gemm", "pipeline", r"ring (\w+) x3", r"ring \1 x1"),
        ("tiny", "pipeline", " *Wait q\n", ""),
        ("tiny", "pipeline", " *Release q\n", ""),
        ("tiny", "pipeline", r"( *Wait k\n)( *Issue mma.3\n)", r"\2\1"),
        ("tiny", "pipeline", r"( *Issue mma.3\n)(.*?)( *Release k\n)", r"\3\1\2"),
        ("tiny", "pipeline", r"( *Wait v \(iteration -1\)\n)", r"\1\1", 1),
        ("tiny, early", LAST, " *none\n *Release q\n", ""),
        ("tiny, overlap", LAST, "ring q x2", "ring q x1"),
        ("tiny, overlap", LAST, " *straight\n *Release q\n", ""),
        ("tiny, overlap", LAST, " *ahead: Wait k\n", ""),
    ],
    "no turn is left to take": [
        ("tiny, turns", "take_turns", "Issue mma.3", "Issue mma.3, turn 0")
    ],
    "turns": [
        ("tiny, turns", "take_turns", " *TurnPass\n", ""),
        ("tiny, turns", "take_turns", "( *TurnPass\n)", r"\1\1"),
        ("tiny, turns", "take_turns", " *TurnWait\n", "", 1),
        ("tiny, turns", "take_turns", r"( *TurnWait\n)( *Issue mma.3\n)", r"\2\1"),
        ("tiny, turns", "take_turns", rf" *TurnWait\n( *{MMA_9}) *TurnPass\n", r"\1"),
        ("tiny", "take_turns", "( *)(Issue mma.3\n)", r"\1TurnWait\n\1\2\1TurnPass\n"),
        # One group takes a turn more than the others.
        ("tiny, turns", "take_turns", r"( *)(TurnPass\n)", r"\1\2\1TurnWait\n\1TurnPass\n", 1),
    ],
    "unfinished matmuls": [
        ("tiny", "joins", " *Join <= 0: product\n", ""),
        ("tiny", "joins", "Join <= 0: acc\n", "Join <= 1: acc\n"),
        ("tiny", "joins", r"( *Join <= 0: acc\n)( *Release v \(iteration -1\)\n)", r"\2\1"),
        # exp2_1 is overwritten under the matmul that reads it.
        (
            "tiny",
            "joins",
            rf"({MMA_9} *)Join <= 0: acc, product\n(.*?Run mul.5\n)( *Release k\n.*?7\n)",
            r"\1Join <= 1: product\n\3 Join <= 0: acc\n\2",
        ),
        ("tiny, overlap", LAST, " *straight\n *Join <= 0: product\n", ""),
    ],
    "iterations left out": [
        ("tiny, turns", "early_end", r"(skip\n) *TurnWait\n *TurnPass\n", r"\1"),
        ("tiny", "early_end", r" *Wait v\n *Release v\n(?= *straight)", ""),
        ("tiny, turns", "early_end", r" *empty\n *TurnWait\n *TurnPass\n", ""),
    ],
    "a group's own shared memory": [
        ("staged", LAST, " *FencedGroupSync\n", "", number) for number in range(1, 4)
    ]
    + [
        ("staged", LAST, "FencedGroupSync", "GroupSync", 1),
        ("staged", LAST, r" +GroupSync\n", ""),
        ("staged", LAST, r" +GroupSync\n", "", 1),
        ("staged", LAST, r"( +GroupSync\n)( *Run \S+\n)", r"\2\1"),
        # The store is where warps meet between a chunk's matmuls and the next chunk's operand.
        ("late", LAST, r"( *PanelSync\n)(.*?Run cast.8\n)", r"\2\1"),
    ],
    "panels of late stores": [
        ("late", LAST, r" *Send store.47 \(iteration -1\)\n", ""),
        ("late", LAST, r" *Send store.47 \(iteration -1\)\n", "", 1),
        ("late", LAST, r"( *Send store.47 \(iteration -1\)\n)", r"\1\1"),
        ("late", LAST, r"( *FencedGroupSync\n)( *Send store.47 \(iteration -1\)\n)", r"\2\1"),
        ("late", LAST, r" *FencedGroupSync\n(?= *Send)", ""),
        ("late", LAST, r" *PanelSync\n", "", 1),
        ("late", LAST, r"( *PanelSync\n)( *Run store.47 \(iteration -1\)\n)", r"\2\1"),
        ("carried", LAST, r" *Send \S+ \(iteration -1\)\n", ""),
        ("carried", LAST, r" *Send \S+ \(iteration -1\)\n", "", 1),
        ("carried", LAST, r"( *FencedGroupSync\n)( *Send \S+ \(iteration -1\)\n)", r"\2\1"),
    ],
}


@cache
def texts(case):
    """The program and its text after every pass."""
    program, schedule, *_ = CASES[case]()
    found = {}
    lower(program, schedule, lambda name, block: found.setdefault(name, block_text(block)))
    return program, found


@pytest.mark.parametrize(
    ("rule", "number"),
    [(rule, number) for rule, faults in FAULTS.items() for number in range(len(faults))],
)
def test_a_planted_fault_breaks_its_rule(rule, number):
    case, name, old, new, *rest = FAULTS[rule][number]
    program, found = texts(case)
    place = list(re.finditer(old, found[name], re.S))[sum(rest)]
    wrong = found[name][: place.start()] + place.expand(new) + found[name][place.end() :]
    with pytest.raises(CheckFailed) as error:
        verified(name, parse_block(wrong, program))
    assert re.match(rf"after {name}: block program \S+: {rule}: ", str(error.value))


def test_every_rule_has_planted_faults():
    assert set(FAULTS) == {rule.name for rule in RULES}
    assert {rule.since for rule in RULES} | {rule.until for rule in RULES} <= {"", *PASSES}


def test_a_rule_holds_from_its_pass_on():
    program, found = texts("tiny")
    with pytest.raises(CheckFailed, match="taken and given back once"):
        verify(parse_block(found["loader_slots"], program), [START, "loader_slots", "waits"])
