"""Loads from shared memory are done when a warp arrives at a barrier there: the rule of `lint`,
what the compiler's images are given, and what a reordering must keep."""

from dataclasses import replace
from functools import reduce
from itertools import pairwise
from operator import or_
from random import Random

import pytest
from tests.kernels.test_weight_only import CASES
from tests.sass.test_lint_paths import random_kernels, ways

from warploom.autosched.schedules import compiled
from warploom.codegen.compile.arrival_image import SHOWN_AFTER, _shared, waiting, with_waits
from warploom.kernels.gemm.weight_only import weight_only, weight_only_policy
from warploom.sass.decode.control import NO_SCOREBOARD
from warploom.sass.decode.cubin import parse
from warploom.sass.decode.kernel import decode
from warploom.sass.decode.opcodes import Order, Pipe, lookup
from warploom.sass.flow.arrivals import arrives, early
from warploom.sass.flow.distances import never_both
from warploom.sass.rules.lint import lint
from warploom.sass.rules.verify import verify

RULE = "ARRIVAL"
LOADS = ("LDS", "LDSM")
ARRIVE = "SYNCS.ARRIVE.TRANS64.A1T0"


@pytest.fixture(scope="module")
def built():
    """Weights of four bits, which lanes read from their slots."""
    config, *_ = CASES["nibbles of groups"]
    return parse(compiled(weight_only(config), weight_only_policy(config)).cubin)


def changed(cubin, **controls):
    """The cubin with other control fields, by "at" and the instruction's index."""
    kernel = decode(cubin)
    words = list(kernel.code.words)
    for name, control in controls.items():
        index = int(name.removeprefix("at"))
        words[index] = words[index][0], control.encode(words[index][1])
    return cubin.replace(kernel.code, words)


def without_waits(cubin):
    """As ptxas left it: arrivals wait for nothing."""
    kernel = decode(cubin)
    return changed(
        cubin,
        **{f"at{x.index}": replace(x.control, wait=0) for x in kernel.instructions if arrives(x)},
    )


def findings(cubin):
    return [one for one in lint(decode(cubin)) if one.rule == RULE]


def test_kernels_have_what_they_asked_for_when_they_arrive(built):
    assert not early(decode(built))
    kernel = decode(built)
    assert any(item.base in LOADS for item in kernel.instructions)


def test_an_arrival_that_does_not_wait_is_found_and_given_its_wait(built):
    before = without_waits(built)
    found = findings(before)
    assert found
    assert all(ARRIVE in one.instruction and "LDS" in one.other for one in found)
    assert "no wait for scoreboard" in found[0].reason and found[0].severity == "error"
    after = with_waits(before, decode(before))
    assert after.data == built.data and not findings(after)
    assert verify(before, after).legal


def test_a_reordering_keeps_the_wait_before_an_arrival(built):
    """Where an instruction before the arrival has it, from which no other rule asks for it."""
    bare = without_waits(built)
    kernel = decode(bare)
    arrival, loads = next(iter(early(kernel).items()))
    before = kernel.instructions[arrival - 1]
    mask = reduce(or_, (one.mask for one in loads))
    with_mask = replace(before.control, wait=mask, stall=max(2, before.control.stall))
    waited = changed(bare, **{f"at{before.index}": with_mask})
    assert arrival not in early(decode(waited))
    verdict = verify(waited, changed(waited, **{f"at{before.index}": replace(with_mask, wait=0)}))
    assert not verdict.legal
    assert kernel.instructions[arrival].offset in {one.offset for one in verdict.findings}
    assert {one.rule for one in verdict.findings} <= {"WAIT", "INHERITED_WAIT"}


# --- beside a walk of every path ---------------------------------------------------------------


def with_arrivals(kernel, seed):
    """Some instructions of a kernel are arrivals, which write nothing, and some are loads."""
    random, items = Random(seed), []
    for item in kernel.instructions:
        drawn = random.random()
        if item.effects.info.order in (Order.FREE, Order.MEMORY) and drawn < 0.7:
            opcode = ARRIVE if drawn < 0.2 else random.choice(LOADS)
            guard = "" if drawn < 0.4 else item.line.guard
            info = lookup(opcode)
            effects = replace(item.effects, info=info, **({} if info.name in LOADS else NOTHING))
            item = replace(  # noqa: PLW2901
                item, line=replace(item.line, opcode=opcode, guard=guard), effects=effects
            )
        items.append(item)
    return replace(kernel, instructions=tuple(items))


