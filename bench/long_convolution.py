"""Long convolution beside torch.fft, and beside a copy of its bytes.

    python -m bench.long_convolution build DIR          build every kernel that is timed
    python -m bench.long_convolution run DIR --out OUT  on a GPU machine: rows of `fftconv`
    python -m bench.long_convolution merge FILES        into bench/results/long_convolution.json

A row is one case, in milliseconds of a call: 64 sequences of 768 heads. torch.fft has x in fp32, as
it has no bf16, and its transform of the kernels is made before, as ours is; `both casts` counts the
way from bf16 and back as well. Calls are captured into graphs and interleaved, with a second copy
of ours as A/A control. Results are judged by a transform in float64.
"""

from __future__ import annotations

import argparse
import importlib
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import kernel_bench as kb
from bench.kernel_bench import CONTROL, COPY, OURS
from warploom.autosched.schedules import compiled
from warploom.codegen.compile.build import Built
from warploom.evidence import Evidence, write_rows
from warploom.kernels.convolution.config import COLUMNS, ConvolutionConfig
from warploom.kernels.convolution.matrices import matrices
from warploom.kernels.convolution.program import default_policy, long_convolution

RESULTS = Path(__file__).parent / "results" / "long_convolution.json"
BATCH, HEADS = 64, 768
WRONG = 8e-3  # relative error in norm: matrices, factors and what lies between are rounded to bf16
FFT, CASTS = "torch.fft", "both casts"
BLOCKS = ConvolutionConfig(pairs=1, blocks=True)
CASES = {
    f"{'causal' if one.causal else 'circular'} {taps}": (one, taps)
    for one, taps in (
        *((ConvolutionConfig(2 * taps, True), taps) for taps in (256, 512, 1024, 2048)),
        *((BLOCKS, taps) for taps in (4096, 8192)),
        *((ConvolutionConfig(taps, False), taps) for taps in (512, 1024, 2048, 4096)),
    )
}


def inputs(torch: Any, case: tuple[ConvolutionConfig, int], batch: int, heads: int) -> Any:
    """Random sequences, kernels that decay, the constant arrays."""
    spectrum = importlib.import_module("warploom.integrations.torch_convolution").kernel_spectrum
    device, (config, taps) = {"device": "cuda"}, case
    x = torch.randn(batch, heads, taps, **device).bfloat16()
    x = x.reshape(batch, -1, config.taken * (taps // config.taps), COLUMNS)
    decay = torch.exp(-4 * torch.arange(taps, **device) / taps)
    kernel = torch.randn(heads, taps, **device) * decay / taps**0.5
    given = {name: torch.tensor(one, **device).bfloat16() for name, one in matrices(config).items()}
    re, im = spectrum(kernel, taps, config.causal)
    own = {"kernel": kernel, "kernel_re": re, "kernel_im": im}
    return given | own | {"x": x, "y": torch.full_like(x, math.nan)}


def by_fft(torch: Any, case: tuple[ConvolutionConfig, int], x: Any, kernel: Any) -> Any:
    """x: [batch, heads, taps] and kernels [heads, taps], or their transform."""
    config, taps = case
    length = 2 * taps if config.causal else taps
    if not kernel.is_complex():
        kernel = torch.fft.rfft(kernel, n=length)
    return torch.fft.irfft(torch.fft.rfft(x, n=length) * kernel, n=length)[..., :taps]


def error(torch: Any, case: tuple[ConvolutionConfig, int], kernel: Any) -> float:
    """The relative error in norm of some heads of an odd number of sequences."""
    given = inputs(torch, case, 3, 8)
    x = given["x"].reshape(3, 8, -1).double()
    right = by_fft(torch, case, x, given.pop("kernel").double())
    kernel(given, {}, int(torch.cuda.current_stream().cuda_stream))
    return float((given["y"].reshape(x.shape).double() - right).norm() / right.norm())


def timed(
    torch: Any, case: tuple[ConvolutionConfig, int], kernel: Any, args: argparse.Namespace
) -> dict[str, list[float]]:
    """Samples of our call, of its control, of torch.fft's and of a copy of x to y."""
    given = inputs(torch, case, BATCH, HEADS)
    x, other = given["x"].reshape(BATCH, HEADS, -1), torch.empty_like(given["x"])
    length = x.shape[-1] * (2 if case[0].causal else 1)
    wide = torch.fft.rfft(given.pop("kernel"), n=length)
    floats = x.float()

    def ours() -> None:
        kernel(given, {}, int(torch.cuda.current_stream().cuda_stream))

    calls = {
        OURS: ours,
        CONTROL: ours,
        COPY: lambda: torch.neg(given["x"], out=other),
        FFT: lambda: by_fft(torch, case, floats, wide),
        CASTS: lambda: by_fft(torch, case, x.float(), wide).bfloat16(),
    }
    return kb.interleave(calls, args.rounds)


def measured(torch: Any, name: str, built: Built, args: argparse.Namespace) -> Iterator[Evidence]:
    """The row of one case."""
    case, kernel = CASES[name], built.kernel()
    wrong = error(torch, case, kernel)
    samples = timed(torch, case, kernel, args)
    yield kb.row_of_times(
        samples,
        FFT,
        {
            "numerics": "pass" if wrong < WRONG else "fail",
            "error": round(wrong, 6),
            "torch.fft with both casts ms": round(statistics.median(samples[CASTS]), 5),
        },
        claim="fftconv",
        kernel=name,
        shape=f"{BATCH}x{HEADS}x{case[1]}",
        compiler=built.resources.compiler,
    )


def main() -> None:
    """Command line."""
    args = kb.modes(__doc__, CASES)
    if args.what == "merge":
        kb.merge(RESULTS, args.where)
        return
    (folder,) = args.where
    chosen = {name: CASES[name] for name in args.only.split(",")}
    if args.what == "build":
        for name, (config, _) in chosen.items():
            built = compiled(long_convolution(config), default_policy(config))
            built.write(folder / kb.slug(name))
        return
    torch = kb.load_torch()
    torch.manual_seed(0)
    found: list[Evidence] = []
    for name in chosen:
        for row in measured(torch, name, Built.read(folder / kb.slug(name)), args):
            found.append(row)
            write_rows(args.out / "long_convolution.json", found)
            print(row.kernel, row.shape, round(row.ours, 4), round(row.ratio_to_best, 2),
                  row.checks["percent of copy"], row.checks["numerics"], flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
