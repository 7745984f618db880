"""Recurrent attention beside flash-linear-attention, and beside a copy of its bytes.

    python -m bench.linear_attention build DIR          build every kernel that is timed
    python -m bench.linear_attention run DIR --out OUT  on a GPU machine: rows of `linear-attention`
    python -m bench.linear_attention merge FILES        into bench/results/linear_attention.json

`--only CASE,CASE` runs some of the cases. `--alone` leaves out flash-linear-attention, whose
kernels take a while to compile and to tune: the baseline is then the copy.

A row is one case, in milliseconds of a call. Calls are captured into graphs and interleaved, with a
second copy of ours as A/A control. `copy ms` is what a copy takes
that moves as many bytes as all arrays have; ThunderKittens' times are those of an earlier run on
the same kind of GPU. Results are judged by a loop over rows in float64, over 16384 rows too: with
decays of a usual size, near 0 and near 1.
"""

from __future__ import annotations

import argparse
import importlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench import kernel_bench as kb
from bench.evidence import Evidence, write_rows
from bench.kernel_bench import CONTROL, COPY, OURS
from warploom.autosched.schedules import compiled
from warploom.codegen.compile.build import Built
from warploom.kernels.recurrent import solved
from warploom.kernels.recurrent.program import RecurrentConfig, default_policy, recurrent
from warploom.kernels.recurrent.task import CHUNK
from warploom.tile import BF16

RESULTS = Path(__file__).parent / "results" / "linear_attention.json"
BATCH = HEADS = 16
LONG = 16384  # rows of the long check
AT_ONCE = 128  # states kept at a time
RATES = {"g", "a"}  # arrays of logarithms of decays
EXTREMES = {"0": 100.0, "1": 1e-4}  # what logarithms are multiplied by
WRONG = 5e-3  # relative error in norm: weights, state and result are rounded to bf16
FLA = "flash-linear-attention"
REFUSED = "flash-linear-attention's wrong gradients"
BETWEEN = tuple(solved.SQUARES)  # what one kernel leaves for another


@dataclass(frozen=True)
class Case:
    """A configuration, the heads that share q and k, ThunderKittens' milliseconds by rows, what is
    timed: (batch, heads, rows), and milliseconds that FlashInfer publishes, by that."""

    config: RecurrentConfig
    groups: int = HEADS
    kittens: tuple[tuple[int, float], ...] = ()
    sizes: tuple[tuple[int, int, int], ...] = ((BATCH, HEADS, 1024), (BATCH, HEADS, 4096))
    flashinfer: tuple[tuple[tuple[int, int, int], float], ...] = ()


# Of its gated delta rule on H200, as its repository has them; not run here.
FLASHINFER = (((1, 64, 8192), 0.392), ((4, 64, 2048), 0.22), ((4, 64, 8192), 0.827))
WIDE = RecurrentConfig("head", key_dim=128, value_dim=128)
CASES = {
    "mamba-2": Case(RecurrentConfig("step", shared=True), 1, ((1024, 0.0445), (4096, 0.152))),
    "mamba-2 with D": Case(RecurrentConfig("step", shared=True, skip=True), 1),
    "decay d128": Case(WIDE, HEADS, ((1024, 0.111), (4096, 0.411))),
    "simple gla d64": Case(
        RecurrentConfig("token"),
        sizes=((BATCH, HEADS, 1024), (BATCH, HEADS, 4096), (1, HEADS, 32768)),
    ),
    "mamba-2 state 128": Case(RecurrentConfig("step", shared=True, key_dim=128), 1),
    "simple gla d128": Case(replace(WIDE, decay="token")),
    "linear d64": Case(RecurrentConfig("none")),
    "linear d128": Case(replace(WIDE, decay="none")),
    "based": Case(
        RecurrentConfig("none", taylor=True, key_dim=16), HEADS, ((1024, 0.0752), (4096, 0.271))
    ),
    "gla d64": Case(RecurrentConfig("channel", gates=BF16)),
    "kda d64": Case(RecurrentConfig("channel", delta=True, gates=BF16)),
    "gated delta rule d64": Case(RecurrentConfig("token", delta=True)),
    "delta rule d64": Case(RecurrentConfig("none", delta=True)),
    "gated delta rule d128": Case(
        replace(WIDE, decay="token", delta=True),
        sizes=((BATCH, HEADS, 1024), (BATCH, HEADS, 4096), *(size for size, _ in FLASHINFER)),
        flashinfer=FLASHINFER,
    ),
}


