"""Each rule of a reordering by itself, to the cycle and to the place.

The rules are vector operations over the rows of `Constraints`. Here each is asked about random rows
and random states of a kernel, and what should come out is counted in loops from what
`Constraints` and the rule's description say of a row.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from warploom.sass.decode.control import MAX_STALL_STAYING, SCOREBOARDS
from warploom.sass.decode.cubin import Cubin
from warploom.sass.decode.words import ControlFields
from warploom.sass.flow.aliasing import AliasMode
from warploom.sass.flow.latency import SPACED
from warploom.sass.rules.control_rules import ControlRules
from warploom.sass.rules.distance_rules import SpacingRules, check_across, check_gaps
from warploom.sass.rules.order_rules import check_order, check_waits
from warploom.sass.rules.original import NO_REGISTER, Original, State
from warploom.sass.rules.rules import BLOCK_EDGE, Rule
from warploom.sass.rules.verify import Verifier

NO_BOARD = 7
STATES = 12


@pytest.fixture(scope="module", params=["cuda_reduce_sm90a", "cuda_mma_gemm_sm90a"])
def known(
    request: pytest.FixtureRequest,
    cubin_of: Callable[[str], Cubin],
    verifier_of: Callable[[Cubin, str, AliasMode], Verifier],
) -> Original:
    cubin = cubin_of(request.param)
    return verifier_of(cubin, next(iter(cubin.kernels)), AliasMode.STRICT).known


def states(known: Original, seed: int, calm: bool = False) -> Iterator[tuple[Random, State]]:
    """Random orders within the blocks, with random fields; `calm`: fields mostly as compiled."""
    for number in range(STATES):
        random = Random(f"{seed} {number}")
        order: list[int] = []
        for block in known.kernel.blocks:
            inside = list(range(block.start, block.end))
            random.shuffle(inside)
            order += inside
        position = np.argsort(np.array(order))

        def drawn(name: str, most: int, order: list[int] = order, random: Random = random):
            as_compiled = getattr(known.before, name)[order].tolist()
            rate = 0.1 if calm else 1.0
            return np.array(
                [random.randrange(most) if random.random() < rate else was for was in as_compiled],
                np.int64,
            )

        fields = ControlFields(
            stall=drawn("stall", 16),
            stay=drawn("stay", 2),
            write_sb=drawn("write_sb", 8),
            read_sb=drawn("read_sb", 8),
            wait=drawn("wait", 64) & drawn("wait", 64) & drawn("wait", 64),
            reuse=drawn("reuse", 8),
        )
        yield random, State(position, np.array(order), fields)


def with_rows(known: Original, **rows: list[tuple[int, ...]]) -> Original:
    """The kernel with other constraints of some kinds."""
    other = copy.copy(known)
    arrays = {name: np.array(each, np.int64) for name, each in rows.items()}
    other.constraints = replace(known.constraints, **arrays)
    return other


def issue_times(state: State) -> list[int]:
    times, now = [], 0
    for stall in state.fields.stall.tolist():
        times.append(now)
        now += stall
    return [*times, now]


def reported(original: Original, rows: list[int]) -> list[int]:
    """The offsets of findings about these instructions."""
    return sorted(original.kernel.instructions[row].offset for row in rows)


def offsets(findings, rule: str) -> list[int]:
    return sorted(row.offset for row in findings if row.rule == rule)


def two(random: Random, known: Original) -> tuple[int, int]:
    """Two instructions of one block."""
    block = random.choice([b for b in known.kernel.blocks if b.end - b.start > 1])
    first, second = random.sample(range(block.start, block.end), 2)
    return first, second


def test_what_must_stay_behind_stays_behind(known: Original) -> None:
    for random, state in states(known, 1):
        rows = [(*two(random, known), int(Rule.MEMORY_ORDER), 0) for _ in range(60)]
        rows += [(first, first, int(Rule.MEMORY_ORDER), 0) for first, *_ in rows[:3]]
        bad = [
            later
            for earlier, later, _, _ in rows
            if not state.position[earlier] < state.position[later]
        ]
        other = with_rows(known, order=rows)
        found = check_order(other, state)
        assert bad and offsets(found, "MEMORY_ORDER") == reported(known, bad)


def test_pairs_in_a_block_keep_their_cycles(known: Original) -> None:
    for random, state in states(known, 2):
        times, rows, bad = issue_times(state), [], []
        for _ in range(60):
            earlier, later = two(random, known)
            distance = times[state.position[later]] - times[state.position[earlier]]
            need = max(1, distance + random.randrange(-1, 3))
            rows.append((earlier, later, need, int(Rule.LATENCY), 4))
            bad += [later] * (distance < need)
        found = check_gaps(with_rows(known, gaps=rows, edge_gaps=np.zeros((0, 4))), state)
        assert bad and offsets(found, "LATENCY") == reported(known, bad)


def test_instructions_keep_their_cycles_to_the_edges_of_their_block(known: Original) -> None:
    for random, state in states(known, 3):
        times, rows, bad = issue_times(state), [], []
        for _ in range(60):
            index = random.randrange(known.count)
            number = int(known.block_of[index])
            block, at_end = known.kernel.blocks[number], random.randrange(2)
            now = times[state.position[index]]
            distance = times[block.end] - now if at_end else now - times[block.start]
            need = distance + random.randrange(-1, 3)
            rows.append((index, number, need, at_end))
            bad += [index] * (distance < need)
        found = check_gaps(with_rows(known, gaps=np.zeros((0, 5)), edge_gaps=rows), state)
        assert bad and offsets(found, "BLOCK_EDGE") == reported(known, bad)


def test_results_of_other_blocks_are_used_no_cycle_too_early(known: Original) -> None:
    for random, state in states(known, 4):
        times, rows, bad = issue_times(state), [], []
        for _ in range(60):
            producer, consumer = (random.randrange(known.count) for _ in range(2))
            home, away = (known.kernel.blocks[known.block_of[i]] for i in (producer, consumer))
            tail = times[home.end] - times[state.position[producer]]
            head = times[state.position[consumer]] - times[away.start]
            need = tail + head + random.randrange(-1, 3)
            rows.append((producer, consumer, need))
            bad += [consumer] * (tail + head < need)
        lasting, short = [], []
        for block in known.kernel.blocks:
            duration = times[block.end] - times[block.start]
            need = duration + random.randrange(-1, 3)
            lasting.append((block.index, need))
            short += [block.start] * (duration < need)
        found = check_across(with_rows(known, cross=rows, durations=lasting), state)
        assert bad and offsets(found, "LATENCY_ACROSS_BLOCKS") == reported(known, bad)
        assert offsets(found, "BLOCK_DURATION") == reported(known, short)


def test_a_wait_stands_behind_its_setter_and_not_behind_its_user(known: Original) -> None:
    """The user's own wait counts, the setter's own does not; at an edge the block's do."""
    for random, state in states(known, 5):
        rows, bad = [], []
        waits = [
            int(wait) | int(known.depbar[index])
            for wait, index in zip(state.fields.wait, state.order, strict=True)
        ]
        for _ in range(80):
            holder, consumer = two(random, known)
            block = known.kernel.blocks[known.block_of[holder]]
            floor, until = int(state.position[holder]), int(state.position[consumer])
            if random.random() < 0.3:
                holder, floor = BLOCK_EDGE, block.start - 1
            if random.random() < 0.3:
                consumer, until = BLOCK_EDGE, block.end - 1
            board = random.randrange(SCOREBOARDS)
            rows.append((holder, consumer, board, block.index, int(Rule.WAIT)))
            between = waits[floor + 1 : until + 1]
            if not any(wait >> board & 1 for wait in between):
                bad.append(consumer if consumer != BLOCK_EDGE else block.end - 1)
        found = check_waits(with_rows(known, waits=rows), state)
        assert len(bad) not in (0, len(rows))
        assert offsets(found, "WAIT") == reported(known, bad)


