"""The text of a block program has all of it: it parses back to the same one."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.codegen.programs import attention_case, gemm_case
from tests.codegen.random_program import random_case
from tests.codegen.tiny_program import tiny_case, tiny_program
from tests.kernels.test_machine_code import kernels

from warploom.codegen.cuda.emit import emit
from warploom.codegen.ir.text import block_text, parse_block
from warploom.codegen.passes.lower import lower
from warploom.errors import InputError


def reads_back(program, schedule):
    """After every pass."""

    def check(name, block):
        again = parse_block(block_text(block), program)
        assert again == block, name
        assert block_text(again) == block_text(block)

    lower(program, schedule, check)


def test_every_kernel_that_a_measured_shape_gets_reads_back():
    for program, schedule, _ in kernels().values():
        block = lower(program, schedule)
        assert parse_block(block_text(block), program) == block


@settings(max_examples=20, deadline=None)
@given(
    depth=st.integers(1, 5), cluster=st.sampled_from([1, 2]), bias=st.booleans(),
    a=st.sampled_from(["mk", "km"]), tile=st.sampled_from([(128, 64, 16), (128, 32, 32)]),
)  # fmt: skip
def test_any_gemm_reads_back_after_every_pass(depth, cluster, bias, a, tile):
    case = gemm_case(64, 64, 64, depth, cluster, int(depth > 1), bias=bias, a=a, tile=tile)
    reads_back(*case[:2])


@settings(max_examples=20, deadline=None)
@given(
    pingpong=st.booleans(), groups=st.sampled_from([1, 2, 3]), depth=st.integers(2, 3),
    window=st.sampled_from([None, 33]), apart=st.booleans(),
)  # fmt: skip
def test_any_attention_reads_back_after_every_pass(pingpong, groups, depth, window, apart):
    case = attention_case(
        64, 64, depth, pingpong, groups, causal=True, window=window,
        split_mask_loop=apart and window is None,
    )  # fmt: skip
    reads_back(*case[:2])


@pytest.mark.parametrize("seed", range(8))
def test_random_programs_read_back_after_every_pass(seed):
    reads_back(*random_case(seed)[:2])


@pytest.mark.parametrize(
    "options",
    [
        {"pingpong": True, "early_release": True},
        {"overlap_next_task": True, "task_rings": {"q_t": 2}, "reverse": ("rows_tile",)},
        {"store_panels": 1, "tile_scheduler": "dynamic", "resident": 2},
    ],
)
def test_options_of_the_launch_plan_read_back_and_the_code_is_the_same(options):
    program, schedule = tiny_case(**options)
    reads_back(program, schedule)
    block = lower(program, schedule)
    assert emit(parse_block(block_text(block), program)).text == emit(block).text


def test_empty_lines_and_spaces_do_not_count():
    program, schedule = tiny_case(True)
    block = lower(program, schedule)
    loose = re.sub(r"(?m)^ *", "", block_text(block)).replace("\n", "\n\n")
    assert parse_block(loose, program) == block


WRONG = [
    (r"block program tiny,", "block program other,", "of other, but the tile program is tiny"),
    (r'schedule "tiny"', "schedule tiny", "line 1: .*expected block program"),
    (r"(?s).*", "", "no line says which program"),
    (r'"split": "rows"', '"split": rows', "line 2: .*no launch plan"),
    (r'"split": "rows"', '"divide": "rows"', "line 2: .*no launch plan"),
    (r'"split": "rows"', '"split": "pages"', "split axis 'pages' is no axis of a register tile"),
    (r"ring k x2: load.2", "ring k x2: load.99", "line 4: .*has no op load.99"),
    (r"ring k x2: load.2", "ring k x2: fill.1", "fill.1 loads nothing into shared memory"),
    (r"1024 B a slot", "1000 B a slot", "a slot of k has 1024 B"),
    (r"4 warps, ", "", "line 6: .*expected role"),
    (r"loop i, 0", "loop j, 0", r"the program has no loop j; it has \['i'\]"),
    (r"0 started ahead", "started", "expected loop"),
    (r"      steady\n", "      plainly\n", "expected"),
    (r"      steady\n", "      steadily\n", "no block of the loop has begun"),
    (r"Issue mma.3", "Begin mma.3", "no step is called Begin"),
    (r"Issue mma.3", "Issue", "expected"),
    (r"Fill load.2 into k", "Fill load.2", "no step is called Fill"),
    (r"Run fill.1", "Run fill", "has no op fill"),
    (r"Join <= 0", "Join <= all", "expected Join"),
    (
        r"(    straight\n)(      Run fill.1)",
        r"    ahead: Run fill.1\n\1\2",
        "only waits and a matmul",
    ),
]


@pytest.mark.parametrize(("old", "new", "message"), WRONG)
def test_a_text_that_is_wrong_is_refused_with_its_line(old, new, message):
    program, schedule = tiny_case()
    text = block_text(lower(program, schedule))
    wrong = re.sub(old, new, text, count=1)
    assert wrong != text
    with pytest.raises(InputError, match=message):
        parse_block(wrong, program)


def test_a_step_that_belongs_to_no_iteration_has_no_time():
    text = """
        block program tiny, schedule "tiny"
        launch {"split": "rows"}
        role load: 4 warps, 24 registers
        role compute0: 4 warps, 240 registers, part 0
        loop i, every 8 cycles
        at 0: TurnWait
    """
    with pytest.raises(InputError, match=r"line 7: .*belongs to no iteration"):
        parse_block(text, tiny_program())
