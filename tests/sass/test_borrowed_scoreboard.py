"""A load without a read scoreboard relies on that of a later load of its pipe.

The cubins are Triton's LayerNorm on an H200: as compiled, a legal schedule, and one that swaps such
a pair of loads from one address; the last faulted on the GPU.
"""

import lzma
from pathlib import Path

from warploom.sass.decode.cubin import parse
from warploom.sass.decode.kernel import decode
from warploom.sass.flow.aliasing import AliasMode
from warploom.sass.rules.lint import lint
from warploom.sass.rules.verify import verify

DATA = Path(__file__).parent / "data" / "borrowed_scoreboard"


def cubin(name: str):
    """One of the files."""
    return parse(lzma.decompress((DATA / f"{name}.cubin.xz").read_bytes()), name)


def test_the_borrower_stays_before_the_lender():
    original = cubin("original")
    assert verify(original, original, mode=AliasMode.TRITON).legal
    assert verify(original, cubin("good"), mode=AliasMode.TRITON).legal
    verdict = verify(original, cubin("fault"), mode=AliasMode.TRITON)
    assert not verdict.legal
    assert verdict.findings[0].rule == "SCOREBOARD_ORDER"
    assert "LDG.E.128 R20" in verdict.findings[0].instruction


def test_lint_sees_the_unprotected_address_in_the_file_alone():
    count = {name: len(lint(decode(cubin(name), None))) for name in ("original", "fault")}
    assert count["fault"] > count["original"]
