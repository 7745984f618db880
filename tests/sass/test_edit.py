"""The editor: moves, undo, control edits, and the re-derivation of what the compiler chose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from warploom.errors import InputError
from warploom.sass.decode.cubin import Cubin, load, parse
from warploom.sass.edit.edit import Editor
from warploom.sass.edit.rederive import BlockState
from warploom.sass.flow.aliasing import AliasMode
from warploom.sass.rules.verify import Verifier

SOFTMAX = "triton_softmax_1x4096_w8_s1_sm90"


@pytest.fixture
def editor(cubin_of: Callable[[str], Cubin]) -> Editor:
    """An editor of a small kernel."""
    return Editor(cubin_of(SOFTMAX))


def movable(editor: Editor) -> tuple[int, int]:
    """An instruction and a place it may move to."""
    for item in editor.kernel.instructions:
        first, last = editor.window(item.index)
        _, here = editor.position(item.index)
        for to in (last, first):
            if to != here:
                return item.index, to
    raise AssertionError("nothing moves")


def rederived(editor: Editor, block: int) -> BlockState:
    """A block's original order, with wishes that say nothing new, so that it is derived afresh."""
    state = editor.states[block]
    index = state.order[0]
    # Any wish turns the short cut for untouched blocks off.
    return replace(state, kept=False, wishes={index: editor.kernel.instructions[index].control})


def test_the_original_order_derives_the_original_fields(corpus: list[Path]) -> None:
    exceptions: Counter[str] = Counter()
    total = 0
    for path in corpus:
        cubin = load(path)
        if cubin.sm >= 100:
            continue
        for name in cubin.kernels:
            editor = Editor(cubin, name)
            for block in editor.kernel.blocks:
                editor.restore(block.index, rederived(editor, block.index))
                for index, now in zip(
                    editor.states[block.index].order, editor.controls(block.index), strict=True
                ):
                    was = editor.kernel.instructions[index].control
                    total += 1
                    for field in ("stall", "stay", "write_sb", "read_sb", "wait", "reuse"):
                        exceptions[field] += getattr(now, field) != getattr(was, field)
    print(f"{total} control fields, differences: {dict(exceptions)}")
    assert total > 20_000
    # A reuse hint is dropped where no reader of the same slot follows within six instructions.
    assert exceptions.pop("reuse") <= total // 200
    # Waits and stalls we cannot tell from the rules: eight and one when this was written.
    assert exceptions.pop("wait") <= 10
    assert exceptions.pop("stall") <= 2
    assert not +exceptions


def test_an_untouched_editor_writes_the_original(corpus: list[Path]) -> None:
    for path in corpus[::7]:
        cubin = load(path)
        if cubin.sm < 100:
            for name in cubin.kernels:
                assert Editor(cubin, name).cubin().data == cubin.data


def test_move_and_undo(editor: Editor) -> None:
    index, to = movable(editor)
    block, here = editor.position(index)
    before = editor.states[block]
    assert editor.move(index, to) is before
    assert editor.position(index) == (block, to)
    assert editor.cubin().data != editor.original.data
    editor.move(index, here)
    editor.restore(block, before)
    assert editor.cubin().data == editor.original.data


def test_a_move_out_of_its_window_is_refused(editor: Editor) -> None:
    for item in editor.kernel.instructions:
        first, last = editor.window(item.index)
        block, _ = editor.position(item.index)
        if last + 1 < len(editor.states[block].order):
            with pytest.raises(InputError, match="may move to positions"):
                editor.move(item.index, last + 1)
        if first > 0:
            with pytest.raises(InputError, match="may move to positions"):
                editor.move(item.index, first - 1)
    assert editor.cubin().data == editor.original.data


def test_pinned_instructions_have_no_window(editor: Editor) -> None:
    pinned = [item.index for item in editor.kernel.instructions if item.pinned]
    assert pinned
    for index in pinned:
        _, here = editor.position(index)
        assert editor.window(index) == (here, here)


def test_reach_limits_the_window(editor: Editor) -> None:
    for item in editor.kernel.instructions:
        _, here = editor.position(item.index)
        first, last = editor.window(item.index, 2)
        assert here - 2 <= first <= here <= last <= here + 2


def test_kept_controls_travel(editor: Editor) -> None:
    index, to = movable(editor)
    editor.move(index, to, rederive=False)
    block, _ = editor.position(index)
    for number, control in zip(editor.states[block].order, editor.controls(block), strict=True):
        assert control == editor.kernel.instructions[number].control


def test_a_wish_is_raised_to_what_is_needed(
    cubin_of: Callable[[str], Cubin], verifier_of: Callable[[Cubin, str, AliasMode], Verifier]
) -> None:
    editor = Editor(cubin_of("cuda_sgemm_sm80"))
    verifier = verifier_of(editor.original, editor.kernel.name, AliasMode.STRICT)
    raised = 0
    for item in editor.kernel.instructions[:80]:
        block, _ = editor.position(item.index)
        before, controls = editor.states[block], editor.controls(block)
        wished = editor.tightened(item.index)
        editor.wish(item.index, wished)
        raised += editor.control(item.index).stall > wished.stall
        assert verifier.check_words(editor.words(), editor.info()).legal
        editor.restore(block, before, controls)
    assert raised


def test_toggling_stay_drops_reuse(editor: Editor) -> None:
    for item in editor.kernel.instructions:
        flipped = editor.toggled_stay(item.index)
        assert flipped.stay != item.control.stay
        assert flipped.stay or not flipped.reuse


def test_adopt_takes_over_another_version(cubin_of: Callable[[str], Cubin]) -> None:
    one, other = Editor(cubin_of(SOFTMAX)), Editor(cubin_of(SOFTMAX))
    one.move(*movable(one))
    other.adopt(parse(one.cubin().data).kernel().words)
    assert other.cubin().data == one.cubin().data
    assert other.signature() == one.signature()


def test_adopt_refuses_other_code(editor: Editor) -> None:
    words = list(editor.original.kernel().words)
    words[0], words[-1] = words[-1], words[0]
    with pytest.raises(InputError, match="does not hold the same instructions"):
        editor.adopt(words)


def test_reorder_needs_a_permutation(editor: Editor) -> None:
    with pytest.raises(InputError, match="not a permutation"):
        editor.reorder(0, editor.states[0].order[:-1])


def test_architectures_without_a_table_are_refused(cubin_of: Callable[[str], Cubin]) -> None:
    with pytest.raises(InputError, match="needs a latency table"):
        Editor(cubin_of("triton_tma_gemm_sm100"))
