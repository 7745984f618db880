"""Batch verdicts say what the verifier says, legal or not; a rule left out shows."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warploom.errors import InputError
from warploom.rl.batch import BlockBatch
from warploom.rl.coupling import Coupling
from warploom.rl.derive import NO_WISH, Wishes, derive, derived_rules
from warploom.sass.decode.control import Control
from warploom.sass.decode.cubin import Cubin
from warploom.sass.edit.edit import Editor
from warploom.sass.edit.rederive import BlockState
from warploom.sass.flow.aliasing import AliasMode
from warploom.sass.rules.verify import Verifier
from warploom.sass.rules.versions import KernelTables, Timed, Versions

KERNELS = (
    "triton_softmax_1x4096_w8_s1_sm90",
    "triton_attention_128x64_w8_s3_sm90",
    "triton_rmsnorm_2x4096_w8_s2_sm80",
)
CubinOf = Callable[[str], Cubin]


@dataclass
class Bench:
    """One kernel with its verifier, editor and batch checks."""

    verifier: Verifier
    editor: Editor
    blocks: list[BlockBatch]
    coupling: Coupling


@pytest.fixture(scope="module")
def bench(cubin_of: CubinOf) -> Callable[[str], Bench]:
    """A fresh bench of a kernel; the verifier is derived once."""

    @cache
    def verifier(name: str) -> Verifier:
        return Verifier(cubin_of(name), None, AliasMode.TRITON)

    def make(name: str) -> Bench:
        tables = KernelTables(verifier(name))
        blocks = [BlockBatch(tables, block.index) for block in verifier(name).kernel.blocks]
        editor = Editor(cubin_of(name), None, AliasMode.TRITON)
        return Bench(verifier(name), editor, blocks, Coupling(tables, blocks))

    return make


def edit(editor: Editor, block: int, rng: random.Random) -> bool:
    """One random edit of a block, most of them illegal; False when there was none to make."""
    state = editor.states[block]
    order, controls = list(state.order), list(editor.controls(block))
    place = rng.randrange(len(order))
    kind = rng.choice(("swap", "far", "stall", "wait", "reuse", "stay", "move"))
    if kind == "move":
        first, last = editor.window(order[place], 12)
        try:
            editor.move(order[place], rng.randint(first, last))
        except InputError:
            return False
        return True
    if kind in ("swap", "far"):
        to = rng.randrange(len(order)) if kind == "far" else min(place + 1, len(order) - 1)
        order.insert(to, order.pop(place))
        controls.insert(to, controls.pop(place))
    else:
        now = controls[place]
        changed: Control = {
            "stall": replace(now, stall=max(0, min(15, now.stall + rng.choice((-2, -1, 1, 5))))),
            "wait": replace(now, wait=now.wait ^ 1 << rng.randrange(6)),
            "reuse": replace(now, reuse=now.reuse ^ 1 << rng.randrange(3)),
            "stay": replace(now, stay=not now.stay),
        }[kind]
        controls[place] = changed
    wishes = dict(zip(order, controls, strict=True))
    editor.restore(block, BlockState(tuple(order), wishes, True))
    return True


def version_of(editor: Editor, block: int, start: int) -> Versions:
    """A block of an editor as one version."""
    controls = editor.controls(block)
    fields = (
        np.array([[int(getattr(control, name)) for control in controls]])
        for name in ("stall", "stay", "wait", "reuse")
    )
    return Versions(np.array(editor.states[block].order)[None] - start, *fields)


def walk(
    bench: Bench, steps: int, seed: int, see: Callable[[int, Versions, bool, str], Timed | None]
) -> None:
    """Edit at random; legal states stay. `see` gets block, version, the verifier's verdict and its
    rule, and returns what the coupling needs of a legal version."""
    rng = random.Random(seed)
    editor = bench.editor
    sizes = [block.size for block in editor.kernel.blocks]
    for _ in range(steps):
        block = rng.choices(range(len(sizes)), sizes)[0]
        before = (editor.states[block], editor.controls(block))
        if sizes[block] < 2 or not edit(editor, block, rng):
            continue
        words = editor.words()
        verdict = bench.verifier.check_words(words, editor.info())
        rule = "" if verdict.legal else verdict.findings[0].rule
        version = version_of(editor, block, editor.kernel.blocks[block].start)
        timed = see(block, version, verdict.legal, rule)
        if verdict.legal and timed is not None:
            bench.coupling.set(block, timed, 0)
        else:
            editor.restore(block, *before)


@settings(max_examples=6, deadline=None, derandomize=True)
@given(name=st.sampled_from(KERNELS), seed=st.integers(0, 1 << 20))
def test_batch_verdicts_are_the_verifiers(
    bench: Callable[[str], Bench], name: str, seed: int
) -> None:
    one = bench(name)
    seen = Counter[bool]()

    def see(block: int, version: Versions, legal: bool, rule: str) -> Timed:
        ok, timed = one.blocks[block].check(version)
        found = bool(ok[0] & one.coupling.check(block, timed)[0])
        assert found == legal, f"{name} block {block}: the batch says {found}, {rule or 'legal'}"
        seen[legal] += 1
        return timed

    walk(one, 120, seed, see)
    assert seen[True] > 20 and seen[False] > 20


@pytest.mark.parametrize(
    ("rows", "rules"),
    [
        # Most reversed pairs break a distance too; those of memory and syncs need not.
        ("order_rows", {"REGISTER_ORDER", "SYNC_ORDER", "MEMORY_ORDER", "SCOREBOARD_ORDER"}),
        ("gap_rows", {"LATENCY", "SPACING", "SYNC_DISTANCE"}),
        ("wait_rows", {"WAIT", "INHERITED_WAIT", "WAIT_BEFORE_EXIT"}),
        ("reuse_rows", {"REUSE"}),
    ],
)
def test_a_batch_without_a_rule_lets_its_faults_through(
    bench: Callable[[str], Bench], rows: str, rules: set[str]
) -> None:
    one = bench(KERNELS[1])
    passed = Counter[str]()

    def see(block: int, version: Versions, legal: bool, rule: str) -> Timed:
        whole = one.blocks[block]
        kept = getattr(whole, rows)
        setattr(whole, rows, kept[:0])
        ok, timed = whole.check(version)
        setattr(whole, rows, kept)
        if not legal and ok[0] and one.coupling.check(block, timed)[0]:
            passed[rule] += 1
        return timed

    walk(one, 700 if rows == "wait_rows" else 120, 3, see)
    assert set(passed) & rules, f"without {rows} nothing more was let through"
    assert not set(passed) - rules, f"without {rows} also {set(passed) - rules}"


@pytest.mark.parametrize("name", KERNELS)
def test_deriving_the_original_order_gives_the_compilers_fields(
    bench: Callable[[str], Bench], name: str
) -> None:
    for batch in bench(name).blocks:
        original = batch.original()
        wishes = Wishes(
            np.full((1, batch.size), NO_WISH), original.stay.copy(), original.reuse.copy()
        )
        derived = derive(derived_rules(batch), original.order, wishes)
        for field in ("stall", "stay", "wait", "reuse"):
            assert np.array_equal(getattr(derived, field), getattr(original, field)), field


def test_many_versions_at_once_are_judged_as_one_at_a_time(bench: Callable[[str], Bench]) -> None:
    one = bench(KERNELS[0])
    block = max(range(len(one.blocks)), key=lambda number: one.blocks[number].size)
    batch = one.blocks[block]
    rng = np.random.default_rng(0)
    orders = np.stack([np.arange(batch.size)] * 40)
    for row in orders[1:]:
        place = int(rng.integers(0, batch.size - 1))
        row[[place, place + 1]] = row[[place + 1, place]]
    wishes = Wishes(
        np.full_like(orders, NO_WISH),
        np.tile(batch.stay, (len(orders), 1)),
        np.tile(batch.reuse, (len(orders), 1)),
    )
    versions = derive(derived_rules(batch), orders, wishes)
    together, timed = batch.check(versions)
    coupled = one.coupling.check(block, timed)
    for row in range(len(orders)):
        alone, its_time = batch.check(versions.take([row]))
        assert alone[0] == together[row]
        assert one.coupling.check(block, its_time)[0] == coupled[row]
    assert 0 < together.sum() < len(together)
