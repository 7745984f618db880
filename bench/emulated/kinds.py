"""Emitted kernels of every kind, small, and faults of every class in their text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.kernels.backward_case import backward_case

from warploom import tile as t
from warploom.autosched.schedules import Policy, schedule_for
from warploom.codegen.compile.build import emitted
from warploom.codegen.ir.plan import LaunchPlan
from warploom.codegen.ir.source import CudaSource
from warploom.codegen.simt.schedule import SimtSchedule
from warploom.kernels.attention.backward_config import BackwardConfig, fitted
from warploom.kernels.attention.gradients import kernel, parts
from warploom.kernels.attention.program import AttentionConfig, attention
from warploom.kernels.attention.variants import choose_attention
from warploom.kernels.gemm.program import GemmConfig, gemm
from warploom.kernels.gemm.variant import choose_gemm
from warploom.kernels.library import entry
from warploom.kernels.recurrent.program import RecurrentConfig, default_policy, recurrent

Arrays = dict[str, NDArray[Any]]
Edit = Callable[[str], str]


@dataclass(frozen=True)
class Case:
    """A program, its emitted kernel and data; a result further than `apart` from the
    interpreter's is wrong. `counters` are no result."""

    program: t.Program
    source: CudaSource
    arrays: Arrays
    apart: float = 1e-3
    counters: tuple[str, ...] = ()
    scale: float | None = None

    @property
    def scalars(self) -> dict[str, float] | None:
        """What the program takes beside arrays."""
        return None if self.scale is None else {"scale": self.scale}


def gemm_case(m: int, n: int, k: int, plan: LaunchPlan, chosen: GemmConfig) -> Case:
    """A product on random data with three slots."""
    program = gemm(chosen)
    random = np.random.default_rng(0)
    arrays: Arrays = {
        "a": random.normal(size=(m, k)), "b": random.normal(size=(k, n)),
        "c": np.full((m, n), np.nan),
    }  # fmt: skip
    return Case(
        program,
        emitted(program, schedule_for(program, Policy("inflight", plan, groups=2, depth=3))),
        arrays,
    )


def _attention(rows: int, keys: int, head: int, plan: LaunchPlan, causal: bool = False) -> Case:
    tile = (128, 64 if head > 32 else 32)
    chosen = AttentionConfig(head_dim=head, tile=tile, causal=causal)
    program = attention(chosen)
    random = np.random.default_rng(1)
    shapes = {"q": rows, "k": keys, "v": keys}
    arrays: Arrays = {n: random.normal(size=(1, 1, count, head)) for n, count in shapes.items()}
    arrays["o"] = np.full((1, 1, rows, head), np.nan)
    schedule = schedule_for(program, Policy("pingpong", plan, groups=2, depth=2))
    return Case(program, emitted(program, schedule), arrays)


def _backward(config: BackwardConfig) -> Case:
    """The gradients of a tile of keys."""
    arrays, _ = backward_case(config, 200, 300, heads=config.group)
    program, policy, _ = kernel(config, "main")
    own = {array.name: arrays[array.name] for array in program.arrays}
    source = emitted(program, schedule_for(program, policy))
    return Case(program, source, own, counters=("turns",))


def _staged() -> Case:
    """Linear attention: the state is made in registers and read by matmuls from shared memory."""

    def body(q: t.Array, k: t.Array, v: t.Array, o: t.Array) -> None:
        (head,) = t.grid(heads=t.size("heads"))
        state = t.zeros(d=64, e=64)
        for i in t.loop(t.cdiv(t.size("m"), 64)):
            here, there = t.span(i * 64, 64), t.span(i * 64, 64, "n")
            keys = t.load(k, head, there, t.span(0, 64))
            queries = t.load(q, head, here, t.span(0, 64))
            values = t.load(v, head, there, t.span(0, 64))
            scores = t.causal(t.coordinate("m", 64), t.coordinate("n", 64), queries @ keys, 0.0)
            out = scores.cast(t.BF16) @ values
            out += queries @ state.cast(t.BF16)
            state += keys @ values
            t.store(o, head, here, t.span(0, 64), tile=out)

    dims = {"q": "heads m d", "k": "heads n d", "v": "heads n e"}
    kinds = {name: t.array(t.BF16, text) for name, text in dims.items()}
    program = t.trace(body, {**kinds, "o": t.array(t.FP32, "heads m e")}, name="linear_attention")
    random = np.random.default_rng(8)
    arrays: Arrays = {n: random.integers(-1, 2, (2, 200, 64)).astype(float) for n in "qkv"}
    arrays["o"] = np.full((2, 200, 64), np.nan)
    schedule = schedule_for(program, Policy("multistage", LaunchPlan(store="direct")))
    return Case(program, emitted(program, schedule), arrays)


