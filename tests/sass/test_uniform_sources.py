"""TMA stores and mbarrier operations read uniform registers late: a read scoreboard guards them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from warploom.sass.decode.cubin import Cubin
from warploom.sass.edit.edit import Editor
from warploom.sass.edit.rederive import BlockState
from warploom.sass.flow.aliasing import AliasMode
from warploom.sass.flow.scoreboard import protected_sources
from warploom.sass.rules.verify import Verifier

KERNEL = "triton_tma_gemm_sm90"
WAITS = {"WAIT", "INHERITED_WAIT", "WAIT_BEFORE_EXIT"}


def test_the_wait_before_an_overwritten_address_may_not_be_dropped(
    cubin_of: Callable[[str], Cubin],
) -> None:
    cubin = cubin_of(KERNEL)
    verifier = Verifier(cubin, None, AliasMode.TRITON)
    editor = Editor(cubin, None, AliasMode.TRITON)
    refused = 0
    for block in editor.kernel.blocks:
        items = editor.kernel.instructions[block.start : block.end]
        for place, item in enumerate(items):
            board = item.control.read_sb
            sources = protected_sources(item)
            if board > 5 or not sources or min(sources) < 256:
                continue
            for later in range(place + 1, len(items)):
                other = items[later]
                if other.control.wait >> board & 1:
                    break
            else:
                continue
            overwritten = any(
                access.resource in sources
                for following in items[later:]
                for access in following.effects.writes
            )
            if not overwritten or items[later].base in ("BAR", "SYNCS", "UTMASTG", "UTMALDG"):
                continue
            before = (editor.states[block.index], editor.controls(block.index))
            controls = list(before[1])
            controls[later] = replace(other.control, wait=other.control.wait & ~(1 << board))
            wishes = dict(zip(before[0].order, controls, strict=True))
            editor.restore(block.index, BlockState(before[0].order, wishes, True))
            verdict = verifier.check_words(editor.words(), editor.info())
            assert not verdict.legal and WAITS & {finding.rule for finding in verdict.findings}
            editor.restore(block.index, *before)
            refused += 1
    assert refused >= 2
