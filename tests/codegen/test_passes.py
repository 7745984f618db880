"""Every pass by itself: the text of a block program in, the text of the next one out."""

from inspect import getdoc
from pathlib import Path
from textwrap import dedent, indent

import pytest
from tests.codegen.tiny_program import tiny_case, tiny_program

from warploom.codegen.ir.place import place
from warploom.codegen.ir.text import block_text, parse_block
from warploom.codegen.oracle.localise import localise
from warploom.codegen.passes.lower import PASSES, START, lower
from warploom.errors import InputError

LOADER = """\
role load: 4 warps, 24 registers
  straight
    Fill load.0 into q
"""
RINGS = """\
ring q x1: load.0 (4096 B a slot)
ring k x2: load.2 (1024 B a slot)
ring v x2: load.8 (1024 B a slot)
"""


def text_of(groups, launch="", pingpong=False, loader=LOADER):
    """A block program of the tiny program with these lines in its groups, one group each."""
    lines = [f'block program tiny, schedule "tiny"\n  launch {{"split": "rows"{launch}}}\n']
    lines += ["  pingpong\n"] if pingpong else []
    lines += [indent(RINGS, "  "), indent(dedent(loader), "  ")]
    for part, group in enumerate(groups):
        head = f"  role compute{part}: 4 warps, 240 registers, part {part}\n"
        lines += [head, indent(dedent(group), "    ")]
    return "".join(lines)


def after(name, *groups, **head):
    """The lines of the groups after a pass; what stands before them stays as it was."""
    text = text_of(groups, **head)
    found = block_text(PASSES[name](parse_block(text, tiny_program())))
    roles = found.split("  role ")[2:]
    return tuple(dedent(role.partition("\n")[2]) for role in roles)


def lines(text):
    return dedent(text).lstrip("\n")


def test_the_producer_acquires_and_publishes_around_its_copies():
    loader = """\
        role load: 4 warps, 24 registers
          straight
            Fill load.0 into q
          loop i, every 8 cycles
            at 3: Fill load.8 into v
            at 1: Fill load.2 into k
        """
    text = text_of(["straight\n  Run fill.1\n"], loader=loader)
    found = block_text(PASSES["loader_slots"](parse_block(text, tiny_program())))
    want = """\
        role load: 4 warps, 24 registers
          straight
            Acquire q
            Fill load.0 into q
            Publish q
          loop i, every 8 cycles
            at 1: Acquire k
            at 1: Fill load.2 into k
            at 1: Publish k
            at 3: Acquire v
            at 3: Fill load.8 into v
            at 3: Publish v
        """
    assert found == text_of(["straight\n  Run fill.1\n"], loader=want)


def test_a_slot_is_waited_for_before_its_first_reader_in_time():
    loop = """
        loop i, every 8 cycles
          at 0: Issue mma.3
          at 9: Issue mma.9
          at 4: Release k
        """
    want = """
        loop i, every 8 cycles
          at 0: Wait k
          at 0: Issue mma.3
          at 9: Wait v
          at 9: Issue mma.9
          at 4: Release k
        """
    assert after("waits", lines(loop)) == (lines(want),)


STORES = """
    loop i, every 8 cycles
      at 0: Issue mma.3
    straight
      Run store.10
    """


def test_a_task_holds_its_slots_from_the_first_reader_to_the_last():
    want = """
        straight
          Wait q
        loop i, every 8 cycles
          at 0: Issue mma.3
        straight
          Release q
        straight
          Run store.10
        """
    assert after("task_slots", lines(STORES)) == (lines(want),)


def test_a_slot_that_stores_go_through_is_held_until_they_are_done():
    want = """
        straight
          Wait q
        loop i, every 8 cycles
          at 0: Issue mma.3
        straight
          Run store.10
        straight
          Release q
        """
    found = after("task_slots", lines(STORES), launch=', "store_over": "q_t"')
    assert found == (lines(want),)


