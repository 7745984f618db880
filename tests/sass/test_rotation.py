"""Instructions over a back edge: what `rotate` makes is proved, planted faults are not.

The faults change the words or the claim by hand; the proof must name a rule for each.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from warploom.errors import InputError
from warploom.sass.decode import nvinfo
from warploom.sass.decode.control import Control
from warploom.sass.decode.cubin import Cubin
from warploom.sass.decode.kernel import decode
from warploom.sass.flow.aliasing import AliasMode
from warploom.sass.flow.loops import natural_loops
from warploom.sass.rewrites.rotation import rotate as rotate_module
from warploom.sass.rewrites.rotation.rotate import Rotation, rotate, rotations
from warploom.sass.rewrites.rotation.verify import verify_rotation
from warploom.search.lineage import Base, Step, pipelined, prove, read_steps, write_steps

GEMM = "prebuilt_gemm_leaky_relu_sm90a"
PLAIN, PLAIN_KERNEL = "cuda_mma_gemm_sm90a", "mma_gemm"
Word = tuple[int, int]


class Rotated:
    """One rotation of one kernel: before, after and the claim."""

    def __init__(self, before: Cubin) -> None:
        self.before = before
        self.kernel = decode(before, PLAIN_KERNEL)
        self.name = self.kernel.name
        longest = rotations(self.kernel)[0]
        for count in range(longest.count, 0, -1):
            self.claim = replace(longest, count=count)
            self.after = rotate(before, self.name, self.claim)
            if not verify_rotation(before, self.after, self.name, self.claim):
                break
        self.words: list[Word] = list(self.after.kernel(self.name).words)

    def rules(self, words: list[Word] | None = None, claim: Rotation | None = None) -> set[str]:
        """The rules the proof names for other words or another claim."""
        code = self.after.kernel(self.name)
        image = self.after if words is None else self.after.replace(code, words)
        findings = verify_rotation(self.before, image, self.name, claim or self.claim)
        return {finding.rule for finding in findings}

    def changed(self, index: int, word: Word) -> list[Word]:
        """The rotated words with one replaced."""
        words = list(self.words)
        words[index] = word
        return words


@pytest.fixture(scope="module")
def rotated(cubin_of: Callable[[str], Cubin]) -> Rotated:
    """A matrix product with a loop's first instructions in the pass before."""
    return Rotated(cubin_of(PLAIN))


def test_a_rotation_is_proved(rotated: Rotated) -> None:
    assert rotated.rules() == set()
    assert len(rotated.after.data) == len(rotated.before.data)
    # The copy before the loop and the one at its end are the instructions that moved.
    claim, words = rotated.claim, rotated.before.kernel(rotated.name).words
    moved = words[claim.header : claim.header + claim.count]
    assert tuple(rotated.words[claim.header : claim.header + claim.count]) == moved
    assert tuple(rotated.words[claim.latch : claim.latch + claim.count]) == moved
    # The loop begins after the copy and is as long as it was.
    after = decode(rotated.after, PLAIN_KERNEL)
    headers = {after.blocks[loop.header].start for loop in natural_loops(after)}
    assert claim.header + claim.count in headers
    assert claim.header not in headers


def test_another_claim_than_what_was_done_is_refused(rotated: Rotated) -> None:
    claim = rotated.claim
    for other in (
        replace(claim, count=claim.count + 1),
        replace(claim, header=claim.header + 1),
        replace(claim, header=claim.header - 1),
        replace(claim, latch=claim.latch - 1),
        replace(claim, count=0),
        replace(claim, header=0),
    ):
        assert rotated.rules(claim=other), other


def test_the_original_itself_is_no_rotation(rotated: Rotated) -> None:
    assert "INSTRUCTION" in rotated.rules(list(rotated.before.kernel(rotated.name).words))


def test_a_missing_or_different_copy_is_found(rotated: Rotated) -> None:
    claim, nop = rotated.claim, rotated.before.kernel(rotated.name).words[-1]
    for place in (claim.header, claim.latch):
        low, high = rotated.words[place]
        assert "INSTRUCTION" in rotated.rules(rotated.changed(place, nop))
        assert "INSTRUCTION" in rotated.rules(rotated.changed(place, (low ^ 1 << 16, high)))


def test_a_branch_that_was_not_aimed_again_is_found(rotated: Rotated) -> None:
    before = rotated.before.kernel(rotated.name).words
    claim = rotated.claim
    forward = [
        item
        for item in rotated.kernel.instructions[: claim.header]
        if item.base == "BRA" and (item.low, item.high) != rotated.words[item.index]
    ]
    for item in forward[:1]:
        assert "BRANCH" in rotated.rules(rotated.changed(item.index, before[item.index]))
    latch = claim.latch + claim.count
    low, high = rotated.words[latch]
    steps = 4 * claim.count  # the displacement counts words of four bytes
    field = ((low >> 34) | (high & (1 << 18) - 1) << 30) << 8 | low >> 16 & 0xFF
    back = field - steps
    whole = low | high << 64
    whole = whole & ~(((1 << 48) - 1) << 34 | 0xFF << 16)
    whole |= (back >> 8 & (1 << 48) - 1) << 34 | (back & 0xFF) << 16
    word = (whole & (1 << 64) - 1, whole >> 64)
    assert "BRANCH" in rotated.rules(rotated.changed(latch, word))


