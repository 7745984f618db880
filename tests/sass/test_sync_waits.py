"""A barrier, fence or arrival keeps every wait it had: no register shows what it waits for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from warploom.sass.decode.cubin import Cubin
from warploom.sass.edit.edit import Editor
from warploom.sass.edit.rederive import BlockState
from warploom.sass.flow.aliasing import AliasMode, is_sync
from warploom.sass.rules.verify import Verifier

KERNEL = "triton_attention_128x64_w8_s3_sm90"


def test_no_wait_of_a_sync_may_be_dropped(cubin_of: Callable[[str], Cubin]) -> None:
    cubin = cubin_of(KERNEL)
    verifier = Verifier(cubin, None, AliasMode.TRITON)
    editor = Editor(cubin, None, AliasMode.TRITON)
    dropped = 0
    for block in editor.kernel.blocks:
        items = editor.kernel.instructions[block.start : block.end]
        before = (editor.states[block.index], editor.controls(block.index))
        for place, item in enumerate(items):
            for board in item.control.waits() if is_sync(item) else ():
                controls = list(before[1])
                controls[place] = replace(item.control, wait=item.control.wait & ~(1 << board))
                order = before[0].order
                wishes = dict(zip(order, controls, strict=True))
                editor.restore(block.index, BlockState(order, wishes, True))
                words = editor.words()
                verdict = verifier.check_words(words, editor.info())
                assert not verdict.legal, f"{item} lost its wait for SB{board}"
                editor.restore(block.index, *before)
                dropped += 1
    assert dropped >= 7
