"""Recurrent attention forward and backward beside flash-linear-attention and a copy of its bytes.

    python -m bench.linear_attention_backward build DIR          build every kernel that is timed
    python -m bench.linear_attention_backward run DIR --out OUT  on a GPU machine: the rows
    python -m bench.linear_attention_backward merge FILES        into bench/results

A row is one case of `bench.linear_attention`, in milliseconds of a forward pass that keeps what
gradients need and a backward pass, sums over what tasks leave in parts included. Calls are captured
into graphs and interleaved, with a second copy of ours as A/A control. flash-linear-attention gets
q, k and gates of every head ready-made, and its gradients end there. `copy ms` is what a copy takes
that moves as many bytes as both passes must: inputs twice, results, gradients. Every gradient is
judged by autograd through a loop over rows in float64.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench import kernel_bench as kb
from bench import linear_attention as forward
from bench.evidence import Evidence, write_rows
from bench.linear_attention import BATCH, CONTROL, COPY, FLA, HEADS, OURS, REFUSED, Case
from warploom.autosched.schedules import compiled
from warploom.codegen.compile.build import Built
from warploom.kernels.recurrent.backward import (
    ALLOW,
    backward_policy,
    made_arrays,
    parts_of,
    recurrent_backward,
    sizes_of,
)
from warploom.kernels.recurrent.program import RecurrentConfig, default_policy, recurrent
from warploom.tile import BF16

RESULTS = Path(__file__).parent / "results" / "linear_attention_backward.json"
CASES = {
    name: forward.CASES[name]
    for name in (
        "mamba-2", "mamba-2 with D", "simple gla d64", "linear d64", "decay d128",
        "simple gla d128", "mamba-2 state 128", "gla d64",
        "gated delta rule d64", "delta rule d64",
    )
}  # fmt: skip
ROWS = (1024, 4096)
LONG = 2048  # rows of the longer check
WRONG = 5e-3  # relative error in norm: operands, states and results are rounded to bf16
WRONG_GATES = 2e-2  # gradients of gates, and of a over all rows, are differences of large sums
BACKWARD = "ours, backward alone"
NO_INPUTS = "o", "do", "states", "inverse", "fresh"


@dataclass(frozen=True)
class Pair:
    """The kernels of a case, and what they run on."""

    case: Case
    kernels: tuple[Any, ...]
    given: dict[str, Any]
    made: dict[str, Any]
    scale: float

    def launch(self, torch: Any, kernel: Any) -> None:
        """One kernel, with the arrays that it takes."""
        every = self.given | self.made
        arrays = {spec.name: every[spec.name] for spec in kernel.interface.arrays}
        kernel(arrays, {"scale": self.scale}, int(torch.cuda.current_stream().cuda_stream))

    def forward(self, torch: Any) -> None:
        """The result and the states."""
        self.launch(torch, self.kernels[0])

    def backward(self, torch: Any) -> dict[str, Any]:
        """The gradients, by the names of inputs."""
        glue = importlib.import_module("warploom.integrations.torch_recurrent_backward")
        for kernel in self.kernels[1:]:
            self.launch(torch, kernel)
        inputs = {x: one for x, one in self.given.items() if x not in NO_INPUTS}
        made = dict(self.made)
        for x in "qkv":
            if made[f"d{x}"].shape != inputs[x].shape:
                made[f"d{x}"] = torch.empty_like(inputs[x])
                glue.add_slots(self.made[f"d{x}"], made[f"d{x}"])
        return glue.finished(inputs, made)


def pair(torch: Any, case: Case, kernels: tuple[Any, ...], shape: tuple[int, int, int]) -> Pair:
    """Random inputs of a case, and room for what is made of them, of NaN."""
    (batch, heads, rows), config = shape, case.config
    given, device = forward.inputs(torch, case, batch, heads, rows), {"device": "cuda"}
    given["do"] = torch.randn(batch, rows, heads, config.value_dim, **device).bfloat16()
    sizes, kinds = sizes_of(config, batch, rows, heads), {BF16: torch.bfloat16}

    def room(one: Any) -> Any:
        size, kind = [sizes[x] for x in one.dims], kinds.get(one.dtype, torch.float32)
        return torch.full(size, float("nan"), dtype=kind, **device)

    for one in recurrent(replace(config, states=True)).arrays:
        if one.name not in given:
            given[one.name] = room(one)
    made = {name: room(one) for name, one in made_arrays(config).items()}
    return Pair(case, kernels, given, made, config.key_dim**-0.5)


def errors(torch: Any, case: Case, kernels: tuple[Any, ...], rows: int) -> dict[str, float]:
    """The relative error in norm of every gradient, with eight heads of one sequence."""
    here = pair(torch, case, kernels, (1, 8, rows))
    here.forward(torch)
    found = here.backward(torch)
    leaves = {x: here.given[x].double().requires_grad_() for x in found}
    out = forward.exact(torch, case, here.given | leaves, here.scale)
    right = torch.autograd.grad(out, list(leaves.values()), here.given["do"].double())
    return {
        x: float((found[x].double() - one).norm() / one.norm())
        for x, one in zip(leaves, right, strict=True)
    }


def theirs(torch: Any, here: Pair) -> Callable[[], Any]:
    """Both passes by flash-linear-attention, through autograd."""
    case, given = here.case, dict(here.given)
    heads = given["v"].shape[2]
    for name in "qk" if given["q"].shape[2] < heads else "":
        given[name] = given[name].repeat_interleave(heads // given[name].shape[2], 2)
    if "dt" in given:
        given["v"] = (given["dt"][..., None] * given["v"]).bfloat16()
        given["g"] = given.pop("dt") * given.pop("a")
        case = replace(case, config=replace(case.config, decay="token", skip=False))
    if "beta" in given:
        given["beta"] = given["beta"].bfloat16()
    names = [x for x in ("q", "k", "v", "g", "beta") if x in given]
    if case.config.decay == "head":
        names.remove("g")  # of which it makes no gradient
    leaves = [given[x].detach().requires_grad_() for x in names]
    given |= dict(zip(names, leaves, strict=True))
    call = forward.theirs(case, given, here.scale)

    def both() -> Any:
        with torch.enable_grad():
            out = call()
        out = out if torch.is_tensor(out) else out[0]
        return torch.autograd.grad(out, leaves, given["do"])

    return both


def timed(torch: Any, here: Pair, args: argparse.Namespace) -> dict[str, list[float]]:
    """Samples of our passes, of their control, of a copy and of FLA's passes where they run."""

    def size(*names: str) -> int:
        return sum(here.given[x].numel() * here.given[x].element_size() for x in names)

    moved = size("o", "do") + 3 * size(*(x for x in here.given if x not in NO_INPUTS))
    half = torch.ones(moved // 4, dtype=torch.bfloat16, device="cuda")
    other = torch.empty_like(half)

    def ours() -> None:
        here.forward(torch)
        here.backward(torch)

    calls: dict[str, Callable[[], Any]] = {
        OURS: ours,
        CONTROL: ours,
        BACKWARD: lambda: here.backward(torch),
        COPY: lambda: torch.neg(half, out=other),
    }
    ours()
    if not args.alone:
        calls |= forward.that_runs(torch, lambda: theirs(torch, here))
    return kb.interleave(calls, args.rounds)


def measured(
    torch: Any, name: str, built: tuple[Built, ...], args: argparse.Namespace
) -> Iterator[Evidence]:
    """The rows of one case."""
    case, kernels = CASES[name], tuple(one.kernel() for one in built)
    wrong = {rows: errors(torch, case, kernels, rows) for rows in (987, LONG)}
    right = all(
        error < (WRONG if x in "qkv" else WRONG_GATES)
        for one in wrong.values()
        for x, error in one.items()
    )
    for rows in ROWS:
        samples = timed(torch, pair(torch, case, kernels, (BATCH, HEADS, rows)), args)
        best = FLA if FLA in samples else COPY
        yield kb.row_of_times(
            samples,
            best,
            {
                "numerics": "pass" if right else "fail",
                **{
                    f"error d{x}, {rows} rows": round(error, 6)
                    for rows, one in wrong.items()
                    for x, error in one.items()
                },
                "backward ms": round(statistics.median(samples[BACKWARD]), 5),
                **{
                    f"{REFUSED}, ms": round(statistics.median(times), 5)
                    for name, times in samples.items()
                    if name == REFUSED
                },
            },
            claim="linear-attention-backward",
            kernel=name,
            shape=f"{BATCH}x{HEADS}x{rows}, q and k of {case.groups}",
            compiler=built[1].resources.compiler,
        )


def kernels_of(config: RecurrentConfig) -> dict[str, Built]:
    """The forward pass that keeps states, and what a backward pass is."""
    kept = replace(config, states=True)
    found = {"forward": compiled(recurrent(kept), default_policy(kept), allow=ALLOW)}
    for part in parts_of(config):
        program, policy = recurrent_backward(config, part), backward_policy(config, part)
        found[part] = compiled(program, policy, allow=ALLOW)
    return found


def main() -> None:
    """Command line."""
    args = kb.modes(__doc__, CASES, "flash-linear-attention")
    if args.what == "merge":
        kb.merge(RESULTS, args.where)
        return
    (folder,) = args.where
    if args.what == "build":
        for name in args.only.split(","):
            for part, built in kernels_of(CASES[name].config).items():
                built.write(folder / kb.slug(name) / part)
        return
    torch = kb.load_torch()
    torch.manual_seed(0)
    found: list[Evidence] = []
    for name in args.only.split(","):
        try:
            parts = ("forward", *parts_of(CASES[name].config))
            kernels = tuple(Built.read(folder / kb.slug(name) / part) for part in parts)
            for row in measured(torch, name, kernels, args):
                found.append(row)
                write_rows(args.out / "linear_attention_backward.json", found)
                times = row.checks["backward ms"], row.checks["percent of copy"]
                print(row.kernel, row.shape, round(row.ours, 4), round(row.ratio_to_best, 2),
                      *times, row.checks, flush=True)  # fmt: skip
        except RuntimeError as error:
            print(f"{name}: {error!r}"[:500], flush=True)


if __name__ == "__main__":
    main()
