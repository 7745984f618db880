"""`sass diff`: alignment, moves, control edits, and two compilers' versions of one kernel."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from warploom.errors import InputError
from warploom.report.sass_html import diff_html, kinds_of_moves
from warploom.report.sass_tables import diff_lines
from warploom.sass.decode.control import Control
from warploom.sass.decode.cubin import Cubin
from warploom.sass.decode.kernel import Kernel, decode
from warploom.sass.flow.diff import Change, align, diff

ATTENTION = "triton_attention_128x64_w8_s3_sm90"
CubinOf = Callable[[str], Cubin]


def longest_common(left: list[int], right: list[int]) -> int:
    """Length of a longest common subsequence, the textbook way."""
    table = [[0] * (len(right) + 1) for _ in range(len(left) + 1)]
    for i, j in itertools.product(range(len(left)), range(len(right))):
        table[i + 1][j + 1] = (
            table[i][j] + 1 if left[i] == right[j] else max(table[i][j + 1], table[i + 1][j])
        )
    return table[-1][-1]


@pytest.mark.parametrize("seed", range(60))
def test_alignment_is_a_longest_common_subsequence(seed: int) -> None:
    draw = random.Random(seed)
    left = [draw.randrange(4) for _ in range(draw.randrange(25))]
    right = [draw.randrange(4) for _ in range(draw.randrange(25))]
    pairs = align(left, right)
    assert all(left[i] == right[j] for i, j in pairs)
    assert all(a[0] < b[0] and a[1] < b[1] for a, b in itertools.pairwise(pairs))
    assert len(pairs) == longest_common(left, right)


def with_words(cubin: Cubin, kernel: Kernel, words: list[tuple[int, int]]) -> Cubin:
    """The cubin with the kernel's words replaced."""
    return cubin.replace(kernel.code, words)


def test_a_file_and_itself_are_the_same(cubin_of: CubinOf) -> None:
    cubin = cubin_of("cuda_several_sm90a")
    found = diff(cubin, cubin)
    assert len(found) == 5
    assert all(one.same and one.reordering for one in found)
    assert "the code is the same" in next(iter(diff_lines(found[0]))).plain


def test_one_move_is_one_row(cubin_of: CubinOf) -> None:
    cubin = cubin_of(ATTENTION)
    kernel = decode(cubin)
    words = list(kernel.code.words)
    words.insert(57, words.pop(40))
    one = diff(cubin, with_words(cubin, kernel, words))[0]
    moved = [row for row in one.rows if row.change is Change.MOVED]
    assert one.reordering
    assert not one.same
    assert [(row.before, row.after) for row in moved] == [(40, 57)]
    assert one.counts["same"] == len(kernel.instructions) - 1
    text = "\n".join(line.plain for line in diff_lines(one))
    assert "moved down 17" in text
    assert "1 moved" in text


def test_a_control_edit_is_told_field_by_field(cubin_of: CubinOf) -> None:
    cubin = cubin_of(ATTENTION)
    kernel = decode(cubin)
    words = list(kernel.code.words)
    low, high = words[30]
    control = replace(Control.decode(high), stall=9, stay=True, wait=5, reuse=0)
    words[30] = (low, control.encode(high))
    one = diff(cubin, with_words(cubin, kernel, words))[0]
    edited = [row for row in one.rows if row.control]
    assert one.reordering
    assert len(edited) == 1
    assert edited[0].before == edited[0].after == 30
    assert {name: new for name, _, new in edited[0].control}["stall"] == 9
    assert one.to_json()["rows"][0]["control"]["stall"][1] == 9


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("prebuilt_attention_sm90a", ATTENTION),
        ("prebuilt_feed_forward_sm90a", "triton_feed_forward_128x128x64_w8_s3_sm90"),
        ("triton_scan_sm80", "triton_scan_sm90"),
    ],
)
def test_two_compilers_versions_align(before: str, after: str, cubin_of: CubinOf) -> None:
    """Every instruction of either side stands in exactly one row, in order."""
    one = diff(cubin_of(before), cubin_of(after))[0]
    assert not one.reordering
    left = [row.before for row in one.rows if row.before is not None]
    right = [row.after for row in one.rows if row.after is not None]
    assert sorted(left) == list(range(len(one.before.instructions)))
    assert right == list(range(len(one.after.instructions)))
    assert one.counts["same"] >= 100
    for row in one.rows:
        if row.change is Change.CHANGED and row.before is not None and row.after is not None:
            old, new = one.before.instructions[row.before], one.after.instructions[row.after]
            assert old.line.opcode == new.line.opcode


def test_html_is_one_file(cubin_of: CubinOf) -> None:
    before, after = cubin_of("prebuilt_attention_sm90a"), cubin_of(ATTENTION)
    page = diff_html(before, after, diff(before, after))
    assert page.startswith("<!doctype html>")
    assert 'src="' not in page
    assert "href=" not in page
    assert 'class="moved' in page


def test_changes_are_counted_by_kind_of_instruction(cubin_of: CubinOf) -> None:
    """Every row that is not the same is in one place of the table."""
    before, after = cubin_of("prebuilt_attention_sm90a"), cubin_of(ATTENTION)
    one = diff(before, after)[0]
    kinds = kinds_of_moves(one)
    assert sum(kind.up + kind.down + kind.others for kind in kinds) == sum(
        row.change is not Change.SAME for row in one.rows
    )
    assert sum(kind.edits for kind in kinds) == one.control_edits
    moved = [(row.before, row.after) for row in one.rows if row.change is Change.MOVED]
    assert max(kind.farthest for kind in kinds) == max(abs(b - a) for a, b in moved)
    page = diff_html(before, after, [one])
    assert all(f"<tr><td>{kind.name}</td><td>{kind.up}</td>" in page for kind in kinds)
    assert kinds_of_moves(diff(after, after)[0]) == []


def test_nothing_in_common_is_an_input_error(cubin_of: CubinOf) -> None:
    with pytest.raises(InputError, match="no kernel in common"):
        diff(cubin_of("cuda_several_sm90a"), cubin_of("cuda_calls_sm90a"))
