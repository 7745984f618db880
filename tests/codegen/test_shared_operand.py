"""A slot read by matmuls stages apart: each reads the slot of its own iteration."""

import re
from dataclasses import replace

import pytest
from tests.codegen import emulate
from tests.codegen.shared_program import shared_case
from tests.gpu.cases import distance

from warploom import tile as t
from warploom.autosched.schedules import Policy, fitting_name, schedule_for
from warploom.codegen.compile.build import build
from warploom.codegen.cuda.emit_sm80 import emit_sm80
from warploom.codegen.ir.plan import LaunchPlan
from warploom.codegen.ir.steps import Wait
from warploom.codegen.oracle.simulate import simulate
from warploom.codegen.passes.lower import lower
from warploom.errors import CheckFailed
from warploom.kernels.attention.program import AttentionConfig, attention

TRIPS = {0: 0, 1: 8, 2: 32, 3: 48, 5: 72}


def behind(depth=3):
    """The second product one iteration behind the first, over one ring of the common operand."""
    program, _ = shared_case()
    return program, schedule_for(
        program, Policy("overlapped", LaunchPlan(split="", store="direct"), groups=1, depth=depth)
    )


@pytest.mark.parametrize("trips", TRIPS)
def test_every_trip_count_agrees_under_random_interleavings(trips):
    program, schedule = behind()
    _, arrays = shared_case(k=TRIPS[trips])
    want = t.interpret(program, arrays)
    for seed in range(3):
        got = simulate(lower(program, schedule), arrays, seed=seed)
        assert distance(got["y"], want["y"]) == 0


def test_the_emitted_code_agrees_and_the_latest_slot_does_not(tmp_path):
    program, schedule = behind()
    source = emit_sm80(lower(program, schedule))
    assert "x_first" in source.text
    # Planted fault: the slot of the latest wait.
    text = re.sub(r"\(\((\w+) - 1\) - i_start\)", r"(\1 - i_start)", source.text)
    latest = replace(source, text=text)
    assert latest.text != source.text
    library = emulate.compile_all([source, latest], tmp_path)
    for trips, k in TRIPS.items():
        _, arrays = shared_case(k=k)
        want = t.interpret(program, arrays)["y"]
        got = emulate.run(library, 0, source, program, arrays)["y"]
        assert distance(got, want) == 0
        if trips > 1:
            try:
                assert distance(emulate.run(library, 1, latest, program, arrays)["y"], want) > 0.1
            except emulate.Fault as fault:
                assert fault.kind in ("race", "unwritten")


def test_a_slot_read_before_its_wait_is_a_race():
    program, schedule = behind()
    block = lower(program, schedule)
    _, arrays = shared_case()
    broken = _moved(block)
    with pytest.raises(CheckFailed, match="before it waits for it"):
        simulate(broken, arrays, seed=0)


def _moved(block):
    """Planted fault: every wait for x stands a stage later, where the second product reads."""

    def later(steps):
        return tuple(s.at(1) if isinstance(s, Wait) and s.ring.startswith("x") else s
                     for s in steps)  # fmt: skip

    roles = []
    for role in block.roles:
        sections = tuple(
            replace(s, steady=later(s.steady), prologue=tuple(
                tuple(step for step in later(steps) if step.stage <= n)
                for n, steps in enumerate(s.prologue)
            )) if not role.loads and hasattr(s, "steady") else s
            for s in role.sections
        )  # fmt: skip
        roles.append(replace(role, sections=sections))
    return replace(block, roles=tuple(roles))


def test_it_compiles_for_hopper():
    program, schedule = behind()
    built = build(program, schedule)
    assert built.resources.spill_bytes == 0 and "x_first" in built.source.text


def test_the_fitting_schedule_asks_whether_a_product_takes_the_others_result():
    assert fitting_name(shared_case()[0]) == "inflight"
    assert fitting_name(attention(AttentionConfig())) == "pingpong"
