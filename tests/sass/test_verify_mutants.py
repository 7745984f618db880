"""The verifier rejects every candidate that is wrong by construction, and for the right reason, and
accepts what is right by construction, in both alias modes.

The table of mutators is `mutators.MUTATORS`: what each breaks is its docstring, the rules that must
be among the findings stand beside it. A few edits of every kind are drawn on every cubin below; all
of the corpus and many more edits are `python -m bench.adversarial`. Run pytest with `-rP` to read
the counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from tests.sass.adversarial import Tally, judge_legal, judge_wrong
from tests.sass.facts import Code, Mutator, closest_neighbours
from tests.sass.legal_edits import LEGAL
from tests.sass.mutators import MUTATORS

from warploom.sass.decode.cubin import Cubin
from warploom.sass.decode.kernel import Kernel
from warploom.sass.flow.aliasing import AliasMode
from warploom.sass.rules.verify import Verifier

CUBINS = (
    "cuda_calls_sm90a",
    "cuda_cluster_sm90a",
    "cuda_doubles_sm90a",
    "cuda_fp8_wgmma_sm90a",
    "cuda_mma_gemm_sm80",
    "cuda_reduce_sm80",
    "cuda_several_sm90a",
    "cuda_wgmma_gemm_sm90a",
    "prebuilt_attention_sm90a",
    "prebuilt_skinny_gemm_sm80",
    "prebuilt_tma_gemm_sm90a",
    "triton_attention_128x64_w8_s3_sm80",
    "triton_attention_128x64_w8_s3_sm90",
    "triton_batched_gemm_128x128x64_w8_s4_sm90",
    "triton_gemm_leaky_relu_128x256x64x8_w8_s3_sm80",
    "triton_layernorm_1x4096_w8_s1_sm80",
    "triton_rmsnorm_2x4096_w8_s2_sm90",
    "triton_scan_sm80",
    "triton_softmax_4x4096_w8_s3_sm80",
    "triton_tma_gemm_sm90",
)
EACH = 2  # wrong edits of one kind in one kernel
LEAST = 2
MOST_REFUSED = 0.1  # of the right edits

Judged = tuple[Code, Mapping[AliasMode, Verifier]]


@pytest.fixture(scope="module")
def judged(
    cubin_of: Callable[[str], Cubin],
    kernels_of: Callable[[str], list[Kernel]],
    verifier_of: Callable[[Cubin, str, AliasMode], Verifier],
) -> list[Judged]:
    """The facts of every kernel, and its verifiers."""
    rows = [(cubin_of(name), kernel) for name in CUBINS for kernel in kernels_of(name)]
    closest = {
        sm: closest_neighbours([kernel for cubin, kernel in rows if cubin.sm == sm])
        for sm in (80, 90)
    }
    return [
        (
            Code(cubin, kernel, closest[cubin.sm]),
            {mode: verifier_of(cubin, kernel.name, mode) for mode in AliasMode},
        )
        for cubin, kernel in rows
    ]


@pytest.mark.parametrize("mutator", MUTATORS, ids=lambda mutator: mutator.__name__)
def test_rejects(mutator: Mutator, judged: list[Judged]) -> None:
    tally = Tally()
    for code, verifiers in judged:
        judge_wrong(tally, code, verifiers, mutator, EACH)
    count = tally.edits[mutator.__name__]
    print(f"{mutator.__name__}: {count} mutants, {len(tally.accepted)} accepted")
    assert not tally.accepted, "\n".join(tally.accepted[:10])
    assert not tally.other, "\n".join(tally.other[:10])
    assert count >= LEAST


def test_accepts_what_is_right_by_construction(judged: list[Judged]) -> None:
    tally = Tally()
    for code, verifiers in judged:
        for mutator in LEGAL:
            judge_legal(tally, code, verifiers, mutator, EACH)
    print(f"{tally.legal.total()} right edits, refused: {dict(tally.refused)}")
    assert all(tally.legal[mutator.__name__] for mutator in LEGAL)
    assert tally.refused.total() <= MOST_REFUSED * tally.legal.total(), "\n".join(tally.refusals)


def test_there_are_forty_kinds() -> None:
    assert len(MUTATORS) >= 40
