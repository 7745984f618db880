"""Kept operands: what the verifier and the lint say of the candidates that failed on an H200."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from warploom.sass.decode.cubin import Cubin, parse
from warploom.sass.decode.kernel import decode
from warploom.sass.flow.aliasing import AliasMode
from warploom.sass.flow.diff import diff
from warploom.sass.rules.lint import lint
from warploom.sass.rules.verify import Verifier, verify

DATA = Path(__file__).parent / "data"


def member(archive: str, name: str) -> Cubin:
    """One file of an archive."""
    with tarfile.open(DATA / archive) as files:
        part = files.extractfile(name)
        assert part is not None
        return parse(part.read(), name)


@pytest.fixture(scope="module")
def layernorm() -> Verifier:
    """The verifier of the kernel they are candidates of."""
    original = member("h200_wrong/layernorm_kernel-imitated.tar.xz", "original.cubin")
    return Verifier(original, mode=AliasMode.TRITON)


@pytest.mark.parametrize(
    ("name", "rule", "reader"),
    [
        ("imitated-0-n137-wrong", "overwritten by the instruction itself", "R61, R15, R15, R60"),
        ("imitated-1-n180-wrong", "not read again in its block", "IMAD.WIDE R14, R50, 0x2, R14"),
    ],
)
def test_a_stale_operand_is_refused_and_its_reader_is_named(
    layernorm: Verifier, name: str, rule: str, reader: str
) -> None:
    candidate = member("h200_wrong/layernorm_kernel-imitated.tar.xz", f"{name}.cubin")
    (finding,) = layernorm.check_file(candidate).findings
    assert finding.rule == "REUSE"
    assert rule in finding.reason
    stale = [one for one in lint(decode(candidate)) if one.rule == "STALE_REUSE"]
    assert any(reader in one.instruction for one in stale)


def test_the_compiler_leaves_no_stale_operand(layernorm: Verifier) -> None:
    assert not [one for one in lint(layernorm.kernel) if one.rule == "STALE_REUSE"]


def test_a_wait_nobody_needs_after_the_block_is_no_reason_to_refuse() -> None:
    archive = "h200_right/feed_forward_kernel-evolve.tar.xz"
    original = member(archive, "original.cubin")
    right = member(archive, "evolve-0-right.cubin")
    verdict = verify(original, right, mode=AliasMode.TRITON)
    assert verdict.legal, str(verdict)
    # A verdict counts as a diff does.
    (found,) = diff(original, right)
    assert found.counts["moved"] == verdict.moved and found.moved > 10
    assert found.counts["control edits"] == verdict.control_edits
