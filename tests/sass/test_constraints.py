"""The rows of a kernel's constraints, derived a second time from what each kind of row says.

In loops over all pairs of instructions and all paths of blocks, where the derivation walks each
block once and takes shortest ways.
"""

from __future__ import annotations

import lzma
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from warploom.sass.decode.cubin import parse
from warploom.sass.decode.kernel import Block, Instruction, Kernel, decode
from warploom.sass.decode.operand_slots import slot_words
from warploom.sass.decode.resources import Access
from warploom.sass.flow.aliasing import AliasMode, is_sync, memory_accesses, must_keep_order
from warploom.sass.flow.dependence import Dependence, Hazard
from warploom.sass.flow.distances import BETWEEN_SYNCS, key_of
from warploom.sass.flow.latency import LONGEST, LatencyTable, table_for
from warploom.sass.flow.scoreboard import counting_waits
from warploom.sass.rules import boundaries
from warploom.sass.rules.boundaries import across_blocks, pairs_across
from warploom.sass.rules.constraints import derive
from warploom.sass.rules.rules import BLOCK_EDGE, Constraints, Rule

OWN = Path(__file__).parent / "data" / "own" / "gemm-128x256.cubin.xz"


@pytest.fixture(scope="module")
def kernels(kernels_of: Callable[[str], list[Kernel]]) -> list[Kernel]:
    names = ("cuda_reduce_sm90a", "cuda_mma_gemm_sm90a", "cuda_cluster_sm90a")
    own = decode(parse(lzma.decompress(OWN.read_bytes()), "own"))
    return [*(kernel for name in names for kernel in kernels_of(name)), own]


@pytest.fixture(scope="module")
def derived(kernels: list[Kernel]) -> list[tuple[Kernel, Constraints]]:
    return [(kernel, derive(kernel, AliasMode.STRICT)) for kernel in kernels]


def pairs(kernel: Kernel) -> Iterator[tuple[Block, Instruction, Instruction]]:
    for block in kernel.blocks:
        items = kernel.instructions[block.start : block.end]
        for place, later in enumerate(items):
            yield from ((block, earlier, later) for earlier in items[:place])


def closure(kernel: Kernel, rows: list[tuple[int, int]]) -> list[int]:
    """Of each instruction those that stay behind it by some chain of rows, as bits."""
    after: dict[int, list[int]] = {}
    for earlier, later in rows:
        after.setdefault(earlier, []).append(later)
    behind = [0] * len(kernel.instructions)
    for index in reversed(range(len(kernel.instructions))):
        for later in after.get(index, ()):
            assert later > index
            behind[index] |= 1 << later | behind[later]
    return behind


def rows_of(constraints: Constraints, *rules: Rule) -> list[tuple[int, int]]:
    kept = {int(rule) for rule in rules}
    return [(int(a), int(b)) for a, b, rule, _ in constraints.order if int(rule) in kept]


def registers(item: Instruction) -> tuple[set[int], set[int]]:
    reads = {access.resource for access in item.effects.reads}
    return reads, {access.resource for access in item.effects.writes}


def test_uses_of_a_register_keep_their_order(derived) -> None:
    """Two that touch a register, one of them writing it; and nothing else is asked for."""
    for kernel, constraints in derived:
        rows = rows_of(constraints, Rule.REGISTER_ORDER)
        behind, wanted = closure(kernel, rows), set[tuple[int, int]]()
        for _, earlier, later in pairs(kernel):
            (reads, writes), (also_reads, also_writes) = registers(earlier), registers(later)
            if writes & (also_reads | also_writes) or reads & also_writes:
                wanted.add((earlier.index, later.index))
                assert behind[earlier.index] >> later.index & 1, (str(earlier), str(later))
        assert set(rows) <= wanted and wanted


def test_memory_keeps_the_order_that_aliasing_asks_for(kernels: list[Kernel]) -> None:
    asked = 0
    for mode in AliasMode:
        for kernel in kernels:
            rows = set(rows_of(derive(kernel, mode), Rule.MEMORY_ORDER))
            for block in kernel.blocks:
                items = kernel.instructions[block.start : block.end]
                if mode is AliasMode.STRICT:
                    found = memory_accesses(items, {})
                    kept = {
                        (one.index, two.index)
                        for one in found
                        for two in found
                        if one.index < two.index and must_keep_order(one, two, mode)
                    }
                    assert kept == {row for row in rows if block.start <= row[0] < block.end}
                    asked += len(kept)
    assert asked > 50