def _threads() -> Case:
    """Rows that several warps share: sums over them, and their transposed store."""

    def body(x: t.Array, y: t.Array, z: t.Array) -> None:
        (i,) = t.grid(m=t.cdiv(t.size("m"), 32))
        rows, cols = t.span(i * 32, 32), t.span(0, 96)
        tile = t.load(x, rows, cols)
        t.store(y, rows, tile=t.sum_along(tile * tile, "n"))
        t.store(z, cols, rows, tile=tile.T)

    kinds = {"x": t.array(t.FP32, "m n"), "y": t.array(t.FP32, "m"), "z": t.array(t.FP32, "n m")}
    program = t.trace(body, kinds, name="rows")
    random = np.random.default_rng(3)
    arrays: Arrays = {
        "x": random.normal(size=(70, 96)), "y": np.full(70, np.nan), "z": np.full((96, 70), np.nan)
    }  # fmt: skip
    schedule = SimtSchedule("shared", 128, 1, 4)
    return Case(program, emitted(program, schedule, "sm_90a"), arrays)


def _recurrent(config: RecurrentConfig) -> Case:
    """Heads that go through four chunks, the last one with eight rows; a block has two."""
    program = recurrent(config)
    source = emitted(program, schedule_for(program, default_policy(config)))
    made: Any = import_module("tests.kernels.test_recurrent")
    return Case(program, source, made.case(config, rows=200, heads=4), scale=0.1)


ROWS = LaunchPlan(split="rows")
TILE = (128, 64, 16)
KINDS: dict[str, Callable[[], Case]] = {
    "GEMM": lambda: gemm_case(
        300, 200, 100, LaunchPlan(split="m", store_panels=1), GemmConfig(tile=(128, 128, 16))
    ),
    "attention": lambda: _attention(
        330, 170, 32, ROWS.with_options(tile_scheduler="dynamic"), causal=True
    ),
    "staged": _staged,
    "clusters": lambda: gemm_case(
        300, 136, 100, LaunchPlan(split="m", cluster=("m_tile", 2)), GemmConfig(tile=TILE)
    ),
    "cluster reduction": lambda: gemm_case(
        300,
        70,
        100,
        LaunchPlan(split="m", cluster=("slices_tile", 2)),
        GemmConfig(tile=TILE, slices=2, in_cluster=True),
    ),
    "stores over queries": lambda: _attention(600, 130, 64, ROWS.with_options(store_over="q_t")),
    "chained tasks": lambda: _attention(
        600, 100, 32, ROWS.with_options(overlap_next_task=True, task_rings={"q_t": 2})
    ),
    "attention backward": lambda: _backward(BackwardConfig(causal=True, group=2)),
    "sums in turn": lambda: _backward(BackwardConfig(head_dim=64, causal=True, deterministic=True)),
    "Mamba-2": lambda: _recurrent(RecurrentConfig("step", shared=True, final=True)),
    "gated delta rule": lambda: _recurrent(RecurrentConfig("token", delta=True)),
    "threads only": _threads,
}


