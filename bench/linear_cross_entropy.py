"""The loss of a linear layer with its gradients, beside Liger's scheme and torch.compile.

    python -m bench.linear_cross_entropy build                 our kernels into the cache
    python -m bench.linear_cross_entropy compile               torch's, into its cache on disk
    python -m bench.linear_cross_entropy run --out OUT
    python -m bench.linear_cross_entropy merge FILES           into bench/results

Time and peak memory of a call forward and backward: loss, gradient of x and of the weight. Liger's
scheme (github.com/linkedin/Liger-Kernel, `fused_linear_cross_entropy`) is written here in torch:
chunks of as many rows as make their logits as large as x, three products of cuBLAS, and the loss
with its gradient over the logits compiled by torch.compile. torch.compile has the two lines of the
formula, whose logits exist whole. Memory is what a call allocates beyond x, weight and target, with
both gradients: the chunk of our logits is given in the row.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import kernel_bench as kb
from bench import sitting
from bench.evidence import Evidence, read_rows, write_rows
from warploom.runtime.stats import median_interval

RESULTS = Path(__file__).parent / "results" / "linear_cross_entropy.json"
CASES = ((8192, 4096, 32000), (8192, 4096, 128256))  # tokens, size, classes
LIGERS = 3 << 26  # bytes of logits that make the memory of all about that of Liger's scheme
ROUNDS = 15  # all calls are at the power limit
LIGER = "Liger's scheme"
Call = Callable[[], Any]


def chunks(tokens: int, size: int, classes: int) -> list[int]:
    """Rows of our chunks: all, as torch.compile's; our default; and as little as Liger's scheme."""
    default = torch_loss().chunk_rows(size)
    return [tokens, default, LIGERS // (2 * classes) // 128 * 128]


def torch_loss() -> Any:
    """Our operator."""
    return importlib.import_module("warploom.integrations.torch_loss")


def liger_rows(tokens: int, size: int, classes: int) -> int:
    """Rows of a chunk, by Liger's rule."""
    rows = -(-tokens // -(-classes // size))
    return 1 << max(0, rows - 1).bit_length()


def liger(torch: Any, x: Any, weight: Any, target: Any) -> Call:
    """Liger's scheme, forward and backward."""
    step = liger_rows(*x.shape, len(weight))

    def of_chunk(logits: Any, labels: Any, share: Any) -> tuple[Any, Any]:
        wide = logits.float()
        lse = torch.logsumexp(wide, -1)
        own = torch.arange(logits.shape[1], device=logits.device)[None] == labels[:, None]
        grad = torch.exp(wide - lse[:, None]) - own.float()
        chosen = logits.gather(1, labels[:, None])[:, 0].float()
        return lse - chosen, (grad * share).to(logits.dtype)

    compiled = torch.compile(of_chunk, dynamic=False)

    def call() -> tuple[Any, Any, Any]:
        share = (target != -100).sum().float().reciprocal()
        dx, dweight, losses = torch.empty_like(x), torch.zeros_like(weight), []
        for first in range(0, len(x), step):
            part = slice(first, first + step)
            loss, grad = compiled(x[part] @ weight.t(), target[part], share)
            losses.append(loss)
            torch.mm(grad, weight, out=dx[part])
            torch.addmm(dweight, grad.t(), x[part], out=dweight)
        return torch.cat(losses).sum() * share, dx, dweight

    return call


def whole(torch: Any, x: Any, weight: Any, target: Any) -> Call:
    """torch.compile of the formula, forward and backward."""

    def formula(x: Any, weight: Any) -> Any:
        return torch.nn.functional.cross_entropy(x @ weight.t(), target)

    compiled = torch.compile(formula, dynamic=False)
    leaves = [one.detach().requires_grad_() for one in (x, weight)]

    def call() -> tuple[Any, Any, Any]:
        loss = compiled(*leaves)
        return loss.detach(), *torch.autograd.grad(loss, leaves)

    return call


def ours(fused: Any, torch: Any, x: Any, weight: Any, target: Any, chunk: int) -> Call:
    """Our operator, forward and backward."""
    leaves = [one.detach().requires_grad_() for one in (x, weight)]

    def call() -> tuple[Any, Any, Any]:
        loss = fused.linear_cross_entropy(*leaves, target, chunk=chunk)
        return loss.detach(), *torch.autograd.grad(loss, leaves)

    return call


def operands(torch: Any, tokens: int, size: int, classes: int) -> tuple[Any, Any, Any]:
    """x and weight such that logits have a deviation near 1, and classes."""
    torch.manual_seed(1)
    x = torch.randn(tokens, size, device="cuda").bfloat16()
    weight = (torch.randn(classes, size, device="cuda") * size**-0.5).bfloat16()
    return x, weight, torch.randint(0, classes, (tokens,), device="cuda")


def rivals(torch: Any, given: tuple[Any, Any, Any]) -> dict[str, Call]:
    """What we are timed beside."""
    return {LIGER: liger(torch, *given), "torch.compile": whole(torch, *given)}


def peak(torch: Any, call: Call) -> float:
    """Bytes that a call allocates at most beyond what was there, its results among them."""
    call()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = call()
    torch.cuda.synchronize()
    del found
    return float(torch.cuda.max_memory_allocated() - before)


def off(got: Any, want: Any) -> float:
    """Relative distance."""
    return float((got.float() - want.float()).norm() / want.float().norm())


def measured(torch: Any, fused: Any, case: tuple[int, int, int]) -> list[Evidence]:
    """The rows of a case: one for every chunk of ours."""
    tokens, size, classes = case
    torch._dynamo.reset()
    given = operands(torch, *case)
    calls = rivals(torch, given)
    calls |= {f"chunk {c}": ours(fused, torch, *given, c) for c in chunks(*case)}
    memory = {name: peak(torch, call) for name, call in calls.items()}
    results = {name: call() for name, call in calls.items()}
    errors = {
        name: max(off(a, b) for a, b in zip(found, results["torch.compile"], strict=True))
        for name, found in results.items()
    }
    del results
    gpu = sitting.Gpu(torch, calls, eager=True)
    gpu.again("torch.compile")
    bursts = sitting.measure(gpu, ROUNDS, False, 0)["bursts"]
    samples = {name: one["ms"] for name, one in bursts.items()}
    times = {name: statistics.median(one) for name, one in samples.items()}
    rows: list[Evidence] = []
    for name in (one for one in calls if one.startswith("chunk ")):
        best = min((LIGER, "torch.compile"), key=times.__getitem__)
        middle, *interval = median_interval(samples[name], samples[best])
        _, *control = median_interval(samples["torch.compile"], samples[sitting.CONTROL])
        rows.append(
            Evidence(
                claim="linear-cross-entropy",
                kernel=f"{name.split()[1]} rows of logits",
                shape=f"{tokens} x {size} x {classes}",
                dtype="bf16",
                **kb.provenance(),
                compiler="nvcc 13.5",
                unit="ms",
                better="lower",
                ours=times[name],
                baselines={other: times[other] for other in (LIGER, "torch.compile")},
                ratio_to_best=middle,
                ci95=(interval[0], interval[1]),
                control=(control[0], control[1]),
                samples=ROUNDS,
                checks={
                    "numerics": "pass" if errors[name] < 2e-2 else "fail",
                    "error": float(f"{errors[name]:.2g}"),
                    "Liger error": float(f"{errors[LIGER]:.2g}"),
                    "MB": round(memory[name] / 1e6),
                    "Liger MB": round(memory[LIGER] / 1e6),
                    "torch.compile MB": round(memory["torch.compile"] / 1e6),
                },
                notes=f"Liger's chunks: {liger_rows(*case)} rows",
            )
        )
    return rows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("build", "compile", "run", "merge"))
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--classes", type=int, default=0, help="the case of so many; 0: all")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    args = parser.parse_args()
    if args.what == "merge":
        fresh = [row for file in args.files for row in read_rows(file)]
        shapes = {row.shape for row in fresh}
        write_rows(RESULTS, [*fresh, *(r for r in read_rows(RESULTS) if r.shape not in shapes)])
        return
    import torch  # noqa: PLC0415

    from warploom.integrations import torch_program  # noqa: PLC0415

    if args.what == "build":
        with torch_program.collecting() as found:
            for tokens, size, classes in CASES:
                x, weight = (
                    torch.empty(n, size, device="meta", dtype=torch.bfloat16)
                    for n in (tokens, classes)
                )
                target = torch.empty(tokens, device="meta", dtype=torch.int64)
                for chunk in chunks(tokens, size, classes):
                    torch_program.RUNS["warploom::linear_cross_entropy"](
                        x, weight, target, True, chunk, True
                    )
        print(len(found), "kernels")
        return
    rows: list[Evidence] = []
    for case in (one for one in CASES if args.classes in (0, one[-1])):
        if args.what == "compile":
            for name, call in rivals(torch, operands(torch, *case)).items():
                call()
                print(case, name, flush=True)
            continue
        rows += measured(torch, torch_loss(), case)
        for row in rows[-len(chunks(*case)) :]:
            print(
                row.shape, row.kernel, f"{row.ours:.2f} ms", row.baselines, row.checks, flush=True
            )
        write_rows(args.out / "linear_cross_entropy.json", rows)


if __name__ == "__main__":
    main()