def test_neighbours_in_a_pipe_are_as_far_apart_as_compilers_put_them(known: Original) -> None:
    """The one before it in its pipe, at whatever place; pairs as compiled are left alone."""
    rules, table, crowded = SpacingRules(known), known.table, 0
    items, before = known.kernel.instructions, issue_times(_as_compiled(known))
    for _, state in states(known, 6):
        times, last, bad = issue_times(state), {}, []
        for place, index in enumerate(state.order.tolist()):
            pipe = items[index].effects.info.pipe
            if pipe in SPACED and pipe in last:
                distance = times[place] - times[last[pipe]]
                other = int(state.order[last[pipe]])
                need = table.spacing(items[other], items[index])
                apart = before[index] - before[other]
                neighbours = other < index and not any(
                    items[i].effects.info.pipe is pipe for i in range(other + 1, index)
                )
                if neighbours and apart < need:
                    need = apart
                bad += [index] * (distance < need)
            last[pipe] = place
        assert offsets(rules.check(state), "PIPE_SPACING") == reported(known, bad)
        crowded += len(bad)
    assert crowded
    assert rules.check(_as_compiled(known)) == []


def _as_compiled(known: Original) -> State:
    identity = np.arange(known.count)
    return State(identity, identity, known.before)


@pytest.mark.parametrize("calm", [False, True])
def test_control_fields_are_defined_and_no_less_than_their_opcode_takes(known, calm) -> None:
    rules = ControlRules(known)
    for _, state in states(known, 7, calm):
        want: dict[str, list[int]] = {
            name: [] for name in ("L1", "L2", "own", "wait", "sync", "sb")
        }
        now, was = state.fields, known.before
        for place, index in enumerate(state.order.tolist()):
            stall, stay, reuse = (int(getattr(now, n)[place]) for n in ("stall", "stay", "reuse"))
            changed = (stall, stay, reuse) != (was.stall[index], was.stay[index], was.reuse[index])
            undefined = changed and stay and not 1 <= stall <= MAX_STALL_STAYING
            want["L1"] += [index] * bool(undefined)
            want["L2"] += [index] * bool(changed and reuse and not stay)
            want["own"] += [index] * int(stall < known.own[index])
            wait = int(now.wait[place])
            want["wait"] += [index] * int(known.no_wait[index] and wait != was.wait[index])
            want["sync"] += [index] * bool(int(known.sync_wait[index]) & ~wait)
            for name in ("write_sb", "read_sb"):
                moved = getattr(now, name)[place] != getattr(was, name)[index]
                want["sb"] += [index] * int(moved)
        found = rules.check(state)
        for rule, name in (
            ("CONTROL_L1", "L1"), ("CONTROL_L2", "L2"), ("OWN_STALL", "own"),
            ("CONTROL_WAIT", "wait"), ("WAIT", "sync"), ("SCOREBOARD", "sb"),
        ):  # fmt: skip
            assert offsets(found, rule) == reported(known, want[name]), rule
        pinned = [i for i in known.pinned.tolist() if state.position[i] != i]
        assert offsets(found, "PINNED") == reported(known, pinned)