def library() -> dict[str, Case]:
    """The kernels that the tuned tables give for shapes of the docs, on small arrays, by name."""
    fp8 = GemmConfig(dtype=t.E4M3, out=t.BF16, b="nk", scales=True)
    bases = {"": GemmConfig(), "fp8 ": fp8, "gelu ": GemmConfig(bias=True, activation="gelu")}
    shapes = [(1024, 1024, 1024), (8192, 8192, 8192), (2048, 2048, 16384), (256, 256, 8192)]
    found: dict[str, Case] = {}
    for name, base in bases.items():
        for shape in shapes if not name else shapes[1:2]:
            choice = choose_gemm(*shape, base, 1, sliced=not name)
            chosen = choice.config(base)
            program = gemm(chosen)
            sizes = {"m": 300, "n": 264, "k": 200, "batch": 1, "one": 1, "slices": chosen.slices}
            arrays = entry("gemm").arrays(program, sizes, 0)
            source = emitted(program, choice.schedule(chosen))
            found[f"{name}gemm {choice.name}"] = Case(program, source, arrays, 2e-2)
    for head, causal, rows in product((64, 128), (False, True), (1024, 16384)):
        base = AttentionConfig(head_dim=head, causal=causal)
        choice = choose_attention(rows, base, heads=16384 // rows * (2048 // head))
        chosen = choice.config(base)
        program = attention(chosen)
        sizes = {"batch": 1, "heads": 2, "kv_heads": 2, "rows": 300, "keys": 300, "d": head}
        arrays = entry("attention").arrays(program, sizes, 0)
        source = emitted(program, choice.schedule(chosen))
        mask = "causal" if causal else "full"
        found[f"attention {head} {mask} {choice.name}"] = Case(program, source, arrays, 2e-2)
    return found


GRADIENTS: dict[str, dict[str, Any]] = {
    **{f"{d} {mask}": {"head_dim": d, "causal": mask == "causal"}
       for d in (64, 96, 128, 256) for mask in ("full", "causal")},
    "128 causal, grouped": {"causal": True, "group": 2},
    "128 causal, a window": {"causal": True, "window": 100},
    "128 causal, a soft cap": {"causal": True, "softcap": 5.0},
    "128 full, in turn": {"deterministic": True},
    "128 causal, in turn": {"causal": True, "deterministic": True},
    "64 causal, in turn": {"head_dim": 64, "causal": True, "deterministic": True},
    "64 full, fp16": {"head_dim": 64, "dtype": t.FP16},
    "192 causal, values of 128": {"head_dim": 192, "value_dim": 128, "causal": True},
}  # fmt: skip


def gradients() -> Iterator[tuple[str, Case]]:
    """The kernels that a user gets for attention's gradients, on small arrays, by name."""
    for name, settings in GRADIENTS.items():
        config = fitted(BackwardConfig(**settings), 200, 300)
        values, want = backward_case(config, 200, 300, heads=config.group)
        values |= {"o": want["o"], "lse": want["lse"], "dq": np.full_like(want["dq"], np.nan)}
        for part in parts(config):
            program, policy, _ = kernel(config, part)
            arrays = {array.name: values[array.name] for array in program.arrays}
            if part == "finish":
                shape = arrays["dq_sum"].shape
                arrays["dq_sum"] = np.random.default_rng(0).standard_normal(shape)
            source = emitted(program, schedule_for(program, policy), "sm_90a")
            found = Case(program, source, arrays, 8e-3, counters=("turns",))
            yield f"gradients {name}, {part}", found


@cache
def case(kind: str) -> Case:
    """The kernel of a kind."""
    return KINDS[kind]()


def _swap(pattern: str, instead: str | Callable[[re.Match[str]], str]) -> Edit:
    return lambda text: re.sub(pattern, instead, text)


def _bytes(factor: int, of: int) -> Edit:
    return _swap(
        r"barrier_expect\(([^;]*), (\d+)\);",
        lambda found: f"barrier_expect({found[1]}, {int(found[2]) * factor // of});",
    )


def _last(pattern: str) -> Edit:
    """Without the last place that fits."""

    def edit(text: str) -> str:
        places = list(re.finditer(pattern, text))
        return text[: places[-1].start()] + text[places[-1].end() :] if places else text

    return edit


def _of_three_groups(edit: Edit) -> Edit:
    """Two groups of 128 threads hold as many registers as an instruction can name."""
    return lambda text: text if "__launch_bounds__(256" in text else edit(text)


def _operand(text: str) -> str:
    """A write to operand A of a wgmma, before the wait for it."""
    found = re.search(r"wgmma_m64n\d+_\w+_rs\w*\([^;]*?, ([^,;]*), descriptor", text)
    if found is None:
        return text
    at = text.index("wgmma_commit();", found.end()) + len("wgmma_commit();")
    return f"{text[:at]} *(unsigned*)({found[1]}) = 0;{text[at:]}"


# class -> edit of the text of a kernel; a text that stays as it is has nothing of the class.
CLASSES: dict[str, Edit] = {
    "accumulators read before the wait": _swap(r"wgmma_wait<\d>\(\);", ";"),
    "one matmul too few waited for": _swap(
        r"wgmma_wait<(\d)>", lambda found: f"wgmma_wait<{int(found[1]) + 1}>"
    ),
    "accumulators written before the wait": _swap(
        r"(wgmma_wait<\d>\(\);\s*pin\((\w+)\);)", r"\2[0][0] += 0.0f; \1"
    ),
    "operand A in registers written before the wait": _operand,
    "no wgmma.fence": _swap(r"wgmma_fence\(\);", ";"),
    "no wgmma.commit_group": _swap(r"wgmma_commit\(\);", ";"),
    "no proxy fence after generic writes": _swap(r"fence_async\(\);", ";"),
    "bulk stores not waited for": _swap(r"store_wait_read<\d>\(\);", ";"),
    "panels not waited for": _swap(r"if \(threadIdx.x % 128 == 0\) store_wait_read<\d>\(\);", ";"),
    "stores not waited for at the end": _last(r"store_wait_read<\d>\(\);"),
    "one store too few waited for": _swap(
        r"store_wait_read<(\d)>", lambda found: f"store_wait_read<{int(found[1]) + 1}>"
    ),
    "no fence of barriers": _swap(r"fence_barrier_init\(\);", ";"),
    "no meeting of the cluster": _swap(r"cluster_sync\(\);", ";"),
    "no meeting of the cluster at the end": _last(r"cluster_sync\(\);"),
    "no __syncthreads": _swap(r"__syncthreads\(\);", ";"),
    "no meeting of a warp group": _swap(
        r"if \(part == 0\) named_sync<.*?>\(\); else [^;]*;(?: else [^;]*;)*|named_sync<[^;]*;", ";"
    ),
    "no __syncwarp": _swap(r"__syncwarp\(\);", ";"),
    "register pool exceeded": _of_three_groups(
        _swap(r"registers_up<(\d+)>", lambda found: f"registers_up<{int(found[1]) + 16}>")
    ),
    "registers not given back": _of_three_groups(_swap(r"registers_down<\d+>\(\);", ";")),
    "fewer bytes expected": _bytes(1, 2),
    "more bytes expected": _bytes(2, 1),
    "no wait for copies": _swap(r"barrier_wait\(\w*full[^;]*;", ";"),
    "no wait for slots": _swap(r"barrier_wait\(\w*(?:empty|free)[^;]*;", ";"),
    "wrong phase": _swap(r"(barrier_wait\(\w*full[^;]*)\);", r"\1 ^ 1);"),
    "arrivals missing": _swap(
        r"(?:if \(lane[^;]*\) )?barrier_arrive(?:_at)?\(\w*(?:empty|free)[^;]*;", ";"
    ),
    "arrivals twice": _swap(
        r"((?:if \(lane[^;]*\) )?barrier_arrive(?:_at)?\(\w*(?:empty|free)[^;]*;)", r"\1 \1"
    ),
}


# What is no fault there, though the text has it.
EQUIVALENT = {
    ("stores over queries", "stores not waited for at the end"): (
        "every task waits for its stores before it gives the queries' slot back"
    )
}


def planted(kind: str, name: str) -> CudaSource | None:
    """The kernel of a kind with a fault of a class; None where it has nothing of that class."""
    if (kind, name) in EQUIVALENT:
        return None
    source = case(kind).source
    body = source.text.index('extern "C"')
    text = source.text[:body] + CLASSES[name](source.text[body:])
    return None if text == source.text else replace(source, text=text)
