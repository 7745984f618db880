"""Long convolution beside torch.fft, and beside a copy of its bytes.

    python -m bench.long_convolution build DIR          build every kernel that is timed
    python -m bench.long_convolution run DIR --out OUT  on a GPU machine: rows of `fftconv`
    python -m bench.long_convolution merge FILES        into bench/results/long_convolution.json

A row is one case, in milliseconds of a call: 64 sequences of 768 heads, fewer of more than 4096
elements, as torch.fft takes many times their memory. torch.fft has x in fp32, as it has no bf16,
and its transform of the kernels is made before, as ours is; `both casts` counts the way from bf16
and back as well. A gated case multiplies x by a tensor like it before, and y behind: both are calls
of their own on either side. Calls are captured into graphs and interleaved, with a second copy of
ours as A/A control. Results are judged by a transform in float64.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import kernel_bench as kb
from bench.evidence import Evidence
from bench.kernel_bench import CONTROL, COPY, OURS
from warploom.autosched.schedules import compiled
from warploom.codegen.compile.build import Built
from warploom.kernels.convolution.config import COLUMNS, ConvolutionConfig
from warploom.kernels.convolution.matrices import matrices
from warploom.kernels.convolution.program import default_policy, long_convolution

RESULTS = Path(__file__).parent / "results" / "long_convolution.json"
BATCH, HEADS = 64, 768
WHOLE = 4096  # elements of which there are so many sequences
CHECKED = 64  # heads, of so many sequences that every group of a block has tasks
WRONG = 8e-3  # relative error in norm: matrices, factors and what lies between are rounded to bf16
FFT, CASTS = "torch.fft", "both casts"
BLOCKS = ConvolutionConfig(pairs=1, blocks=True)
GATES = ("pregate", "postgate")
# Gated, in 16 bits, on one H100, for as many sequences: milliseconds by the length of those that
# come round (github.com/HazyResearch/flash-fft-conv, README).
FLASH_FFT_CONV = {1024: 0.29, 4096: 1.43}


@dataclass(frozen=True)
class Case:
    """Sequences of so many elements, and whether they are gated."""

    config: ConvolutionConfig
    taps: int
    gated: bool = False

    @property
    def name(self) -> str:
        """What the case is called."""
        kind = "causal" if self.config.causal else "circular"
        return f"{kind} {self.taps}" + " gated" * self.gated

    @property
    def length(self) -> int:
        """Elements of torch's transform."""
        return 2 * self.taps if self.config.causal else self.taps

    @property
    def batch(self) -> int:
        """Sequences of every head."""
        return BATCH if self.taps <= WHOLE else BATCH * WHOLE // (2 * self.taps)


PLAIN = (
    *(Case(ConvolutionConfig(2 * taps, True), taps) for taps in (256, 512, 1024, 2048)),
    *(Case(BLOCKS, taps) for taps in (4096, 8192, 16384)),
    *(Case(ConvolutionConfig(taps, False), taps) for taps in (512, 1024, 2048, 4096)),
)
GATED = ("causal 1024", "causal 4096", "causal 8192", "causal 16384", "circular 1024",
         "circular 4096")  # fmt: skip
CASES = {
    one.name: one
    for case in PLAIN
    for one in (case, Case(case.config, case.taps, True))
    if not one.gated or case.name in GATED
}


