"""Traces of a kernel's steps: stamps in the emitted text, what the replay predicts, and both."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest

from warploom.autosched.schedules import Policy, schedule_for
from warploom.codegen.compile.build import build, emitted
from warploom.codegen.compile.stamps import GROUPS, MOST, stamped_cycles, with_stamps
from warploom.codegen.passes.lower import lower
from warploom.errors import InputError
from warploom.flows.traced import ITERATIONS, Traced, measured_trace
from warploom.kernels.check import checked
from warploom.kernels.library import configure
from warploom.kernels.select import select
from warploom.perf.replay import replay
from warploom.perf.trace import KINDS, errors, predicted, spans

CONFIG = {"head_dim": "64", "rows": "130", "keys": "200"}


@pytest.fixture(scope="module")
def chosen():
    return select("attention", {"head_dim": "64"}, policy="pingpong")


def test_every_step_of_a_steady_loop_is_stamped_and_nothing_else_changes(chosen) -> None:
    source = emitted(chosen.program, chosen.schedule)
    stamped, (one,) = with_stamps(source)
    block = lower(chosen.program, chosen.schedule)
    role = next(role for role in block.roles if role.part == 0)
    steady = next(section.steady for section in role.sections if hasattr(section, "loop"))
    wanted = [str(s) for s in steady if any(isinstance(s, kind) for kind in KINDS.values())]
    assert list(one.steps) == wanted and stamped.text.count("  stamp(0, ") == len(wanted)
    kept = [line for line in stamped.text.split("\n") if "stamp" not in line]
    assert [line for line in source.text.split("\n") if line not in kept] == []


def test_a_stamped_kernel_computes_what_it_did(chosen) -> None:
    """On the emulated GPU: stamps neither move a wait nor touch a register of a running matmul."""
    stamped, _ = with_stamps(emitted(chosen.program, chosen.schedule))
    sizes = configure("attention", CONFIG)[1]
    checked("attention", chosen.config, sizes, stamped).require()


def test_a_kernel_without_a_steady_loop_is_refused() -> None:
    made = select("gemm", {}, policy="multistage")
    source = emitted(made.program, made.schedule)
    with pytest.raises(InputError, match="no steady loop"):
        with_stamps(replace(source, text='extern "C" __global__ void f() {}'))


def words_of(stamps, clocks: dict[int, list[int]]) -> list[int]:
    words = [0] * (GROUPS * (MOST + 1))
    for group, row in clocks.items():
        at = group * (MOST + 1)
        words[at] = len(row)
        words[at + 1 : at + 1 + len(row)] = row
    return words


def test_a_log_is_read_by_steps_and_its_clock_may_wrap(chosen) -> None:
    _, stamps = with_stamps(emitted(chosen.program, chosen.schedule))
    each = len(stamps[0].steps)
    clocks = {
        group: [(2**32 - 1000 + 50 * n + 7 * group) % 2**32 for n in range(6 * each)]
        for group in (1, 2)
    }
    read = stamped_cycles(stamps, words_of(stamps, clocks))
    assert read[0] == ("i", 0, 0, stamps[0].steps[0], 0)
    assert read[6 * each] == ("i", 1, 0, stamps[0].steps[0], 7)
    assert [cycle for *_, cycle in read[: 6 * each]] == [50 * n for n in range(6 * each)]
    trace = measured_trace(stamps, words_of(stamps, clocks))
    assert {mark.iteration for mark in trace} == set(range(ITERATIONS)) and trace[0].cycle == 0
    assert set(spans(trace).values()) == {50.0}


def test_the_predicted_steps_take_the_replayed_cycles(chosen, tmp_path) -> None:
    built = build(chosen.program, chosen.schedule)
    trace = predicted(chosen.program, chosen.schedule, built.cubin)
    (loop,) = replay(chosen.program, chosen.schedule, built.cubin).loops.values()
    for group in (0, 1):
        own = [mark for mark in trace if mark.group == group]
        assert own == sorted(own, key=lambda mark: mark.cycle)
        begins = [mark.cycle for mark in own if mark.step == own[0].step]
        assert [b - a for a, b in pairwise(begins)] == pytest.approx([loop.cycles] * 3, rel=0.01)
    file = json.loads(Traced(trace, trace).write(tmp_path).read_text())
    names = [e["args"]["name"] for e in file["traceEvents"] if e["name"] == "process_name"]
    assert names == ["loop i, measured", "loop i, predicted"]
    slices = [event for event in file["traceEvents"] if event["ph"] == "X"]
    assert len(slices) == 2 * (len(trace) - 2) and all(event["dur"] >= 0 for event in slices)


def test_a_model_that_is_wrong_at_a_step_is_told_by_it(chosen) -> None:
    """Planted fault: one step takes 500 cycles more than the model says."""
    _, stamps = with_stamps(emitted(chosen.program, chosen.schedule))
    each, slow = len(stamps[0].steps), 3

    def trace(extra: int):
        clocks = [100 * n + extra * ((n + each - slow) // each) for n in range(6 * each)]
        return measured_trace(stamps, words_of(stamps, {1: clocks}))

    (worst, *others) = errors(trace(0), trace(500))
    steps = stamps[0].steps
    assert worst == ("i", f"{steps[slow - 1]} -> {steps[slow]}", 100.0, 600.0)
    assert all(model == real for *_, model, real in others)
    assert f"{steps[slow - 1]} -> {steps[slow]}: 100, 600 (-500)" in str(
        Traced(trace(0), trace(500))
    )


def test_schedules_of_all_kinds_are_stamped() -> None:
    program = select("gemm", {}).program
    for name in ("multistage", "inflight", "unpipelined"):
        _, stamps = with_stamps(emitted(program, schedule_for(program, Policy(name))))
        assert {step.split()[0] for step in stamps[0].steps} == {"Wait", "Issue", "Release"}
