"""Training steps of the blocks in `examples` beside the same blocks of PyTorch and of FLA.

    python -m bench.blocks --out OUT      on a GPU machine: rows of `blocks`
    python -m bench.blocks --merge FILES  into bench/results/blocks.json

A row is a block: milliseconds of a forward and a backward pass with the gradients of its input and
weights, 4 sequences of 4096 rows in bf16. Steps are captured into graphs, so that what the host
does is not timed, and interleaved, with a second copy of ours as A/A control. The other block is
plain PyTorch with the same weights; where flash-linear-attention has the recurrence, a third one
has it in place of PyTorch's. Outputs and gradients of all are judged over 500 rows by a block in
float64.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from bench import kernel_bench as kb
from bench.evidence import Evidence, write_rows
from bench.kernel_bench import CONTROL, OURS

RESULTS = Path(__file__).parent / "results" / "blocks.json"
EXAMPLES = Path(__file__).parents[1] / "examples"
BATCH, ROWS = 4, 4096
WRONG = 3e-2  # relative error in norm of a bf16 step, the weights' gradients over 500 rows included
TORCH, FLA = "torch", "torch with flash-linear-attention"
# By block: its module, class, width and other sizes.
CASES: dict[str, tuple[str, str, tuple[int, ...]]] = {
    "transformer": ("transformer_block", "Transformer", (2048, 5632, 128)),
    "gated DeltaNet": ("gated_deltanet_block", "GatedDeltaNet", (1024,)),
    "Mamba-2": ("mamba2_block", "Mamba2", (1024, 64)),
}


def fla_operators(of_torch: Any) -> Any:
    """PyTorch's operators with the recurrence of flash-linear-attention."""

    class OfFla(of_torch):
        @staticmethod
        def rule(q: Any, k: Any, v: Any, g: Any, beta: Any) -> Any:
            gated = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
            return gated(q, k, v, g, beta.to(q.dtype), scale=q.shape[-1] ** -0.5)[0]

        @staticmethod
        def scan(x: Any, dt: Any, a: Any, b: Any, c: Any, skip: Any, bias: Any) -> Any:
            functional = importlib.import_module("torch.nn.functional")
            chunked = importlib.import_module("fla.ops.simple_gla").chunk_simple_gla
            step = functional.softplus(dt.to(a.dtype) + bias)
            q, k = (one.expand(-1, -1, x.shape[2], -1).contiguous() for one in (c, b))
            value = (x * step[..., None]).to(x.dtype)
            y = chunked(q, k, value, g=step * a, scale=1.0)[0]
            return (y + skip[:, None] * x).to(x.dtype)

    return OfFla()


def blocks(name: str, alone: bool) -> dict[str, Any]:
    """Blocks with the same weights, by who makes their operators; `alone` without FLA's."""
    module_name, kind, sizes = CASES[name]
    module = importlib.import_module(module_name)
    operators = {OURS: module.OfWarploom(), TORCH: module.OfTorch()}
    if name != "transformer" and not alone:
        operators[FLA] = fla_operators(module.OfTorch)
    made = {who: getattr(module, kind)(*sizes, ops).cuda() for who, ops in operators.items()}
    for block in made.values():
        block.load_state_dict(made[TORCH].state_dict())
    return made


def measured(torch: Any, name: str, rounds: int, alone: bool) -> Evidence:
    """The row of a block."""
    shared = importlib.import_module("blocks")
    made, width = blocks(name, alone), CASES[name][2][0]
    right = blocks(name, True)[TORCH].double()
    right.load_state_dict(made[TORCH].state_dict())
    x, grad = torch.randn(2, BATCH, ROWS, width, device="cuda").bfloat16()
    short = slice(0, 1), slice(0, shared.SHORT)
    want = shared.step(right, x[short].double(), grad[short].double())
    calls: dict[str, Callable[[], Any]] = {}
    errors: dict[str, float] = {}
    for who, block in made.items():
        try:
            errors[who] = shared.distance(shared.step(block, x[short], grad[short]), want)
            call = partial(shared.step, block, x, grad)
            with torch.cuda.stream(torch.cuda.Stream()):  # what a first call makes is no capture's
                call()
                call()
            torch.cuda.synchronize()
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                call()
        except (ImportError, RuntimeError, TypeError, ValueError) as error:
            if who == OURS:
                raise
            print(f"{name}, {who}: {error!r}"[:300], flush=True)
            continue
        calls[who] = call
    samples = kb.interleave(calls | {CONTROL: calls[OURS]}, rounds, 0.02)
    median = {who: statistics.median(times) for who, times in samples.items()}
    others = {who: median[who] for who in calls if who != OURS}
    best = min(others, key=lambda who: others[who])
    ratio, *interval = kb.median_interval(samples[OURS], samples[best])
    _, *control = kb.median_interval(samples[OURS], samples[CONTROL])
    return Evidence(
        claim="blocks",
        kernel=f"{name} block, training step",
        shape=f"{BATCH}x{ROWS}, width {width}",
        dtype="bf16",
        **kb.provenance(),
        compiler=kb.libraries(),
        unit="ms",
        better="lower",
        ours=median[OURS],
        baselines=others,
        ratio_to_best=ratio,
        ci95=(interval[0], interval[1]),
        control=(control[0], control[1]),
        samples=len(samples[OURS]),
        checks={
            "numerics": "pass" if errors[OURS] < WRONG else "fail",
            **{f"error, {who}": round(error, 5) for who, error in errors.items()},
        },
    )


def rows(names: list[str], rounds: int, alone: bool) -> Iterator[Evidence]:
    """The rows of some blocks; one that fails is named and has none."""
    torch = kb.load_torch()
    torch.manual_seed(0)
    for name in names:
        try:
            yield measured(torch, name, rounds, alone)
        except RuntimeError as error:
            print(f"{name}: {error!r}"[:400], flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(CASES), help="blocks, with commas")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--alone", action="store_true", help="without flash-linear-attention")
    parser.add_argument("--merge", type=Path, nargs="+", help="files of rows")
    args = parser.parse_args()
    if args.merge:
        kb.merge(RESULTS, args.merge)
        return
    sys.path.insert(0, str(EXAMPLES))
    found: list[Evidence] = []
    for row in rows(args.only.split(","), args.rounds, args.alone):
        found.append(row)
        write_rows(args.out / "blocks.json", found)
        print(row.kernel, round(row.ours, 3), row.baselines, row.checks, flush=True)


if __name__ == "__main__":
    main()
