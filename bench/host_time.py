"""Claim `host-time`: what the host takes to begin a small forward and backward pass of attention.

    python -m bench.host_time run out/host_time.json     on the GPU machine
    python -m bench.host_time merge FILE                 into bench/results

The GPU needs less time for these than the host, so that the time of a call in a row of calls is the
host's: what eager training of a small model waits for. `ours` is microseconds a call by the clock;
a function of autograd that does nothing is in the checks, as no call from Python takes less.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench import kernel_bench as kb
from bench.attention_cases import FA4
from bench.evidence import Evidence, read_rows
from warploom.runtime.stats import median_interval

CLAIM = "host-time"
RESULTS = kb.ROOT / "bench" / "results" / "host_time.json"
CALLS = 40  # of a sample
TORCH, NOTHING = "torch", "nothing"
BOUNDS = (0, 200, 512, 1024)  # of the packed sequences
WRONG = 0.02  # relative error of a gradient beside torch's that fails
Call = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """A kind of call."""

    name: str
    shape: str
    made: Callable[[Any], dict[str, Call]]


def leaves(torch: Any, *shape: int) -> tuple[Any, ...]:
    """q, k, v and the gradient of o."""
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(shape, device="cuda").bfloat16() for _ in range(4))
    return *(x.requires_grad_() for x in (q, k, v)), do


def gradients(torch: Any, function: Callable[..., Any], q: Any, k: Any, v: Any, do: Any) -> Call:
    """Both passes of a function of q, k and v."""
    return lambda: torch.autograd.grad(function(q, k, v), (q, k, v), do)


def nothing(torch: Any) -> Callable[..., Any]:
    """A function of autograd that only makes room for results."""

    class Nothing(torch.autograd.Function):  # type: ignore[misc, name-defined]
        @staticmethod
        def forward(ctx: Any, *given: Any) -> Any:
            ctx.save_for_backward(*given)
            return torch.empty_like(given[0])

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return tuple(torch.empty_like(one) for one in ctx.saved_tensors)

    return Nothing.apply


def dense(torch: Any) -> dict[str, Call]:
    """Of one sequence, [batch, heads, rows, d]."""
    own = importlib.import_module("warploom.integrations.torch_op").attention
    theirs = torch.nn.functional.scaled_dot_product_attention
    tensors = leaves(torch, 1, 4, 256, 64)
    functions = {
        kb.OURS: lambda q, k, v: own(q, k, v, causal=True),
        TORCH: lambda q, k, v: theirs(q, k, v, is_causal=True),
        NOTHING: nothing(torch),
    }
    found = {name: gradients(torch, one, *tensors) for name, one in functions.items()}
    if four := _flash_attention("flash_attn_func"):
        wide = [x.detach().transpose(1, 2).contiguous() for x in tensors]
        wide = [*(x.requires_grad_() for x in wide[:3]), wide[3]]
        found[FA4] = gradients(torch, lambda q, k, v: four(q, k, v, causal=True)[0], *wide)
    return found


def packed(torch: Any) -> dict[str, Call]:
    """Of sequences behind one another, [tokens, heads, d]."""
    own = importlib.import_module("warploom.integrations.torch_attention_packed").attention_varlen
    theirs = torch.nn.attention.varlen.varlen_attn
    bounds = torch.tensor(BOUNDS, device="cuda", dtype=torch.int32)
    most = max(b - a for a, b in pairwise(BOUNDS))
    tensors = leaves(torch, BOUNDS[-1], 4, 64)
    where = (bounds, bounds, most, most)
    functions = {
        kb.OURS: lambda q, k, v: own(q, k, v, *where, causal=True),
        TORCH: lambda q, k, v: theirs(q, k, v, *where, window_size=(-1, 0)),
        NOTHING: nothing(torch),
    }
    if four := _flash_attention("flash_attn_varlen_func"):
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        given = dict(zip(names, where, strict=True))
        functions[FA4] = lambda q, k, v: four(q, k, v, causal=True, **given)[0]
    return {name: gradients(torch, one, *tensors) for name, one in functions.items()}


def _flash_attention(name: str) -> Any:
    try:
        return getattr(importlib.import_module("flash_attn.cute"), name)
    except ImportError:
        return None


CASES = (
    Case("both passes", "1 x 4 heads x 256 rows x 64", dense),
    Case("both passes, packed", "sequences of 200, 312 and 512, 4 heads x 64", packed),
)


def timed(torch: Any, call: Call) -> float:
    """Microseconds a call, of some in a row, until the last is queued."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(CALLS):
        call()
    found = (time.perf_counter() - began) / CALLS * 1e6
    torch.cuda.synchronize()
    return found


def measured(torch: Any, case: Case, rounds: int) -> Evidence:
    """The row of a case."""
    calls = case.made(torch)
    kept: dict[str, Call] = {}
    for name, call in calls.items():
        try:
            call()
            kept[name] = call
        except Exception as error:  # whatever a library raises for what it does not support
            if name == kb.OURS:
                raise
            print(f"{case.name}: {name} refused: {error}"[:300], flush=True)
    error = max(map(relative, kept[kb.OURS](), kept[TORCH]()))
    calls = {**kept, kb.CONTROL: kept[kb.OURS]}
    samplers = {name: lambda one=call: timed(torch, one) for name, call in calls.items()}
    return row(case, kb.in_shuffled_rounds(samplers, rounds), error, kb.provenance())


def relative(ours: Any, theirs: Any) -> float:
    """The distance of two gradients by the size of the second."""
    ours, theirs = ours.double(), theirs.double()
    return float((ours - theirs).norm() / theirs.norm())


def row(
    case: Case, samples: Mapping[str, list[float]], error: float, where: Mapping[str, Any]
) -> Evidence:
    """What rounds of microseconds say."""
    median = {name: statistics.median(one) for name, one in samples.items()}
    others = {n: us for n, us in median.items() if n not in (kb.OURS, kb.CONTROL, NOTHING)}
    best = min(others, key=lambda name: others[name])
    ratio, *interval = median_interval(samples[kb.OURS], samples[best])
    _, *control = median_interval(samples[kb.OURS], samples[kb.CONTROL])
    return Evidence(
        claim=CLAIM,
        kernel=f"attention, {case.name}",
        shape=case.shape,
        dtype="bf16",
        compiler="",
        **where,
        unit="us",
        better="lower",
        ours=median[kb.OURS],
        baselines=others,
        ratio_to_best=ratio,
        ci95=(interval[0], interval[1]),
        control=(control[0], control[1]),
        samples=len(samples[kb.OURS]),
        checks={
            "numerics": "pass" if error < WRONG else f"off by {error:.3g}",
            "a function that does nothing": round(median[NOTHING], 1),
        },
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=("run", "merge"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    if args.mode == "merge":
        kb.put(RESULTS, read_rows(args.file))
        return
    kb.measure(CASES, lambda torch, case: measured(torch, case, args.rounds), 600, args.file)


if __name__ == "__main__":
    main()