def test_nothing_crosses_what_synchronises(derived) -> None:
    met = 0
    for kernel, constraints in derived:
        behind = closure(kernel, rows_of(constraints, Rule.SYNC_ORDER))
        for _, earlier, later in pairs(kernel):
            syncs = is_sync(earlier), is_sync(later)
            moves = (
                earlier.effects.info.name in BETWEEN_SYNCS,
                later.effects.info.name in BETWEEN_SYNCS,
            )
            if all(syncs) or (syncs[0] and moves[1]) or (syncs[1] and moves[0]):
                assert behind[earlier.index] >> later.index & 1, (str(earlier), str(later))
                met += 1
    assert met > 50


def test_what_touches_registers_stays_on_its_side_of_a_change_of_the_pool(derived) -> None:
    """Of what stands in the blocks of such a change, each made to read or write a register."""
    kernel, met = derived[-1][0], 0
    for change in (item for item in kernel.instructions if item.base == "USETMAXREG"):
        block = kernel.blocks[kernel.block_of[change.index]]
        for index in range(block.start, block.end):
            item = kernel.instructions[index]
            if item is change or item.base in ("BRA", "EXIT"):
                continue
            access = (Access(41, "a"),)
            for effects in (
                replace(item.effects, reads=access, writes=()),
                replace(item.effects, reads=(), writes=access),
            ):
                items = list(kernel.instructions)
                items[index] = replace(item, effects=effects)
                other = derive(replace(kernel, instructions=tuple(items)), AliasMode.STRICT)
                row = min(index, change.index), max(index, change.index)
                assert row in rows_of(other, Rule.SYNC_ORDER), (str(item), str(change))
                met += 1
    assert met


def test_setters_that_a_wait_counts_keep_their_order(kernels: list[Kernel]) -> None:
    """In every block three instructions are made setters of a scoreboard that a DEPBAR counts."""
    met = 0
    for kernel in kernels:
        counted = {counting_waits(item) for item in kernel.instructions} - {None}
        items = list(kernel.instructions)
        for number in counted:
            for block in kernel.blocks:
                plain = [i for i in items[block.start : block.end] if i.control.write_sb == 7]
                for item, name in zip(
                    plain[::2], ("write_sb", "read_sb", "write_sb"), strict=False
                ):
                    made = replace(item.control, **{name: number})
                    items[item.index] = replace(item, control=made)
            other = replace(kernel, instructions=tuple(items))
            rows = rows_of(derive(other, AliasMode.STRICT), Rule.SCOREBOARD_ORDER)
            behind = closure(other, rows)
            for _, earlier, later in pairs(other):
                told = [
                    number in (item.control.write_sb, item.control.read_sb)
                    or counting_waits(item) == number
                    for item in (earlier, later)
                ]
                if all(told):
                    assert behind[earlier.index] >> later.index & 1, (str(earlier), str(later))
                    met += 1
    assert met


def distance(kernel: Kernel, first: int, second: int) -> int:
    return sum(item.control.stall for item in kernel.instructions[first:second])


def hazards(earlier: Instruction, later: Instruction) -> Iterator[Dependence]:
    for hazard, ones, others in (
        (Hazard.RAW, earlier.effects.writes, later.effects.reads),
        (Hazard.WAW, earlier.effects.writes, later.effects.writes),
        (Hazard.WAR, earlier.effects.reads, later.effects.writes),
    ):
        for one in ones:
            for other in (access for access in others if access.resource == one.resource):
                indices = earlier.index, later.index
                yield Dependence(*indices, hazard, one.resource, one.slot, other.slot)


