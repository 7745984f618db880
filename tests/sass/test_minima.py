"""Walls: they convict nothing a compiler made, and find pairs put closer than it ever puts them."""

from __future__ import annotations

import lzma
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from bench.mined_distances import ENOUGH_AT, Mined, find_minima
from warploom.sass.decode.cubin import parse
from warploom.sass.decode.kernel import Kernel, decode
from warploom.sass.flow.dependence import Hazard, dependences
from warploom.sass.flow.distances import exclusive, key_of, stays_exclusive
from warploom.sass.flow.latency import table_for
from warploom.sass.flow.minima import least, minimum_keys
from warploom.sass.rules.lint import lint

DATA = Path(__file__).parent / "data" / "own"


@pytest.fixture(scope="module")
def own() -> Kernel:
    """A generated attention kernel."""
    data = lzma.decompress((DATA / "attention-d64-192x128-prefetch.cubin.xz").read_bytes())
    return decode(parse(data, "own"))


def test_pairs_of_one_rule_are_counted_together() -> None:
    assert minimum_keys("alu.d0 > fma.b") == ("alu.d > fma.source", "alu.d > any")
    assert minimum_keys("alu.d0 > IMAD.WIDE.c1") == ("alu.d > IMAD.WIDE.c1",)
    assert minimum_keys("R2UR.d0 > UIMAD.WIDE.a")[0] == "R2UR.d > uniform.source"
    assert minimum_keys("UMOV.d0 > UTMASTG.uaddr")[0] == "UMOV.d > engine.uaddr"
    assert minimum_keys("IMAD.WIDE.d1 > alu.a")[0] == "IMAD.WIDE.d1 > alu.source"
    assert minimum_keys("alu.d0 > WARPGROUP.ARRIVE.group") == ()
    assert minimum_keys("alu = fma") == minimum_keys("alu.R < fma") == ()


def test_a_minimum_needs_many_pairs_at_it_and_gives_way_to_one_below() -> None:
    few = {"alu.d0 > fma.a": Counter({4: ENOUGH_AT - 1, 5: 1000})}
    assert find_minima(few, {}, {}) == {}
    many = {"alu.d0 > fma.a": Counter({4: ENOUGH_AT - 1}), "alu.d0 > fma.b": Counter({4: 1, 9: 3})}
    minima = find_minima(many, {}, {})
    assert minima == {"alu.d > fma.source": 4, "alu.d > any": 4}
    below = {"alu.d0 > fma.c": Counter({3: 1})}
    assert find_minima(below, {}, minima)["alu.d > fma.source"] == 3
    assert find_minima({}, {"alu.d0 > imad.a": 2}, minima)["alu.d > any"] == 2
    assert least(minima, "alu.d0 > xu.a") == 4 and least(minima, "fma.d0 > xu.a") == 0


def test_own_output_keeps_its_minima_and_never_less(own: Kernel) -> None:
    minima = table_for(90).minima
    mined = Mined()
    mined.add(own)
    at = below = 0
    for key, seen in mined.gaps.items():
        need = least(minima, key)
        at += seen[need] if need else 0
        below += sum(count for gap, count in seen.items() if gap < need)
    assert at > 100 and below == 0


def test_most_pairs_one_cycle_below_their_minimum_are_found(own: Kernel) -> None:
    """Neighbours whose distance is one stall: shortened to just below, the lint says so."""
    minima = table_for(90).minima
    planted = found = 0
    for block in own.blocks:
        items = own.instructions[block.start : block.end]
        for row in dependences(items):
            first, second = own.instructions[row.earlier], own.instructions[row.later]
            key = key_of(row, first, second) if row.hazard is Hazard.RAW else None
            need = 0 if key is None else least(minima, key)
            if second.index != first.index + 1 or need < 2 or exclusive(first, second):
                continue
            items_now = list(own.instructions)
            control = replace(first.control, stall=need - 1)
            items_now[first.index] = replace(first, control=control)
            planted += 1
            broken = lint(replace(own, instructions=tuple(items_now)))
            found += any(one.rule == "LATENCY" and one.offset == second.offset for one in broken)
            if planted == 12:
                break
        if planted == 12:
            break
    assert planted == found == 12


def test_guards_exclude_each_other_only_while_their_predicate_stands(own: Kernel) -> None:
    """@P0 and @!P0 with a write of P0 in between may both execute."""
    writer = next(i for i in own.instructions if i.base == "ISETP" and not i.line.guard)
    predicate = next(a.resource for a in writer.effects.writes)
    name = f"P{predicate - 512}"
    guarded = next(i for i in own.instructions if i.line.guard == name)
    other = replace(guarded, line=replace(guarded.line, guard=f"!{name}"))
    plain = next(i for i in own.instructions if i.base == "FFMA")
    assert exclusive(guarded, other)
    assert stays_exclusive([guarded, plain, other], 0, 2)
    assert not stays_exclusive([guarded, writer, other], 0, 2)
