"""Claim `ladder`: one tile program from naive to peak, a step at a time.

    python -m bench.ladder build              here, no GPU: cubins under out/bench/ladder
    python -m bench.ladder run --out DIR      on the GPU machine: numerics, timing, a table
    python -m bench.ladder merge FILE...      evidence of runs into bench/results/ladder.json

Every step changes one thing, and never the program's text: its tile, its schedule or its launch
plan. docs/ladder.md says why each helps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench import attention_baselines
from bench import kernel_bench as kb
from warploom.autosched.schedules import Policy, schedule_for
from warploom.codegen.compile.build import Built, build
from warploom.codegen.ir.plan import KernelSchedule, LaunchPlan
from warploom.kernels.attention.program import AttentionConfig, attention
from warploom.kernels.gemm.program import GemmConfig, gemm
from warploom.kernels.select import select
from warploom.tile import Program

FOLDER = kb.ROOT / "out" / "bench" / "ladder"
RESULTS = kb.ROOT / "bench" / "results" / "ladder.json"
SIZE = 8192  # m, n and k; rows and keys
HEADS, HEAD_DIM = 16, 128
PLAIN = LaunchPlan(persistent=False, store="direct")


@dataclass(frozen=True)
class Step:
    """What is built at a step of the ladder; the next step replaces one field or two.

    Fields: the task's `tile`, compute `groups`, slots of the rings (`depth`), products left
    unfinished over the back edge (`flying`), and the `launch` plan. Attention alone: its two
    products one iteration apart (`apart`), groups in turn on the tensor core (`pingpong`), and
    `rescale_threshold`, by which a row's maximum may grow before its sums are rescaled.
    """

    tile: tuple[int, int] = (64, 64)
    groups: int = 1
    depth: int = 1
    flying: int = 0
    launch: LaunchPlan = PLAIN
    overlap: bool = False
    split_mask_loop: bool = False

    def on(self, **changes: Any) -> Step:
        """The step with fields changed; those that are not its own are its launch plan's."""
        own = {key: value for key, value in changes.items() if key in self.__dataclass_fields__}
        rest = {key: value for key, value in changes.items() if key not in own}
        return replace(self, **own, launch=self.launch.with_options(**rest))


def _climb(*changes: tuple[str, dict[str, Any]]) -> dict[str, Step]:
    step, steps = Step(), dict[str, Step]()
    for name, change in changes:
        step = step.on(**change)
        steps[name] = step
    return steps


GEMM = _climb(
    ("64x64 tile, one slot", {}),
    ("ring of four slots", {"depth": 4}),
    ("128x128 tile, two groups", {"tile": (128, 128), "groups": 2, "split": "m"}),
    ("128x256 tile", {"tile": (128, 256)}),
    ("one product in flight", {"flying": 1}),
    ("stores through shared memory", {"store": "tma"}),
    ("persistent blocks", {"persistent": True}),
    ("bands of 8 rows", {"supergroup": 8}),
    ("pairs of blocks share b", {"cluster": ("m_tile", 2)}),
)
ATTENTION = _climb(
    ("64x64 tile, one slot", {"split": "rows"}),
    ("rings of two slots", {"depth": 2}),
    ("128x128 tile, two groups", {"tile": (128, 128), "groups": 2}),
    ("both products in flight", {"overlap": True}),
    ("blocks of 176 keys", {"tile": (128, 176), "store": "tma", "store_panels": 1}),
    ("persistent blocks", {"persistent": True}),
    ("masked blocks apart", {"split_mask_loop": True}),
)
DEFAULT = "default"
LADDERS = {"gemm": GEMM, "attention": ATTENTION}