def test_results_of_a_block_are_used_no_sooner_than_seen(derived) -> None:
    """Of neighbours in a register's history: as many cycles as the table has, or as compiled."""
    table, met = table_for(90), 0
    for kernel, constraints in derived:
        gaps = {
            (int(a), int(b), int(resource)): int(need)
            for a, b, need, rule, resource in constraints.gaps
            if rule == Rule.LATENCY
        }
        most: dict[tuple[int, int, int], int] = {}
        for block, earlier, later in pairs(kernel):
            if earlier.line.guard or later.line.guard:
                continue
            for row in hazards(earlier, later):
                first = earlier.index + (row.hazard is not Hazard.WAR)
                between = range(first, later.index)
                written = any(row.resource in registers(kernel.instructions[i])[1] for i in between)
                key = key_of(row, earlier, later)
                if key is None or written or earlier.index < block.start:
                    continue
                need = table.gap(key, distance(kernel, earlier.index, later.index))
                place = earlier.index, later.index, row.resource
                most[place] = max(most.get(place, 0), need)
        for place, need in most.items():
            found = [n for (a, b, r), n in gaps.items() if (a, b) == place[:2]]
            names = [str(kernel.instructions[index]) for index in place[:2]]
            assert need == 0 or max(found, default=0) >= need, names
            met += need > 1
    assert met > 100


def test_memory_keeps_its_cycles_to_what_synchronises(kernels: list[Kernel]) -> None:
    """The last sync before an access or a sync, and the accesses since: with a table that knows
    nothing, the cycles that they have."""
    met, table = 0, replace(table_for(90), gaps={})
    for kernel in kernels:
        gaps = {
            (int(a), int(b)): int(need)
            for a, b, need, rule, _ in derive(kernel, AliasMode.STRICT, table).gaps
            if rule == Rule.SYNC_DISTANCE
        }
        for _, earlier, later in pairs(kernel):
            items = kernel.instructions[earlier.index + 1 : later.index]
            syncs = is_sync(earlier), is_sync(later)
            moves = [item.effects.info.name in BETWEEN_SYNCS for item in (earlier, later)]
            if any(is_sync(item) for item in items):
                continue
            if (syncs[0] and (syncs[1] or moves[1])) or (syncs[1] and moves[0]):
                now = distance(kernel, earlier.index, later.index)
                assert gaps[earlier.index, later.index] == min(now, LONGEST)
                met += 1
    assert met > 20


def test_kept_operands_are_read_before_each_word_of_them_changes(derived) -> None:
    for kernel, constraints in derived:
        want: set[tuple[int, int, int, int]] = set()
        for block in kernel.blocks:
            for item in kernel.instructions[block.start : block.end]:
                for slot, words in slot_words(item).items():
                    for word in words:
                        writers = (
                            other.index
                            for other in kernel.instructions[item.index : block.end]
                            if word in registers(other)[1]
                        )
                        writer = next(writers, BLOCK_EDGE)
                        want.add((item.index, slot, words[0], writer))
        assert {tuple(row) for row in constraints.reuse.tolist()} == want


# ---- over block edges


def leasts(kernel: Kernel, table: LatencyTable) -> list[int]:
    """Of each block the sum of its instructions' least stalls."""
    return [
        sum(table.own_stall(item) for item in kernel.instructions[b.start : b.end])
        for b in kernel.blocks
    ]


def paths(
    kernel: Kernel, block: Block, least: list[int], longest: int
) -> Iterator[tuple[int, ...]]:
    """Ways from a block's end: blocks in between (each at most twice) and the one they lead to."""
    open_: list[tuple[int, ...]] = [(number,) for number in block.successors]
    while open_:
        way = open_.pop()
        if sum(least[number] for number in way[:-1]) >= longest:
            continue
        yield way
        if way.count(way[-1]) < 2:
            open_ += [(*way, number) for number in kernel.blocks[way[-1]].successors]


Pairs = dict[tuple[int, int, Hazard, int], int]


def seen_across(
    kernel: Kernel, table: LatencyTable, lengths: list[int], longest: int = LONGEST
) -> Pairs:
    """The least distance of every dependence over a block edge, where blocks in between last so
    long, of all paths whose blocks may last less than the longest latency."""
    found: Pairs = {}
    for block in kernel.blocks:
        for way in paths(kernel, block, leasts(kernel, table), longest):
            inner = [kernel.blocks[number] for number in way[:-1]]
            last = kernel.blocks[way[-1]]
            passed = {
                resource
                for one in inner
                for item in kernel.instructions[one.start : one.end]
                for resource in registers(item)[1]
            }
            between = sum(lengths[number] for number in way[:-1])
            for earlier in kernel.instructions[block.start : block.end]:
                tail = distance(kernel, earlier.index, block.end)
                gone = {
                    resource
                    for item in kernel.instructions[earlier.index + 1 : block.end]
                    for resource in registers(item)[1]
                }
                fresh = set.union(*registers(earlier)) - passed - gone
                overwritten: set[int] = set()
                for later in kernel.instructions[last.start : last.end] if fresh else ():
                    for row in hazards(earlier, later):
                        own = row.hazard is Hazard.WAR and row.resource in registers(earlier)[1]
                        if row.resource not in fresh - overwritten or own:
                            continue
                        if row.hazard is Hazard.WAR and tail >= longest:
                            continue
                        place = (earlier.index, later.index, row.hazard, row.resource)
                        now = tail + between + distance(kernel, last.start, later.index)
                        found[place] = min(found.get(place, now), now)
                    overwritten |= registers(later)[1]
    return found