def test_matmuls_that_follow_each_other_are_one_turn():
    # In an interval of 8: group 0 at 0, group 1 at 2, 3, group 0 at 7 (a run over the end).
    one = "loop i, every 8 cycles\n  at 0: Issue mma.3\n  at 7: Issue mma.9\n"
    two = "loop i, every 8 cycles\n  at 2: Issue mma.3\n  at 11: Issue mma.9\n"
    assert after("number_turns", one, two, pingpong=True) == (
        "loop i, every 8 cycles\n  at 0: Issue mma.3, turn 1\n  at 7: Issue mma.9, turn 1\n",
        "loop i, every 8 cycles\n  at 2: Issue mma.3, turn 0\n  at 11: Issue mma.9, turn 0\n",
    )
    assert after("number_turns", one, two) == (one, two)
    idle = "loop i, every 8 cycles\n  at 2: Run cast.7\n"
    with pytest.raises(InputError, match=r"comes in the order \[0\].*needs each group once"):
        after("number_turns", one, idle, pingpong=True)


def test_a_loop_starts_iterations_ahead_as_its_times_say():
    loop = """
        loop i, every 8 cycles
          at 0: Wait k
          at 0: Issue mma.3
          at 3: Run mul.5
          at 5: Run cast.7
          at 9: Wait v
          at 9: Issue mma.9
          at 4: Release k
          at 10: Release v
        """
    want = """
        loop i, 1 started ahead
          prologue 0
            Wait k
            Issue mma.3
            Run mul.5
            Release k
            Run cast.7
          steady
            Wait k
            Issue mma.3
            Wait v (iteration -1)
            Issue mma.9 (iteration -1)
            Release v (iteration -1)
            Run mul.5
            Release k
            Run cast.7
          epilogue 0
            Wait v (iteration -1)
            Issue mma.9 (iteration -1)
            Release v (iteration -1)
          plain
            Wait k
            Issue mma.3
            Run mul.5
            Run cast.7
            Wait v
            Issue mma.9
            Release k
            Release v
        """
    assert after("pipeline", lines(loop)) == (lines(want),)
    with pytest.raises(InputError, match=r"runs mma.9 of the same iteration before mul.5"):
        after("pipeline", lines(loop).replace("at 3: Run mul.5", "at 12: Run mul.5"))
    with pytest.raises(InputError, match="ring k is released before its last reader is started"):
        after("pipeline", lines(loop).replace("at 4: Release k", "at -1: Release k"))
    with pytest.raises(InputError, match="ring k has depth 2, but 2 of its slots are still held"):
        after("pipeline", lines(loop).replace("at 4: Release k", "at 20: Release k"))


def test_the_slot_of_a_task_goes_before_the_matmuls_that_end_it():
    loop = """
        loop i, 1 started ahead
          prologue 0
            Issue mma.3
          steady
            Issue mma.3
            Issue mma.9 (iteration -1)
          epilogue 0
            Issue mma.9 (iteration -1)
        straight
          Release q
        """
    want = """
        loop i, 1 started ahead
          prologue 0
            Issue mma.3
          steady
            Issue mma.3
            Issue mma.9 (iteration -1)
          epilogue 0
            Release q
            Issue mma.9 (iteration -1)
          none
            Release q
        """
    assert after("early_release", lines(loop)) == (lines(loop),)
    assert after("early_release", lines(loop), launch=', "early_release": true') == (lines(want),)
    last = lines(loop).replace("mma.9", "mma.8").replace("mma.3", "mma.9").replace("mma.8", "mma.3")
    assert after("early_release", last, launch=', "early_release": true') == (last,)


def test_a_turn_ends_with_the_first_step_that_is_no_part_of_it():
    loop = """
        loop i, 0 started ahead
          steady
            Wait k
            Issue mma.3, turn 0
            Wait v
            Run mul.5
            Issue mma.9, turn 0
            Run cast.7
            Issue mma.3, turn 2
        """
    want = """
        loop i, 0 started ahead
          steady
            Wait k
            TurnWait
            Issue mma.3
            Wait v
            Run mul.5
            Issue mma.9
            TurnPass
            Run cast.7
            TurnWait
            Issue mma.3
            TurnPass
        """
    assert after("take_turns", lines(loop), pingpong=True) == (lines(want),)
    assert after("take_turns", lines(loop)) == (lines(loop),)