def made(kind: str, name: str) -> tuple[Program, KernelSchedule]:
    """Program and schedule of a step, or of what a user gets who names nothing."""
    if name == DEFAULT:
        sizes = {
            "gemm": dict.fromkeys("mnk", SIZE),
            "attention": {"rows": SIZE, "keys": SIZE, "batch": 16384 // SIZE, "heads": HEADS},
        }
        chosen = select(kind, {axis: str(size) for axis, size in sizes[kind].items()})
        assert isinstance(chosen.schedule, KernelSchedule)
        return chosen.program, chosen.schedule
    if kind == "gemm":
        step = GEMM[name]
        program = gemm(GemmConfig(tile=(*step.tile, 64)))
        order = "inflight" if step.flying else "lcsf"
        return program, schedule_for(program, Policy(order, step.launch, step.groups, step.depth))
    step = ATTENTION[name]
    program = attention(AttentionConfig(tile=step.tile, split_mask_loop=step.split_mask_loop))
    order = "overlapped" if step.overlap else "inflight" if step.flying else "lcsf"
    return program, schedule_for(program, Policy(order, step.launch, step.groups, step.depth))


def _folder(kind: str, name: str) -> Path:
    return FOLDER / kb.slug(f"{kind} {name}".replace(",", ""))


def build_all() -> None:
    """Compile every step."""
    for kind, steps in LADDERS.items():
        for name in (*steps, DEFAULT):
            program, schedule = made(kind, name)
            built = build(program, schedule)
            built.write(_folder(kind, name))
            found = built.resources
            print(f"{kind:10} {name:32} {found.registers} registers, {found.spill_bytes} B spilled")


def _operands(torch: Any, kind: str, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    lead = () if kind == "gemm" else (16384 // SIZE, HEADS)
    last = SIZE if kind == "gemm" else HEAD_DIM
    inputs, out = ("ab", "c") if kind == "gemm" else ("qkv", "o")
    values = {
        name: torch.randn(*lead, SIZE, last, device="cuda").to(torch.bfloat16) for name in inputs
    }
    return {**values, out: torch.full_like(values[inputs[0]], math.nan)}


def case(name: str, rounds: int) -> dict[str, Any]:
    """One ladder in a worker: its name."""
    torch = kb.load_torch()
    data = [_operands(torch, name, seed) for seed in range(2)]
    arrays, out = set(data[0]), "c" if name == "gemm" else "o"
    turn = [0]

    def pick() -> dict[str, Any]:
        turn[0] ^= 1
        return data[turn[0]]

    if name == "gemm":
        baselines: dict[str, Any] = {"cuBLAS": lambda: torch.mm(*map(pick().get, "ab"))}
        want = data[0]["a"].float() @ data[0]["b"].float()
    else:
        tried = attention_baselines.baselines_of(torch, "time", data, pick, AttentionConfig())
        baselines, _ = attention_baselines.usable(torch, tried)
        q, k, v = (data[0][x][:, :1].double() for x in "qkv")
        want = (torch.softmax(q @ k.mT / math.sqrt(HEAD_DIM), -1) @ v).float()
    calls = {**baselines, "control": next(iter(baselines.values()))}
    checks: dict[str, str] = {}
    for step in (*LADDERS[name], DEFAULT):
        kernel = Built.read(_folder(name, step)).kernel()

        def ours(kernel: Any = kernel) -> None:
            values = {x: v for x, v in pick().items() if x in arrays}
            kernel(values, stream=torch.cuda.current_stream().cuda_stream)

        calls[step] = ours
        turn[0] = 1
        data[0][out].fill_(math.nan)
        ours()
        got = data[0][out] if name == "gemm" else data[0][out][:, :1]
        error = float((got.float() - want).norm() / want.norm())
        checks[step] = "pass" if error < 0.01 else f"fail {error:.3g}"
    pairs = SIZE**2 * (SIZE if name == "gemm" else 2 * HEADS * HEAD_DIM * (16384 // SIZE))
    return {
        "shape": f"{name} {SIZE}",
        "dtype": "bf16",
        "default": DEFAULT,
        "work": 2 * pairs,
        "samples": kb.interleave(calls, rounds),
        "checks": checks,
        "baselines": list(baselines),
    }


def main() -> None:
    """Command line."""
    args = kb.arguments(__doc__ or "")
    if args.mode == "build":
        build_all()
    elif args.mode == "merge":
        kb.merge(RESULTS, args.files, args.fresh)
    else:
        results = kb.run_workers(case, args, [n for n in LADDERS if args.only in n])
        compiled = Built.read(_folder("gemm", DEFAULT))
        kb.report(args.out, "ladder", results, lambda _: compiled)


if __name__ == "__main__":
    main()
