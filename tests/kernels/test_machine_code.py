"""The CUDA text of the kernels that the shapes of the docs get, pinned: a refactoring changes none.

`machine_code.json` has the SHA-256 of each text without its comments (they name lines of source),
with what a launch gives it and what the compiler may do. Where a change of code is meant, write the
file anew, name the kernels that changed in the commit, and time them:

    WARPLOOM_REWRITE=1 pytest tests/kernels/test_machine_code.py
"""

import hashlib
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from warploom.autosched.plans import ADDING
from warploom.autosched.schedules import schedule_for
from warploom.codegen.cuda.emit import emit
from warploom.codegen.cuda.simt.emit import emit_simt
from warploom.codegen.ir.plan import KernelSchedule
from warploom.codegen.ir.source import CudaSource
from warploom.codegen.passes.lower import lower
from warploom.kernels.attention import combine as parts
from warploom.kernels.attention.decode import DecodeConfig, decode, decode_policy
from warploom.kernels.attention.program import AttentionConfig, attention
from warploom.kernels.attention.variants import choose_attention
from warploom.kernels.gemm.program import GemmConfig, combine, gemm
from warploom.kernels.gemm.variant import choose_gemm
from warploom.tile import BF16, E4M3, FP16, Program

PINNED = Path(__file__).with_name("machine_code.json")
REWRITE = "WARPLOOM_REWRITE"
TOKENS, WIDTH = 16384, 2048  # of attention: batch * rows, heads * head size
LENGTHS = {64: 5, 96: 4, 128: 5, 256: 4}  # by head size: so many from 1024 on, each twice the last
FP8 = GemmConfig(dtype=E4M3, out=BF16, b="nk", scales=True)
GEMM_SHAPES: dict[str, tuple[GemmConfig, str]] = {
    "plain": (
        GemmConfig(),
        "1024x1024x1024 2048x2048x2048 4096x4096x4096 8192x8192x8192 16384x16384x16384 "
        "4000x6008x3000 8200x1032x8192 5000x5000x5000 1000x20000x2000 12345x1544x3080 "
        "2048x2048x16384 16384x1024x4096 512x512x16384 256x256x8192",
    ),
    "fp8": (FP8, "4096x4096x4096 8192x8192x8192"),
    "fp8 promoted": (replace(FP8, promote=True), "4096x4096x4096 8192x8192x8192"),
    "leaky": (
        GemmConfig(dtype=FP16, out=FP16, activation="leaky_relu"),
        "2048x2048x2048 4096x4096x4096 8192x8192x8192 16384x16384x16384",
    ),
    "gelu": (GemmConfig(bias=True, activation="gelu"), "8192x8192x2048"),
    "batched": (GemmConfig(batched=True), "2048x2048x2048"),
}


def digest(source: CudaSource, allow: tuple[str, ...] = ()) -> str:
    """Of the code without comments, its parameters and blocks, and what the compiler may do."""
    lines = [re.sub(r"[ \t]*//.*", "", line) for line in source.text.splitlines()]
    code = "\n".join(line for line in lines if line)
    launch = (source.parameters, source.shared_bytes, source.threads, source.cluster, allow)
    return hashlib.sha256(f"{launch}\n{code}".encode()).hexdigest()


def kernels() -> dict[str, tuple[Program, KernelSchedule, tuple[str, ...]]]:
    """The variants that the shapes get, by kind and name: program, schedule, what ptxas may do."""
    found: dict[str, tuple[Program, KernelSchedule, tuple[str, ...]]] = {}
    for kind, (base, shapes) in GEMM_SHAPES.items():
        for shape in shapes.split():
            m, n, k = map(int, shape.split("x"))
            choice = choose_gemm(m, n, k, base, 3 if base.batched else 1, sliced=kind == "plain")
            config = choice.config(base)
            name = f"gemm {kind} {choice.name}"
            found[name] = gemm(config), choice.schedule(config), choice.allow
    for head_dim, lengths in LENGTHS.items():
        for causal in (False, True):
            base = AttentionConfig(head_dim=head_dim, causal=causal)
            for rows in (1024 << power for power in range(lengths)):
                heads = TOKENS // rows * (WIDTH // head_dim)
                choice = choose_attention(rows, base, heads=heads)
                config = choice.config(base)
                name = f"attention {head_dim} {'causal' if causal else 'full'} {choice.name}"
                found[name] = attention(config), choice.schedule(config), choice.allow
    for page, split in ((None, True), (None, False), (16, True), (64, False)):
        config = DecodeConfig(group=4, page=page, split=split)
        name = f"decode {page or 'dense'} {'parts' if split else 'whole'}"
        found[name] = (decode(config), schedule_for(decode(config), decode_policy(config)), ())
    return found


def sums() -> dict[str, CudaSource]:
    """The kernels that add up slices of a product, and that join parts of the keys."""
    found: dict[str, CudaSource] = {}
    for room in (4, 16):
        program = parts.combine(DecodeConfig(group=4), room)
        schedule = parts.combine_schedule(DecodeConfig(group=4), room)
        found[f"decode join of {room} parts"] = emit_simt(program, schedule, "sm_90a")
    for shape in GEMM_SHAPES["plain"][1].split():
        choice = choose_gemm(*map(int, shape.split("x")), GEMM_SHAPES["plain"][0], sliced=True)
        if not choice.whole:
            config = choice.config(GEMM_SHAPES["plain"][0])
            source = emit_simt(combine(config), ADDING, "sm_90a")
            found[f"gemm plain sum of {config.slices} slices"] = source
    return found


def chosen() -> dict[str, str]:
    """The digests of all these, by name."""
    found = {
        name: digest(emit(lower(program, schedule)), allow)
        for name, (program, schedule, allow) in kernels().items()
    }
    found |= {name: digest(source) for name, source in sums().items()}
    return dict(sorted(found.items()))


def test_the_code_of_the_kernels_that_the_docs_measure_is_the_pinned_one() -> None:
    found = chosen()
    if os.environ.get(REWRITE):
        PINNED.write_text(json.dumps(found, indent=1) + "\n")
        pytest.skip(f"{PINNED.name} written anew: {len(found)} kernels")
    pinned = json.loads(PINNED.read_text())
    changed = sorted(name for name in found.keys() & pinned.keys() if found[name] != pinned[name])
    assert not changed, f"their code is another: {', '.join(changed)}"
    assert found.keys() == pinned.keys(), "the shapes get other variants"


@pytest.mark.parametrize("changes", [{"store": "direct"}, {"store_panels": 1}])
def test_a_change_of_code_is_seen_and_a_comment_is_not(changes) -> None:
    choice = choose_gemm(4096, 4096, 4096)
    config = choice.config(GemmConfig())
    plain = choice.schedule(config)
    other = replace(plain, launch=plain.launch.with_options(**changes))
    source = emit(lower(gemm(config), plain))
    assert digest(source) != digest(emit(lower(gemm(config), other)))
    noted = replace(source, text=source.text.replace("{\n", "{  // a note\n"))
    assert digest(source) == digest(noted) != digest(source, ("spills",))
