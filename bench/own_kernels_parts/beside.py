"""Tuned attention beside the libraries: cuDNN, FlashAttention-4, and our kernel as ptxas left it.

One process, every candidate interleaved in a random order each round, two sets of operands in turn,
a second copy of the compiled kernel as the A/A control, outputs against float64.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from bench import kernel_bench as kb
from bench.attention_baselines import baselines_of, usable
from bench.attention_cases import expected, operands
from bench.own_kernels_parts.cases import Case, Sizes
from warploom.codegen.compile.build import Built
from warploom.files import write_text_atomically
from warploom.kernels.attention.program import AttentionConfig
from warploom.runtime.kernel import Kernel
from warploom.runtime.stats import median_interval

COMPILED: Final = "warploom, as ptxas left it"
TUNED: Final = "tuned"
CONTROL: Final = "control"
BOUND: Final = 0.01
EXACT: Final = 2**30  # pairs of positions that outputs are checked on


def beside(case: Case, home: Path, tuned: bytes, raw: Path, rounds: int) -> None:
    """Time one case at its `beside` sizes; `raw` is rewritten after each."""
    torch = kb.load_torch()
    built = Built.read(home)
    kernels = {
        COMPILED: built.kernel(),
        CONTROL: built.kernel(),
        TUNED: replace(built, cubin=tuned).kernel(),
    }
    found: dict[str, Any] = {"case": case.name, **kb.environment(), "shapes": {}}
    found["compiler"] = built.resources.compiler
    for sizes in case.beside:
        row = _one(torch, case, kernels, sizes, rounds)
        found["shapes"][json.dumps(sizes)] = row
        write_text_atomically(raw, json.dumps(found) + "\n")
        ratios = {name: _ratio(row["samples"], name) for name in row["samples"] if name != TUNED}
        print(case.name, sizes["rows"], row["checks"], ratios, flush=True)


def _ratio(samples: Mapping[str, list[float]], other: str) -> str:
    middle, low, high = median_interval(samples[TUNED], samples[other])
    return f"{middle:.4f} [{low:.4f}, {high:.4f}]"


def _one(
    torch: Any, case: Case, kernels: Mapping[str, Kernel], sizes: Sizes, rounds: int
) -> dict[str, Any]:
    config = AttentionConfig(head_dim=sizes["d"], causal="causal" in case.name)
    shape = (sizes["batch"], sizes["heads"], sizes["rows"], sizes["keys"])
    data = [operands(torch, config, *shape, seed) for seed in range(2)]
    turn = [0]

    def pick() -> dict[str, Any]:
        turn[0] ^= 1
        return data[turn[0]]

    def call(kernel: Kernel) -> Any:
        def ours() -> None:
            v = pick()
            stream = torch.cuda.current_stream().cuda_stream
            kernel({x: v[x] for x in config.arrays}, stream=stream)

        return ours

    candidates = {name: call(kernel) for name, kernel in kernels.items()}
    baselines, refused = usable(torch, baselines_of(torch, "time", data, pick, config))
    heads = max(1, min(sizes["heads"], EXACT // (sizes["rows"] * sizes["keys"])))
    part = {name: data[0][name][:1, :heads] for name in "qkv"}
    want, _ = expected(torch, config, part)
    checks: dict[str, str] = {}
    for name, ours in candidates.items():
        data[0]["o"].fill_(math.nan)
        turn[0] = 1
        ours()
        whole = not bool(torch.isnan(data[0]["o"]).any())
        error = float((data[0]["o"][:1, :heads].double() - want).norm() / want.norm())
        checks[name] = "pass" if whole and error < BOUND else f"fail {error:.3g}"
    del want, part
    samples = kb.interleave({**candidates, **baselines}, rounds)
    pairs = sizes["batch"] * sizes["heads"] * sizes["rows"] * sizes["keys"]
    return {
        "work": 4 * pairs * (0.5 if config.causal else 1.0) * sizes["d"],
        "samples": samples,
        "checks": checks,
        "baselines": list(baselines),
        "refused": refused,
    }


if __name__ == "__main__":
    sys.exit("run bench/own_kernels.py beside")