def inputs(torch: Any, case: Case, batch: int, heads: int, rows: int) -> dict[str, Any]:
    """Random tensors of a case; decays of a layer's usual size."""
    config, groups = case.config, min(case.groups, heads)
    device = {"device": "cuda"}

    def normal(*shape: int) -> Any:
        return torch.randn(shape, **device).bfloat16()

    found = {
        "q": normal(batch, rows, groups, config.key_dim),
        "k": normal(batch, rows, groups, config.key_dim) / config.key_dim**0.5,
        "v": normal(batch, rows, heads, config.value_dim),
        "o": torch.full((batch, rows, heads, config.value_dim), math.nan, **device).bfloat16(),
    }
    if config.taylor:
        found["q"], found["k"] = (found[name] / 2 for name in "qk")
    if config.decay == "head":
        found["g"] = torch.log1p(-torch.exp2(-5.0 - torch.arange(heads, **device) * 5 / heads))
    if config.decay == "token":
        found["g"] = torch.nn.functional.logsigmoid(torch.randn(batch, rows, heads, **device)) / 8
    if config.decay == "channel":
        g = torch.nn.functional.logsigmoid(normal(batch, rows, heads, config.key_dim))
        found["g"] = g / 16  # as GLA's layer has them
    if config.delta:
        found["k"] = torch.nn.functional.normalize(found["k"].float(), dim=-1).bfloat16()
        found["beta"] = torch.rand(batch, rows, heads, **device)
    if config.decay == "step":
        found["dt"] = torch.rand(batch, rows, heads, **device) * 0.1
        found["a"] = -1.0 - 15.0 * torch.rand(heads, **device)
    if config.in_two:
        square = batch, -(-rows // CHUNK), heads, CHUNK, CHUNK
        found |= {name: torch.empty(square, **device).bfloat16() for name in BETWEEN}
    if config.skip:
        found["skip"] = torch.randn(heads, **device)
    return found


def exact(torch: Any, case: Case, given: dict[str, Any], scale: float) -> Any:
    """The result in float64, a row at a time."""
    wide = {name: one.double() for name, one in given.items()}
    v = wide["v"]
    batch, rows, heads, columns = v.shape
    q, k = (wide[name].repeat_interleave(heads // wide[name].shape[2], 2) for name in "qk")
    if case.config.taylor:
        q, k, scale = features(torch, q * scale**0.5), features(torch, k * scale**0.5), 1.0
    decay = torch.ones(1, device="cuda", dtype=torch.float64)
    if "g" in wide:
        decay = torch.exp(wide["g"])
    if "dt" in wide:
        decay, v = torch.exp(wide["dt"] * wide["a"]), wide["dt"][..., None] * v
    decay = decay if case.config.decay == "channel" else decay.expand(batch, rows, heads)[..., None]
    state = torch.zeros(batch, heads, q.shape[3], columns, device="cuda", dtype=torch.float64)
    out = torch.empty_like(v)
    for first in range(0, rows, AT_ONCE):
        states: list[Any] = []
        for i in range(first, min(first + AT_ONCE, rows)):
            state, new = decay[:, i, :, :, None] * state, v[:, i, :, None]
            if case.config.delta:
                new = wide["beta"][:, i, :, None, None] * (new - k[:, i, :, None] @ state)
            state = torch.addcmul(state, k[:, i, :, :, None], new)
            states.append(state)
        part = slice(first, first + len(states))
        out[:, part] = scale * torch.einsum("bnhd,nbhde->bnhe", q[:, part], torch.stack(states))
    return out + wide["skip"][:, None] * wide["v"] if "skip" in wide else out


def features(torch: Any, x: Any) -> Any:
    """1, x and half of all products of two of its channels."""
    products = (x[..., None] * x[..., None, :]).flatten(-2) / 2**0.5
    return torch.cat([torch.ones_like(x[..., :1]), x, products], -1)


def theirs(case: Case, given: dict[str, Any], scale: float) -> Callable[[], Any]:
    """The same by flash-linear-attention, which wants q and k of every head and g of every row.

    What it has no argument for is computed before: shared heads, dt a, dt v; D is left out.
    """
    q, k, v = (given[name] for name in "qkv")
    heads = v.shape[2]
    if q.shape[2] < heads:
        q, k = (one.repeat_interleave(heads // one.shape[2], 2) for one in (q, k))
    if case.config.delta:
        return _delta(q, k, given, scale)
    if case.config.decay == "channel":
        by_channel = importlib.import_module("fla.ops.gla").chunk_gla
        return lambda: by_channel(q, k, v, given["g"], scale=scale)
    if case.config.taylor:
        based = importlib.import_module("fla.ops.based").fused_chunk_based
        return lambda: based(q, k, v, scale, use_norm=False)
    if case.config.decay == "none":
        plain = importlib.import_module("fla.ops.linear_attn").chunk_linear_attn
        return lambda: plain(q, k, v, scale=scale, normalize=False)
    gated = importlib.import_module("fla.ops.simple_gla").chunk_simple_gla
    if case.config.decay == "head":
        return lambda: gated(q, k, v, g_gamma=given["g"], scale=scale)
    g = given.get("g")
    if "dt" in given:
        g, v = given["dt"] * given["a"], (given["dt"][..., None] * v).bfloat16()
    return lambda: gated(q, k, v, g=g, scale=scale)


def _delta(q: Any, k: Any, given: dict[str, Any], scale: float) -> Callable[[], Any]:
    v, beta = given["v"], given["beta"].bfloat16()
    if "g" in given and given["g"].dim() == 4:
        by_channel = importlib.import_module("fla.ops.kda").chunk_kda
        return lambda: by_channel(q, k, v, given["g"], beta, scale=scale)
    if "g" not in given:
        plain = importlib.import_module("fla.ops.delta_rule").chunk_delta_rule
        return lambda: plain(q, k, v, beta, scale=scale)
    gated = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    return lambda: gated(q, k, v, given["g"], beta, scale=scale)


def that_runs(torch: Any, make: Callable[[], Callable[[], Any]]) -> dict[str, Callable[[], Any]]:
    """{FLA: its call}, tuned; none, with the reason, where it does not run or is not captured.

    Gradients under gates it refuses where Triton compiles them wrongly: with the refusal lifted
    their time is told by another name, `REFUSED`, and stands beside no ratio.
    """
    try:
        call = make()
        name = FLA
        try:
            call()
        except RuntimeError as error:
            if "produces incorrect results" not in str(error):
                raise
            print(f"{FLA} refuses: {error!r}"[:300], flush=True)
            refusing: Any = importlib.import_module("fla.ops.common.chunk_o")
            refusing.TRITON_ABOVE_3_7_1 = True
            name = REFUSED
            call()
        call()  # what a first call leaves behind is not captured
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            call()
    except (ImportError, RuntimeError, TypeError, ValueError) as error:
        print(f"{FLA} does not run: {error!r}"[:300], flush=True)
        return {}
    return {name: call}


@dataclass(frozen=True)
class Call:
    """The kernels of a case, one after the other; few heads of many rows in segments, as the
    operators have them."""

    config: RecurrentConfig
    kernels: tuple[Any, ...]

    def __call__(self, torch: Any, given: dict[str, Any], scale: float) -> None:
        """Launch them with the arrays that each takes."""
        glue = importlib.import_module("warploom.integrations.torch_segments")
        if (count := glue.best_count(self.config, given["v"])) > 1:
            glue.run_segments(self.config, given, scale, count)
            return
        stream = int(torch.cuda.current_stream().cuda_stream)
        kernels = self.kernels
        if self.config.in_two:  # of the second one there may be a form for few tasks
            kernels = kernels[0], kernels[-1 if glue.alone(self.config, given["v"]) else 1]
        for kernel in kernels:
            arrays = {spec.name: given[spec.name] for spec in kernel.interface.arrays}
            kernel(arrays, {"scale": scale}, stream)


def programs(config: RecurrentConfig) -> dict[str, tuple[Any, ...]]:
    """(program, policy) of every kernel of a configuration, by the folder it is built in."""
    if config.in_two:
        first, second = solved.kernels(config)
        _, few = solved.kernels(config, alone=True)
        return {"solve": first, "chunks": second, **({} if few[1] == second[1] else {"few": few})}
    return {".": (recurrent(config), default_policy(config))}


def error(torch: Any, case: Case, kernel: Call, rows: int, times: float = 1.0) -> float:
    """The relative error in norm, with heads of one sequence; logarithms of decays so many times
    their usual size."""
    scale = case.config.key_dim**-0.5
    given = inputs(torch, case, 1, 2, rows)
    for name in RATES.intersection(given):
        given[name] = given[name] * times
    right = exact(torch, case, given, scale)
    kernel(torch, given, scale)
    return float((given["o"].double() - right).norm() / right.norm())


def timed(
    torch: Any, case: Case, kernel: Call, sizes: tuple[int, int, int], args: argparse.Namespace
) -> dict[str, list[float]]:
    """Samples of our call, of its control, of a copy of all bytes and of FLA's where it runs."""
    given, scale = inputs(torch, case, *sizes), case.config.key_dim**-0.5
    moved = sum(one.numel() * one.element_size() for x, one in given.items() if x not in BETWEEN)
    # By a kernel: at some sizes a copy command takes half as long again.
    half = torch.ones(moved // 4, dtype=torch.bfloat16, device="cuda")
    other = torch.empty_like(half)

    def ours() -> None:
        kernel(torch, given, scale)

    calls = {OURS: ours, CONTROL: ours, COPY: lambda: torch.neg(half, out=other)}
    if not args.alone:
        calls |= that_runs(torch, lambda: theirs(case, given, scale))
    return kb.interleave(calls, args.rounds)


def measured(
    torch: Any, name: str, built: list[Built], args: argparse.Namespace
) -> Iterator[Evidence]:
    """The rows of one case."""
    case, kernel = CASES[name], Call(CASES[name].config, tuple(one.kernel() for one in built))
    wrong = {f"error {n} rows": round(error(torch, case, kernel, n), 6) for n in (987, LONG)}
    for where, times in EXTREMES.items() if case.config.decay != "none" else ():
        far = error(torch, case, kernel, LONG, times)
        wrong[f"error {LONG} rows, decays near {where}"] = round(far, 6)
    for batch, heads, rows in case.sizes:
        samples = timed(torch, case, kernel, (batch, heads, rows), args)
        best = FLA if FLA in samples else COPY
        kittens = dict(case.kittens).get(rows)
        published = dict(case.flashinfer).get((batch, heads, rows))
        yield kb.row_of_times(
            samples,
            best,
            {
                "numerics": "pass" if all(x < WRONG for x in wrong.values()) else "fail",
                **wrong,
                **({} if kittens is None else {"ThunderKittens ms, earlier run": kittens}),
                **({} if published is None else {"FlashInfer ms, published": published}),
            },
            claim="linear-attention",
            kernel=name,
            shape=f"{batch}x{heads}x{rows}, q and k of {case.groups}",
            compiler=built[0].resources.compiler,
        )


def main() -> None:
    """Command line."""
    args = kb.modes(__doc__, CASES, "flash-linear-attention")
    if args.what == "merge":
        kb.merge(RESULTS, args.where)
        return
    (folder,) = args.where
    chosen = {name: CASES[name] for name in args.only.split(",")}
    if args.what == "build":
        for name, case in chosen.items():
            for part, made in programs(case.config).items():
                compiled(*made, allow=solved.FEW).write(folder / kb.slug(name) / part)
        return
    torch = kb.load_torch()
    torch.manual_seed(0)
    found: list[Evidence] = []
    for name in chosen:
        parts = programs(CASES[name].config)
        built = [Built.read(folder / kb.slug(name) / part) for part in parts]
        for row in measured(torch, name, built, args):
            found.append(row)
            write_rows(args.out / "linear_attention.json", found)
            percent = row.checks["percent of copy"]
            print(row.kernel, row.shape, round(row.ours, 4), round(row.ratio_to_best, 2), percent,
                  row.checks["numerics"], flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