def test_control_fields_only_grow_where_the_branch_was(rotated: Rotated) -> None:
    claim = rotated.claim
    low, high = rotated.words[claim.latch - 1]
    now = Control.decode(high)
    tight = replace(now, stall=1, reuse=0)
    assert "CONTROL_FIELD" in rotated.rules(
        rotated.changed(claim.latch - 1, (low, tight.encode(high)))
    )
    low, high = rotated.words[claim.header + claim.count]
    now = Control.decode(high)
    other = replace(now, stall=now.stall % 11 + 1, reuse=0)
    assert "CONTROL_FIELD" in rotated.rules(
        rotated.changed(claim.header + claim.count, (low, other.encode(high)))
    )


def test_tables_that_do_not_follow_the_code_are_found(rotated: Rotated) -> None:
    code = rotated.after.kernel(rotated.name)
    stale = rotated.after.replace(code, list(code.words), rotated.kernel.info)
    assert stale.data != rotated.after.data
    findings = verify_rotation(rotated.before, stale, rotated.name, rotated.claim)
    assert {finding.rule for finding in findings} == {"NV_INFO"}
    assert any(record.attribute == 0x1C for record in nvinfo.records(rotated.kernel.info))


def forced(monkeypatch: pytest.MonkeyPatch, before: Cubin, count: int) -> tuple[Cubin, Rotation]:
    """A rotation that the mover would refuse, made all the same."""
    kernel = decode(before, PLAIN_KERNEL)
    loop = rotations(kernel)[2]
    claim = Rotation(loop.header, count, loop.latch)
    monkeypatch.setattr(rotate_module, "_may_cross", lambda *_: True)
    return rotate(before, kernel.name, claim), claim


def test_loads_barriers_and_values_read_later_may_not_cross(
    rotated: Rotated, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = rotations(rotated.kernel)[2]
    found: set[str] = set()
    for count in (loop.count + 1, 4):
        with monkeypatch.context() as patch:
            image, claim = forced(patch, rotated.before, count)
        rules = {f.rule for f in verify_rotation(rotated.before, image, rotated.name, claim)}
        assert rules, count
        found |= rules
    assert found & {"SIDE_EFFECT", "DATAFLOW"}


def test_what_is_read_after_the_loop_may_not_cross(
    cubin_of: Callable[[str], Cubin], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = cubin_of("cuda_reduce_sm90a")
    kernel = decode(before, "reduce_sum")
    monkeypatch.setattr(rotate_module, "_may_cross", lambda *_: True)
    for loop in rotations(kernel):
        claim = Rotation(loop.header, 1, loop.latch)
        image = rotate(before, kernel.name, claim)
        item = kernel.instructions[loop.header]
        rules = {f.rule for f in verify_rotation(before, image, kernel.name, claim)}
        monkeypatch.undo()
        assert bool(rules) or rotate_module.may_cross(kernel, item.index, loop.latch)


def test_the_mover_refuses_what_is_no_loop(rotated: Rotated) -> None:
    with pytest.raises(InputError, match="may cross a back edge"):
        rotate(rotated.before, rotated.name, Rotation(1, 1, 5))
    with pytest.raises(InputError, match="may cross a back edge"):
        rotate(rotated.before, rotated.name, replace(rotated.claim, count=rotated.claim.count + 40))


@pytest.mark.parametrize("seed", [0])
def test_a_pipelined_base_carries_a_lineage_that_is_proved(
    seed: int, cubin_of: Callable[[str], Cubin], tmp_path: object
) -> None:
    from pathlib import Path  # noqa: PLC0415

    original = cubin_of(GEMM)
    name = next(iter(original.kernels))
    base = pipelined(Base(original), name, AliasMode.TRITON, random.Random(seed))
    assert base.steps
    assert base.steps[-1].kind == "rotation"
    folder = Path(str(tmp_path))
    write_steps(folder, base.steps)
    steps = read_steps(folder)
    assert steps == base.steps
    assert prove(original, name, steps, AliasMode.TRITON) == []
    # A step left out, or one of a kind nobody knows, is no lineage.
    if len(steps) > 1:
        assert prove(original, name, steps[1:], AliasMode.TRITON)
    assert prove(original, name, (Step("magic", original.data, ""),), AliasMode.TRITON)
    wrong = Step("registers", base.cubin.data, "a rotation called a renaming")
    assert prove(original, name, (wrong,), AliasMode.TRITON)
    (folder / "lineage.json").write_text("[{}]")
    with pytest.raises(InputError, match="no lineage"):
        read_steps(folder)