NOTHING = {"reads": (), "writes": (), "partial": False}


def on_paths(kernel):
    """(arrival, load) of every path on which nothing proves the load done before."""
    found = set()
    for path in ways(kernel):
        loads = {}  # load: scoreboards of which each proves it done, registers that are still its
        for index in path:
            item = kernel.instructions[index]
            board = {item.control.write_sb} - {NO_SCOREBOARD}
            waited = set(item.control.waits())
            loads = {x: one for x, one in loads.items() if not one[0] & waited}
            if arrives(item):
                found |= {(index, x) for x in loads if not never_both(kernel, x, index)}
            for load, (boards, _) in loads.items():
                silent = kernel.instructions[load].control.write_sb == NO_SCOREBOARD
                if silent and item.effects.info.pipe is Pipe.LSU:
                    boards.update(board)
            written = {access.resource for access in item.effects.writes}
            for _, registers in loads.values():
                registers.difference_update(() if item.effects.partial else written)
            loads = {x: one for x, one in loads.items() if one[1]}
            if item.base in LOADS and item.line.guard != "!PT" and written:
                loads[index] = board, set(written)
    return found


def test_lint_finds_what_a_walk_of_every_path_does(kernels_of):
    names = ("cuda_reduce_sm90a", "cuda_cluster_sm90a", "cuda_calls_sm90a")
    found = [kernel for name in names for kernel in kernels_of(name)]
    bases = [kernel for kernel in found if len(kernel.blocks) > 3 and len(ways(kernel)) < 40]
    count = 0
    for seed, kernel in enumerate(random_kernels(bases)):
        mixed = with_arrivals(kernel, seed)
        want = on_paths(mixed)
        assert {(x, one.producer) for x, loads in early(mixed).items() for one in loads} == want
        count += len(want)
        fixed = waiting(mixed)
        assert not early(fixed) and not on_paths(fixed)
        for (first, second), (old, before) in zip(
            pairwise(fixed.instructions), pairwise(mixed.instructions), strict=True
        ):
            sets, known = ({x.control.write_sb, x.control.read_sb} for x in (first, old))
            waits, waited = (set(x.control.waits()) for x in (second, before))
            if (sets & waits) - (known & waited):
                assert first.control.stall >= SHOWN_AFTER
    assert count > 50


def test_a_load_without_a_scoreboard_gets_that_of_a_later_one(built):
    before = without_waits(built)
    kernel = decode(before)
    arrival, loads = next(iter(early(kernel).items()))
    load = kernel.instructions[max(one.producer for one in loads)]
    silent = replace(load.control, write_sb=NO_SCOREBOARD)
    mute = changed(before, **{f"at{load.index}": silent})
    (entry,) = (x for x in early(decode(mute))[arrival] if x.producer == load.index)
    after = decode(with_waits(mute, decode(mute)))
    assert not early(after)
    board = after.instructions[load.index].control.write_sb
    assert entry.mask or board != NO_SCOREBOARD
    assert after.instructions[arrival].control.wait


def test_a_scoreboard_that_is_counted_is_not_shared(built):
    kernel = decode(built)
    load = next(item for item in kernel.instructions if item.base == "LDS")
    board = _shared(kernel, load)
    items = list(kernel.instructions)
    line = replace(items[0].line, opcode="DEPBAR.LE", operands=f"SB{board}, 0x1")
    items[0] = replace(items[0], line=line)
    assert _shared(replace(kernel, instructions=tuple(items)), load) != board


@pytest.mark.parametrize(
    "opcode, gives",
    [(ARRIVE, True), ("SYNCS.ARRIVE.TRANS64.RED.A1T0", True), ("SYNCS.ARRIVE.TRANS64", False),
     ("SYNCS.PHASECHK.TRANS64.TRYWAIT", False)],
)  # fmt: skip
def test_who_expects_bytes_gives_no_slot_back(built, opcode, gives):
    item = decode(built).instructions[0]
    assert arrives(replace(item, line=replace(item.line, opcode=opcode))) == gives
