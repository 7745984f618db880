"""Random legal schedules of the suite's kernels, at the configurations the searches start from."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from bench.stored_schedules import random_schedules
from warploom.sass.decode.cubin import parse
from warploom.sass.flow.aliasing import AliasMode
from warploom.search.game import Game

# The fastest configuration of each kernel on an H200 with Triton 3.6 (bench/sass_search.py).
BEST = {
    "attention": "128x64_w4_s3",
    "gemm_leaky_relu": "128x256x64x8_w8_s3",
    "batched_gemm": "128x256x64_w8_s3",
    "feed_forward": "128x128x64_w8_s3",
    "softmax": "1x4096_w8_s1",
    "layernorm": "2x4096_w8_s2",
    "rmsnorm": "1x4096_w4_s1",
    "skinny_gemm": "64x256_w4_s4",
}

# How often the loop of each runs at the suite's shapes (one loop each; `K / block_k` or rows).
TRIPS: Final = {
    "attention": 32,
    "gemm_leaky_relu": 32,
    "batched_gemm": 16,
    "feed_forward": 32,
    "softmax": 1,
    "layernorm": 2,
    "rmsnorm": 1,
    "skinny_gemm": 32,
}


def make(folder: Path, kernels: tuple[str, ...], count: int, seed: int, longest: int) -> None:
    """Write `count` schedules of each kernel to `folder`."""
    from bench.triton_suite import SUITE  # noqa: PLC0415  (needs Triton, which only this step does)
    from bench.triton_suite.offline import compile_offline  # noqa: PLC0415

    for name in kernels:
        kernel = SUITE[name]
        captured = compile_offline(kernel, kernel.config(BEST[name]))
        game = Game(parse(captured.cubin, name), captured.name, AliasMode.TRITON)
        about = {
            "launch": captured.launch.to_json(),
            "mode": AliasMode.TRITON.value,
            "seed": seed,
            "compiler": captured.compiler,
        }
        schedules = random_schedules(game, count, seed, about, longest)
        path = folder / f"{name}.xz"
        schedules.save(path)
        print(f"{name}: {len(schedules)} schedules, {path.stat().st_size} bytes")