def inputs(torch: Any, case: Case, batch: int, heads: int) -> Any:
    """Random sequences, kernels that decay, the constant arrays, gates."""
    spectrum = importlib.import_module("warploom.integrations.torch_convolution").kernel_spectrum
    device, config, taps = {"device": "cuda"}, case.config, case.taps
    x, *gates = (
        torch.randn(batch, heads, taps, **device).bfloat16() for _ in range(3 if case.gated else 1)
    )
    x = x.reshape(batch, -1, config.taken * (taps // config.taps), COLUMNS)
    decay = torch.exp(-4 * torch.arange(taps, **device) / taps)
    kernel = torch.randn(heads, taps, **device) * decay / taps**0.5
    given = {name: torch.tensor(one, **device).bfloat16() for name, one in matrices(config).items()}
    re, im = spectrum(kernel, taps, config.causal)
    own = {"kernel": kernel, "kernel_re": re, "kernel_im": im}
    given |= dict(zip(GATES, gates, strict=False))
    return given | own | {"x": x, "y": torch.full_like(x, math.nan)}


def by_fft(torch: Any, case: Case, x: Any, kernel: Any, gates: list[Any]) -> Any:
    """x and gates: [batch, heads, taps], and kernels [heads, taps], or their transform."""
    if not kernel.is_complex():
        kernel = torch.fft.rfft(kernel, n=case.length)
    x = x * gates[0] if gates else x
    y = torch.fft.irfft(torch.fft.rfft(x, n=case.length) * kernel, n=case.length)[..., : case.taps]
    return y * gates[1] if gates else y


def by_us(torch: Any, kernel: Any, given: dict[str, Any]) -> Callable[[], Any]:
    """Our call, gates around it, which gives y."""
    arrays = {name: one for name, one in given.items() if name not in GATES}

    def bare() -> Any:
        kernel(arrays, {}, int(torch.cuda.current_stream().cuda_stream))
        return arrays["y"]

    if GATES[0] not in given:
        return bare
    arrays["x"], result = torch.empty_like(given["x"]), torch.empty_like(given["y"])
    before, behind = (given[name].view(result.shape) for name in GATES)

    def gated() -> Any:
        torch.mul(given["x"], before, out=arrays["x"])
        return torch.mul(bare(), behind, out=result)

    return gated


def error(torch: Any, case: Case, kernel: Any) -> float:
    """The relative error in norm of some heads of an odd number of sequences."""
    count = 155 if case.taps <= WHOLE else 19
    given = inputs(torch, case, count, CHECKED)
    x = given["x"].reshape(count, CHECKED, -1).double()
    gates = [given[name].double() for name in GATES if name in given]
    right = by_fft(torch, case, x, given.pop("kernel").double(), gates)
    found = by_us(torch, kernel, given)().reshape(x.shape).double()
    return float((found - right).norm() / right.norm())


def timed(torch: Any, case: Case, kernel: Any, args: argparse.Namespace) -> dict[str, list[float]]:
    """Samples of our call, of its control, of torch.fft's and of a copy of x to y."""
    given = inputs(torch, case, case.batch, HEADS)
    x, other = given["x"].reshape(case.batch, HEADS, -1), torch.empty_like(given["x"])
    wide = torch.fft.rfft(given.pop("kernel"), n=case.length)
    gates = [given[name] for name in GATES if name in given]
    floats, wide_gates = x.float(), [one.float() for one in gates]
    ours = by_us(torch, kernel, given)

    def with_casts() -> Any:
        wider = [one.float() for one in gates]
        return by_fft(torch, case, x.float(), wide, wider).bfloat16()

    calls = {
        OURS: ours,
        CONTROL: ours,
        COPY: lambda: torch.neg(given["x"], out=other),
        FFT: lambda: by_fft(torch, case, floats, wide, wide_gates),
        CASTS: with_casts,
    }
    return kb.interleave(calls, args.rounds)


def measured(torch: Any, case: Case, args: argparse.Namespace) -> Evidence:
    """The row of one case."""
    built = Built.read(args.where[0] / kb.slug(case.name))
    kernel = built.kernel()
    torch.manual_seed(0)
    torch.cuda.empty_cache()  # a transform takes many times its sequences
    wrong = error(torch, case, kernel)
    samples = timed(torch, case, kernel, args)
    published = FLASH_FFT_CONV.get(case.taps) if case.gated and not case.config.causal else None
    return kb.row_of_times(
        samples,
        FFT,
        {
            "numerics": "pass" if wrong < WRONG else "fail",
            "error": round(wrong, 6),
            "torch.fft with both casts ms": round(statistics.median(samples[CASTS]), 5),
            **({} if published is None else {"FlashFFTConv ms, published": published}),
        },
        claim="fftconv",
        kernel=case.name,
        shape=f"{case.batch}x{HEADS}x{case.taps}",
        compiler=built.resources.compiler,
    )


def main() -> None:
    """Command line."""
    args = kb.modes(__doc__, CASES)
    if args.what == "merge":
        kb.merge(RESULTS, args.where)
        return
    (folder,) = args.where
    chosen = [CASES[name] for name in args.only.split(",")]
    if args.what == "build":
        for case in chosen:
            built = compiled(long_convolution(case.config), default_policy(case.config))
            built.write(folder / kb.slug(case.name))
        return
    row = functools.partial(measured, args=args)
    kb.measure(chosen, row, math.inf, args.out / "long_convolution.json")


if __name__ == "__main__":
    main()