@pytest.fixture(scope="module")
def small(kernels: list[Kernel]) -> list[Kernel]:
    return [kernel for kernel in kernels if len(kernel.blocks) < 16][:4]


@pytest.mark.parametrize("longest", [5, 12, LONGEST])
def test_dependences_over_block_edges_are_those_of_all_paths(
    small: list[Kernel], longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boundaries, "LONGEST", longest)
    table, met = table_for(90), 0
    for kernel in small:
        found: Pairs = {}
        for row, now in pairs_across(kernel, table):
            place = (row.earlier, row.later, row.hazard, row.resource)
            found[place] = min(found.get(place, now), now)
        want = seen_across(kernel, table, leasts(kernel, table), longest)
        assert found == want
        met += len(want)
    assert met > 10


def test_results_of_another_block_are_used_no_sooner_than_seen(small: list[Kernel]) -> None:
    """With a table that knows nothing every pair keeps its cycles, or the longest latency: at its
    two ends, in blocks that keep their duration, and in others at their least."""
    for kernel in small:
        table = replace(table_for(90), gaps={})
        constraints = derive(kernel, AliasMode.STRICT, table)
        rows = {(int(a), int(b)): int(n) for a, b, n in constraints.cross}
        lasting = [distance(kernel, block.start, block.end) for block in kernel.blocks]
        kept = leasts(kernel, table)
        for number, cycles in constraints.durations.tolist():
            assert cycles == lasting[number]
            kept[number] = cycles
        compiled = seen_across(kernel, table, lasting)
        for (earlier, later, hazard, resource), now in seen_across(kernel, table, kept).items():
            items = kernel.instructions[earlier], kernel.instructions[later]
            covered = [
                row
                for row in hazards(*items)
                if (row.hazard, row.resource) == (hazard, resource) and key_of(row, *items)
            ]
            if not covered:
                continue
            block = kernel.blocks[kernel.block_of[earlier]]
            ends = distance(kernel, earlier, block.end)
            ends += distance(kernel, kernel.blocks[kernel.block_of[later]].start, later)
            need = min(LONGEST, compiled[earlier, later, hazard, resource])
            assert rows.get((earlier, later), 1) + now - ends >= need
        assert rows
        for earlier, later in rows:  # nothing is asked of what a scoreboard covers
            items = kernel.instructions[earlier], kernel.instructions[later]
            assert any(key_of(row, *items) for row in hazards(*items)), items
        little = replace(table, gaps=dict.fromkeys(table_for(90).gaps, 1))
        assert len(derive(kernel, AliasMode.STRICT, little).cross) < len(rows)


def test_blocks_between_may_last_as_they_like_where_the_ends_alone_are_far_enough(
    kernels_of: Callable[[str], list[Kernel]],
) -> None:
    """Of each kind of pair the closest one, with blocks in between counted at their least, has just
    what the table asks: no block has to last as it did. Where it asks a cycle more some have to."""
    asked = 0
    for kernel in kernels_of("cuda_reduce_sm90a"):
        table, least = table_for(kernel.sm), dict[str, int]()
        for row, distance in pairs_across(kernel, table):
            key = key_of(row, kernel.instructions[row.earlier], kernel.instructions[row.later])
            if key is not None:
                least[key] = min(distance, least.get(key, distance))
        for more in (0, 1):
            gaps = {key: distance + more for key, distance in least.items()}
            durations = list[tuple[int, int]]()
            across_blocks([], durations, kernel, replace(table, gaps=gaps))
            assert more or not durations
            asked += bool(durations)
    assert asked