@pytest.mark.parametrize("calm", [False, True])
def test_an_increment_shows_two_cycles_after_its_issue(known, calm) -> None:
    rules, seen = ControlRules(known), 0
    for _, state in states(known, 8, calm):
        bad, now = [], state.fields
        for place in range(known.count - 1):
            numbers = {int(now.write_sb[place]), int(now.read_sb[place])} - {NO_BOARD}
            awaited = any(int(now.wait[place + 1]) >> number & 1 for number in numbers)
            pair = int(state.order[place]), int(state.order[place + 1])
            if awaited and now.stall[place] < 2 and not _early(known, *pair):
                bad.append(pair[0])
        assert offsets(rules.check(state), "SCOREBOARD_VISIBLE") == reported(known, bad)
        seen += len(bad)
    assert seen
    assert not [row for row in rules.check(_as_compiled(known)) if row.rule == "SCOREBOARD_VISIBLE"]


def _early(known: Original, first: int, second: int) -> bool:
    """Whether the compiler itself did that with this pair."""
    was = known.before
    numbers = {int(was.write_sb[first]), int(was.read_sb[first])} - {NO_BOARD}
    awaited = any(int(was.wait[second]) >> number & 1 for number in numbers)
    return second == first + 1 and awaited and was.stall[first] < 2


def test_a_kept_operand_is_read_again_before_a_word_of_it_changes(known: Original) -> None:
    """The slot's next read of the same bank takes it or displaces it: up to the writer, the writer
    included, or up to the block's end."""
    stale = 0
    for random, state in states(known, 9):
        now, rows = state.fields.reuse, []
        for _ in range(80):
            holder, writer = two(random, known)
            register, slot = random.randrange(20), random.randrange(3)
            writer = random.choice((writer, writer, holder, BLOCK_EDGE))
            rows.append((holder, slot, register, writer))
        other = with_rows(known, reuse=rows)
        rules = ControlRules(other)
        rules._reuse_rows = other.constraints.reuse  # none of them is the compiler's
        bad = []
        for holder, slot, register, writer in rows:
            block = known.kernel.blocks[known.block_of[holder]]
            place = int(state.position[holder])
            until = block.end - 1 if writer == BLOCK_EDGE else int(state.position[writer])
            read = any(
                known.sources[state.order[p], slot] != NO_REGISTER
                and known.sources[state.order[p], slot] % 2 == register % 2
                for p in range(place + 1, until + 1)
            )
            bad += [holder] * (int(now[place]) >> slot & 1 == 1 and not read)
        # Reuse of what is no source, or of an opcode that takes none, is the next test's.
        found = [row for row in rules.check(state) if row.reason.startswith("kept R")]
        assert offsets(found, "REUSE") == reported(known, bad)
        stale += len(bad)
    assert stale


def test_only_register_sources_of_opcodes_that_keep_them_are_kept_anew(known: Original) -> None:
    rules, added = ControlRules(known), 0
    for _, state in states(known, 10, calm=True):
        none, opcode = [], []
        for place, index in enumerate(state.order.tolist()):
            now, was = int(state.fields.reuse[place]), int(known.before.reuse[index])
            for slot in range(3):
                new = now >> slot & 1 and not was >> slot & 1
                none += [index] * bool(new and known.sources[index, slot] == NO_REGISTER)
            opcode += [index] * bool(now and not was and not known.keeps[index])
        found = rules.check(state)
        for text, want in (("no register source", none), ("takes none", opcode)):
            mine = [row for row in found if row.reason.endswith(text)]
            assert offsets(mine, "REUSE") == reported(known, want)
            added += len(want)
    assert added
    assert rules.check(_as_compiled(known)) == []
