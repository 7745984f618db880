"""What is legal is accepted: every original, and thousands of random edits, each with a verdict."""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from warploom.errors import InputError
from warploom.sass.decode.cubin import Cubin, load
from warploom.sass.edit.edit import Editor
from warploom.sass.flow.aliasing import AliasMode
from warploom.sass.rules.verify import Verifier, verify

Verifiers = Callable[[Cubin, str, AliasMode], Verifier]
STARTS = (
    "triton_softmax_1x4096_w8_s1",
    "triton_softmax_4x4096_w8_s3",
    "triton_layernorm_1x4096_w8_s1",
    "triton_rmsnorm_2x4096_w8_s2",
    "triton_skinny_gemm_32x256_w4_s4",
    "triton_batched_gemm_128x128x64_w8_s4",
    "triton_attention_128x64_w8_s3",
    "cuda_mma_gemm",
    "cuda_sgemm",
    "cuda_several",
    "cuda_doubles",
)
EDITS = 80  # of one cubin, each of another instruction
LEAST = 1250


@pytest.mark.parametrize("mode", AliasMode)
def test_every_original_is_legal(
    mode: AliasMode, corpus: list[Path], verifier_of: Verifiers
) -> None:
    count = 0
    # Where pointers of different parameters may be taken for distinct, only Triton's are.
    for path in corpus if mode is AliasMode.STRICT else [p for p in corpus if "triton" in p.name]:
        cubin = load(path)
        for name in cubin.kernels:
            verdict = verifier_of(cubin, name, mode).check_file(cubin)
            assert verdict.legal, f"{path.name} {name}: {verdict}"
            assert verdict.mode is mode
            count += 1
    assert count >= (60 if mode is AliasMode.STRICT else 28)


def edit_and_check(
    cubin: Cubin, name: str, edits: int, seed: int, verifier: Verifier
) -> tuple[Counter[str], list[float]]:
    """An edit of each of `edits` instructions, one after the other; a refused one is taken back."""
    editor = Editor(cubin, name, verifier.mode)
    rng = random.Random(seed)
    free = [item.index for item in editor.kernel.instructions if not item.pinned]
    tally: Counter[str] = Counter()
    seconds: list[float] = []
    for index in rng.sample(free, min(edits, len(free))):
        block, here = editor.position(index)
        before = editor.states[block], editor.controls(block)
        try:
            if rng.random() < 0.2:
                wish = editor.tightened if rng.random() < 0.5 else editor.toggled_stay
                editor.wish(index, wish(index))
            else:
                first, last = editor.window(index, 24)
                if first == last:
                    continue
                to = rng.randint(first, last - 1)
                editor.move(index, to if to < here else to + 1)
        except InputError:
            tally["not derived"] += 1
            editor.restore(block, *before)
            continue
        words = editor.words()
        info = editor.info()
        began = time.perf_counter()
        verdict = verifier.check_words(words, info)
        seconds.append(time.perf_counter() - began)
        if verdict.legal:
            tally["accepted"] += 1
        else:
            tally["refused"] += 1
            tally[verdict.findings[0].rule] += 1
            editor.restore(block, *before)
    # What was accepted in memory is accepted from the file's bytes too.
    if tally["accepted"]:
        assert verifier.check_file(editor.cubin()).legal
    return tally, seconds


def test_random_edits_are_accepted(
    cubin_of: Callable[[str], Cubin], verifier_of: Verifiers
) -> None:
    total: Counter[str] = Counter()
    seconds: list[float] = []
    accepted_by_sm: Counter[int] = Counter()
    for number, start in enumerate(STARTS):
        for sm in (80, 90):
            cubin = cubin_of(f"{start}_sm{sm}")
            mode = (AliasMode.STRICT, AliasMode.TRITON)[number % 2]
            for name in cubin.kernels:
                share = EDITS // len(cubin.kernels)
                verifier = verifier_of(cubin, name, mode)
                tally, times = edit_and_check(cubin, name, share, number, verifier)
                total.update(tally)
                seconds.extend(times)
                accepted_by_sm[sm] += tally["accepted"]
    median = statistics.median(seconds)
    verdicts = total["accepted"] + total["refused"]
    print(f"{dict(total)}, median verdict {median * 1e3:.2f} ms, by sm {dict(accepted_by_sm)}")
    assert total["accepted"] >= LEAST
    assert total["accepted"] >= 0.9 * verdicts
    assert min(accepted_by_sm.values()) >= 0.4 * LEAST
    assert median < 2e-3 * 3, "a verdict takes 2 ms; thrice that on a busy machine is too slow"


def test_both_alias_modes_are_named_and_differ(cubin_of: Callable[[str], Cubin]) -> None:
    cubin = cubin_of("triton_layernorm_1x4096_w8_s1_sm90")
    strict = Verifier(cubin, mode=AliasMode.STRICT)
    assert "aliasing strict" in str(strict.check_file(cubin))
    triton = Verifier(cubin, mode=AliasMode.TRITON)
    assert "aliasing triton" in str(triton.check_file(cubin))
    assert len(triton.constraints.order) <= len(strict.constraints.order)


def test_another_architecture_is_bad_input(cubin_of: Callable[[str], Cubin]) -> None:
    one = cubin_of("triton_softmax_1x4096_w8_s1_sm90")
    other = cubin_of("triton_softmax_1x4096_w8_s1_sm80")
    with pytest.raises(InputError, match="is for sm_80, the original is for sm_90a"):
        verify(one, other)
