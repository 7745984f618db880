"""The verifier rejects every candidate that is wrong by construction, and for the right reason.

The table of mutators is `mutators.MUTATORS`: what each breaks is its docstring, the rules that must
be among the findings stand beside it. Every mutator runs over all cubins below, a few mutants a
cubin spread over the kernel; run pytest with `-rP` to read the counts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.sass.mutators import MUTATORS, Code, Mutator, closest_neighbours

from warploom.sass.decode.cubin import Cubin, parse
from warploom.sass.decode.kernel import Kernel
from warploom.sass.flow.aliasing import AliasMode
from warploom.sass.rules.verify import Verifier

pytestmark = pytest.mark.usefixtures("disassembled_once")

CUBINS = (
    "cuda_calls_sm80",
    "cuda_calls_sm90a",
    "cuda_cluster_sm90a",
    "cuda_doubles_sm90a",
    "cuda_fp8_wgmma_sm90a",
    "cuda_mma_gemm_sm80",
    "cuda_mma_gemm_sm90a",
    "cuda_reduce_sm80",
    "cuda_several_sm90a",
    "cuda_sgemm_sm80",
    "cuda_sgemm_sm90a",
    "cuda_wgmma_gemm_sm90a",
    "prebuilt_attention_sm90a",
    "prebuilt_gemm_leaky_relu_sm90a",
    "prebuilt_skinny_gemm_sm80",
    "prebuilt_softmax_sm90a",
    "prebuilt_tma_gemm_sm90a",
    "triton_attention_128x64_w8_s3_sm80",
    "triton_attention_128x64_w8_s3_sm90",
    "triton_batched_gemm_128x128x64_w8_s4_sm80",
    "triton_batched_gemm_128x128x64_w8_s4_sm90",
    "triton_gemm_leaky_relu_128x128x64x8_w4_s4_sm80",
    "triton_layernorm_1x4096_w8_s1_sm80",
    "triton_layernorm_1x4096_w8_s1_sm90",
    "triton_rmsnorm_2x4096_w8_s2_sm90",
    "triton_scan_sm80",
    "triton_skinny_gemm_32x256_w4_s4_sm90",
    "triton_softmax_4x4096_w8_s3_sm80",
    "triton_tma_gemm_sm90",
)
EACH = 4  # mutants of one mutator in one kernel
LEAST = 4


@pytest.fixture(scope="module")
def codes(
    cubin_of: Callable[[str], Cubin], kernels_of: Callable[[str], list[Kernel]]
) -> list[Code]:
    """The facts of every kernel."""
    rows = [(cubin_of(name), kernel) for name in CUBINS for kernel in kernels_of(name)]
    closest = {
        sm: closest_neighbours([kernel for cubin, kernel in rows if cubin.sm == sm])
        for sm in (80, 90)
    }
    return [Code(cubin, kernel, closest[cubin.sm]) for cubin, kernel in rows]


def spread(rows: list, count: int) -> list:
    """`count` of the rows, evenly spread."""
    if len(rows) <= count:
        return rows
    return [rows[place * len(rows) // count] for place in range(count)]


@pytest.mark.parametrize("mutator", MUTATORS, ids=lambda mutator: mutator.__name__)
def test_rejects(
    mutator: Mutator,
    codes: list[Code],
    verifier_of: Callable[[Cubin, str, AliasMode], Verifier],
) -> None:
    expected = MUTATORS[mutator]
    accepted: list[str] = []
    other: list[str] = []
    count = 0
    for code in codes:
        verifier = verifier_of(code.cubin, code.kernel.name, AliasMode.STRICT)
        for mutant in spread(list(mutator(code)), EACH):
            assert mutant.data != code.cubin.data
            verdict = verifier.check_file(parse(mutant.data))
            count += 1
            if verdict.legal:
                accepted.append(f"{Path(code.cubin.origin).name} {mutant.why}")
            elif not expected & {finding.rule for finding in verdict.findings}:
                other.append(f"{Path(code.cubin.origin).name} {mutant.why}: {verdict}")
    print(f"{mutator.__name__}: {count} mutants, {len(accepted)} accepted")
    assert not accepted, "\n".join(accepted[:10])
    assert not other, "\n".join(other[:10])
    assert count >= LEAST


def test_the_suite_is_large_enough(codes: list[Code]) -> None:
    total = sum(
        len(list(itertools.islice(mutator(code), EACH))) for code in codes for mutator in MUTATORS
    )
    print(f"{total} mutants of {len(MUTATORS)} kinds over {len(CUBINS)} cubins")
    assert total >= 500
    assert len(CUBINS) >= 20