def test_matmuls_are_joined_as_late_as_possible():
    loop = """
        loop i, 1 started ahead
          steady
            Issue mma.3
            Issue mma.9 (iteration -1)
            Run exp2.6
            Release k
            Run cast.7
        """
    # cast.7 writes what mma.9 reads.
    want = """
        loop i, 1 started ahead
          steady
            Issue mma.3
            Issue mma.9 (iteration -1)
            Join <= 1: product
            Run exp2.6
            Release k
            Join <= 0: acc
            Run cast.7
        """
    assert after("joins", lines(loop)) == (lines(want),)
    straight = "straight\n  Issue mma.3\n  Run fill.1\n"
    assert after("joins", straight) == (straight + "  Join <= 0: product\n",)


def test_a_group_that_is_done_takes_and_gives_back_what_others_count_on():
    loop = """
        loop i, 0 started ahead
          steady
            Wait k
            TurnWait
            Issue mma.3
            TurnPass
            Release k
        """
    skip = """\
          skip
            TurnWait
            TurnPass
            Wait k
            Release k
        """
    one = lines(loop)
    two = one + indent(dedent(skip), "  ")
    assert after("early_end", one, one, pingpong=True) == (two, two)
    assert after("early_end", one) == (one,)  # one group has all rows: it ends where the loop does


def test_the_first_matmul_of_the_next_task_moves_before_the_stores():
    group = """
        straight
          Run fill.1
        straight
          Wait q
        loop i, 1 started ahead
          prologue 0
            Wait k
            Issue mma.3
            Join <= 0: product
            Release k
            Run cast.7
          steady
            Issue mma.9 (iteration -1)
          epilogue 0
            Wait v (iteration -1)
            Issue mma.9 (iteration -1)
            Join <= 0: acc
            Release v (iteration -1)
        straight
          Run store.10
        """
    want = """
        ahead: Wait q
        ahead: Wait k
        ahead: Issue mma.3
        straight
          Run fill.1
        loop i, 1 started ahead
          prologue 0
            Release k
            Run cast.7
          steady
            Issue mma.9 (iteration -1)
          epilogue 0
            Wait v (iteration -1)
            Issue mma.9 (iteration -1)
            Ahead
            Join <= 1: acc
            Release v (iteration -1)
          none
            Ahead
        straight
          Run store.10
        straight
          Join <= 0: product
        """
    found = after("overlap_next_task", lines(group), launch=', "overlap_next_task": true')
    assert found == (lines(want),)
    assert after("overlap_next_task", lines(group)) == (lines(group),)


def test_an_op_of_a_group_is_cut_to_its_rows():
    program = tiny_program()
    placement = place(program, "rows", 2)
    matmul, store = (op for op in program.ops() if op.label in ("mma.3", "store.10"))
    assert str(localise(placement, matmul, 1)) == "product: fp32[rows=64, keys=32] = mma q_t, k_t"
    assert str(localise(placement, store, 0)) == "store acc o[(rows_tile * 128) +64, 0 +16]"
    found = str(localise(placement, store, 1))
    assert found == "store acc o[((rows_tile * 128) + 64) +64, 0 +16]"


def test_lowering_is_the_list_and_nothing_else():
    program, schedule = tiny_case(pingpong=True)
    seen = {}
    block = lower(program, schedule, seen.setdefault)
    assert list(seen) == [START, *PASSES]
    again = parse_block(block_text(seen[START]), program)
    for name, change in PASSES.items():
        again = change(again)
        assert block_text(again) == block_text(seen[name]), name
    assert again == block


def test_the_page_lists_the_passes_as_they_describe_themselves():
    page = (Path(__file__).parents[2] / "docs" / "codegen.md").read_text()
    table = page.partition("<!-- passes -->\n")[2].partition("<!-- end -->")[0]
    rows = ["| pass | what it does |", "|---|---|"]
    for name, change in PASSES.items():
        first, _, rest = getdoc(change).partition("\n\n")
        rows.append(f"| `{name}` | {first.replace(chr(10), ' ')} |")
        assert all(f"*{part}*" in rest for part in ("requires", "before -> after", "keeps")), name
    assert table == "\n".join(rows) + "\n"
