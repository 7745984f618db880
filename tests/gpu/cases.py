"""Small launches that tests and the sanitizer share: program, schedule, inputs, tolerance.

`python tests/gpu/cases.py FOLDER` compiles them all into a cache, for a machine with a GPU and no
compiler (`WARPLOOM_CACHE=FOLDER`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.codegen.axis_program import axis_case
from tests.codegen.exchange_program import exchange_case
from tests.codegen.narrow_program import added_case, narrow_case
from tests.codegen.random_program import random_case
from tests.codegen.simt_programs import PROGRAMS as SIMT_PROGRAMS
from tests.codegen.simt_programs import make as simt_program
from tests.codegen.state_program import state_case
from tests.kernels.backward_case import backward_case
from tests.kernels.decode_case import decode_case
from tests.kernels.grouped_case import grouped_case

from warploom.autosched.plans import ADDING
from warploom.autosched.points import Point
from warploom.autosched.schedules import Policy, schedule_for
from warploom.codegen.compile.build import SIMT_ARCHITECTURES, Built, build, compile_source
from warploom.codegen.ir.plan import LaunchPlan
from warploom.codegen.simt.choose import simt
from warploom.kernels.attention.append import append, append_schedule
from warploom.kernels.attention.backward_config import (
    LONG_STYLES,
    STYLES,
    BackwardConfig,
    fitted,
)
from warploom.kernels.attention.decode import decode, decode_policy
from warploom.kernels.attention.gradients import kernel as gradient_kernel
from warploom.kernels.attention.variants import ATTENTION, choose_attention
from warploom.kernels.check import run_on_gpu
from warploom.kernels.convolution.config import ConvolutionConfig
from warploom.kernels.convolution.program import default_policy as convolution_policy
from warploom.kernels.convolution.program import long_convolution
from warploom.kernels.gemm.grouped import grouped, grouped_policy
from warploom.kernels.gemm.program import combine
from warploom.kernels.gemm.variant import GEMM, choose_gemm
from warploom.kernels.gemm.weight_only import weight_only, weight_only_policy
from warploom.kernels.library import configure, entry, random_arrays
from warploom.kernels.recurrent import hedgehog, solved
from warploom.kernels.recurrent.backward import ALLOW, backward_policy, parts_of, recurrent_backward
from warploom.kernels.recurrent.program import RecurrentConfig, default_policy, recurrent
from warploom.kernels.rows.choose import row_kernel, scaled_kernel, sums_kernel
from warploom.kernels.rows.program import RowConfig
from warploom.kernels.tuned.variant import Variant
from warploom.tile import BF16, FP16, INT32, Program, interpret

Values = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Case:
    """One launch; the interpreter gives what it must leave, within `bound` (relative, in norm)."""

    program: Program
    schedule: Any
    arrays: Mapping[str, NDArray[Any]]
    scalars: Mapping[str, float] = field(default_factory=dict[str, float])
    bound: float = 8e-3
    arch: str = "sm_90a"
    allow: tuple[str, ...] = ()
    family: str = ""
    edit: tuple[str, str] | None = None  # a text of the emitted code and what it becomes
    counters: tuple[str, ...] = ()  # arrays that are no result

    def built(self) -> Built:
        """The compiled kernel."""
        done = build(self.program, self.schedule, self.arch, self.allow)
        if self.edit is None:
            return done
        assert self.edit[0] in done.source.text
        source = replace(done.source, text=done.source.text.replace(*self.edit))
        cubin, resources = compile_source(source, self.arch, self.allow, SIMT_ARCHITECTURES)
        return replace(done, source=source, cubin=cubin, resources=resources)

    def errors(self) -> dict[str, float]:
        """Run it: the relative error of every array; infinite where other elements are finite."""
        got = run_on_gpu(self.program, self.built(), self.arrays, self.scalars)
        want = interpret(self.program, self.arrays, self.scalars)
        results = [name for name in want if name not in self.counters]
        return {name: distance(got[name], want[name]) for name in results}


def distance(got: NDArray[Any], want: NDArray[Any]) -> float:
    """Norm of the difference over the norm of `want`; inf when NaN or inf differ in place."""
    got, want = got.astype(np.float64), want.astype(np.float64)
    finite = np.isfinite(want)
    if not np.array_equal(finite, np.isfinite(got)):
        return float("inf")
    if not np.array_equal(got[~finite], want[~finite], equal_nan=True):
        return float("inf")
    gap = np.linalg.norm(got[finite] - want[finite])
    return float(gap / (np.linalg.norm(want[finite]) or 1.0))


def _gemm(tile: str, *words: str, rules: tuple[str, ...] = ()) -> Variant:
    """A variant of GEMM with one matmul in flight and rings of four or as many as the words say."""
    point = Point((("tile", tile),), rules, "inflight", ("depth=4",))
    return Variant(tile, point.having("raster=8", *words), GEMM.template)


PAIR, WIDE = "cluster=m_tile:2", "registers=40"
VARIANTS = {
    "128x256": _gemm("128,256", PAIR),
    "128x128": _gemm("128,128", PAIR, "depth=6"),
    "128x192": _gemm("128,192", PAIR),
    "256x128": _gemm("256,128", PAIR, "panels=1", "groups=2"),
    "128x128-dependent": _gemm("128,128", PAIR, "depth=6", "launch=dependent"),
    "128x256-by-4": _gemm("128,256", "cluster=m_tile:4"),
    # rows that a cluster cuts unevenly, panels that overlap
    "152x128-swap-ab": _gemm(
        "152,128", "cluster=n_tile:2", "rows=40", WIDE, rules=("swap_operands",)
    ),
    "128x200": _gemm("128,200", PAIR),
    "in_cluster": _gemm("128,64", "slices=4", "panels=1", WIDE),
    "parts": _gemm("128,64", PAIR, "parts=4", "panels=1", WIDE),
    **{name: GEMM.find(name) for name in ("cluster-reduce6-64x64", "192x256", "192x256-along-n")},
}


def gemm(
    shape: str, variant: str = "", seed: int = 0, adding: bool = False, **settings: str
) -> Case:
    """A GEMM of m x n x k (or batch x m x n x k): the variant its shape gets, or a named one.

    One in parts has two kernels: the first is meant, or the one that is `adding` them up.
    """
    sizes = dict(zip(("batch", "m", "n", "k")[-len(shape.split("x")) :], shape.split("x"),
                     strict=True))  # fmt: skip
    config, dims = configure("gemm", {**sizes, **settings})
    batch = dims["batch"] if config.batched else 1
    choice = VARIANTS[variant] if variant else choose_gemm(
        dims["m"], dims["n"], dims["k"], config, batch
    )  # fmt: skip
    config = choice.config(config)
    program, schedule = entry("gemm").program(config), choice.schedule(config)
    arrays = random_arrays(program, {**dims, "slices": config.slices}, seed)
    if adding:
        program, schedule = combine(config), ADDING
        arrays |= random_arrays(program, {**dims, "slices": config.slices}, seed)
    return Case(program, schedule, arrays, bound=5e-3, family="gemm")


def attention(variant: str = "", seed: int = 0, rising: float = 0.0, **settings: str) -> Case:
    """Attention with the variant its shape gets, or a named one; `rising`: by how much scores grow
    from the first key to the last."""
    config, dims = configure("attention", settings)
    choice = ATTENTION.variants[variant] if variant else choose_attention(dims["rows"], config)
    config = choice.config(config)
    program = entry("attention").program(config)
    arrays = random_arrays(program, dims, seed)
    arrays |= {name: abs(array) for name, array in arrays.items() if name.startswith("scale_")}
    if rising:
        arrays["q"][..., 0] = config.head_dim**0.5
        arrays["k"][..., 0] = np.linspace(0, rising, dims["keys"])
    return Case(program, choice.schedule(config), arrays, allow=choice.allow, family="attention")


def gradients(part: str, rows: int, keys: int, heads: int = 2, **settings: Any) -> Case:
    """One of the kernels of a backward pass, as it is chosen for so many rows and keys."""
    config = fitted(BackwardConfig(**settings), rows, keys)
    program, policy, allow = gradient_kernel(config, part)
    values, want = backward_case(config, rows, keys, batch=2, heads=heads)
    values |= {"o": want["o"], "lse": want["lse"], "dq": np.full_like(want["dq"], np.nan)}
    if part == "prepare":
        values |= {x: np.full_like(values[x], np.nan) for x in ("base", "delta")}
    if part == "finish":
        values["dq_sum"] = np.random.default_rng(0).standard_normal(values["dq_sum"].shape)
    arrays: Values = {array.name: values[array.name] for array in program.arrays}
    schedule = schedule_for(program, policy)
    return Case(program, schedule, arrays, allow=allow, family="attention backward",
                counters=("turns",))  # fmt: skip


def simt_case(name: str) -> Case:
    """A program without a matmul, under the schedule its sizes get."""
    program, arrays, scalars, bound = simt_program(name)
    # MUFU approximations: exp2 and log2 have 2 ulp, tanh 2^-11 (PTX ISA, ex2, lg2, tanh)
    return Case(program, simt(program), arrays, scalars, max(bound, LOOSER.get(name, 0.0)),
                family="simt")  # fmt: skip


def copied_gemm(shape: str, **settings: str) -> Case:
    """A GEMM by cp.async and mma.sync, built for any GPU of compute capability 9.0."""
    sizes = dict(zip(("m", "n", "k"), shape.split("x"), strict=True))
    config, dims = configure("gemm", {"tile": "128,128,32", **sizes, **settings})
    program = entry("gemm").program(config)
    schedule = schedule_for(
        program, Policy("inflight", LaunchPlan(split="m", store="direct"), groups=2, depth=4)
    )
    return Case(program, schedule, random_arrays(program, dims), bound=5e-3, arch="sm_90",
                family="sm80")  # fmt: skip


def copied_attention(**settings: str) -> Case:
    """Attention by the same means."""
    config, dims = configure("attention", {"tile": "128,64", "head_dim": "64", **settings})
    program = entry("attention").program(config)
    schedule = schedule_for(
        program, Policy("multistage", LaunchPlan(split="rows", store="direct"), groups=2)
    )
    return Case(program, schedule, random_arrays(program, dims), arch="sm_90", family="sm80")


def axes(arch: str) -> Case:
    """Everything along an axis, beside a matmul."""
    program, schedule, arrays = axis_case()
    return Case(program, schedule, arrays, bound=1e-4, arch=arch, family="axes")


def narrow(arch: str) -> Case:
    """Stores, loads and arithmetic in every narrow type, and wide angles, beside a matmul."""
    program, schedule, arrays = narrow_case()
    if arch == "sm_90a":
        schedule = replace(schedule, launch=schedule.launch.with_options(store="tma"))
    return Case(program, schedule, arrays, bound=1e-4, arch=arch, family="narrow")


def added(store: str, arch: str) -> Case:
    """Slices of a sum that are added in memory."""
    program, schedule, arrays = added_case(store)
    return Case(program, schedule, arrays, bound=0.0, arch=arch, family="narrow")


def exchange(arch: str, groups: int) -> Case:
    """Gathers, scans and odd parts beside a matmul."""
    program, schedule, arrays = exchange_case(groups)
    # Everything at once on 128 rows of one group: a few registers too many, and no matter here.
    return Case(program, schedule, arrays, bound=1e-5, arch=arch, allow=("spills", "stack"),
                family="exchange")  # fmt: skip


def drawn(seed: int, arch: str) -> Case:
    """A random program around a matmul."""
    program, schedule, arrays = random_case(seed, "tma" if arch == "sm_90a" else "direct")
    return Case(program, schedule, arrays, bound=0.0, arch=arch, family="random")


def state(rows: int, arch: str) -> Case:
    """Linear attention: a state in registers is a matmul's operand in shared memory."""
    program, arrays = state_case(rows=rows)
    schedule = schedule_for(
        program, Policy("lcsf" if arch == "sm_90a" else "multistage"), arch=arch
    )
    return Case(program, schedule, arrays, bound=0.0, arch=arch, family="state")


def recurrence(name: str) -> Case:
    """Recurrent attention whose last chunk is not whole."""
    # Not above: these modules take `distance` from this one.
    made = import_module(f"tests.kernels.test_{'hedgehog' if name == 'hedgehog' else 'recurrent'}")
    if name == "hedgehog":
        program, policy = hedgehog.hedgehog(hedgehog.HedgehogConfig(72)), hedgehog.default_policy()
        arrays = made.case(hedgehog.HedgehogConfig(72), 150, 136)
    else:
        config = RECURRENCES[name]
        program, policy = recurrent(config), default_policy(config)
        arrays = made.case(config)
    schedule = schedule_for(program, policy)
    return Case(program, schedule, arrays, {"scale": 0.1}, family="recurrent")


def row_operation(op: str, columns: int, *options: str) -> Case:
    """Some rows of a row operation, with the plan that its length gets."""
    program, schedule, rows = row_kernel(RowConfig(op, columns, options=frozenset(options)))
    random, values = np.random.default_rng(columns), dict[str, NDArray[Any]]()
    sizes = {"m": 2 * rows + 1, "n": columns, "words": 2, "seeds": 2, "parts": 2}
    for one in program.arrays:
        shape = [sizes[dim] for dim in one.dims]
        whole = one.dtype is INT32
        drawn_ = random.integers(0, columns, shape) if whole else random.normal(size=shape)
        values[one.name] = drawn_ if one.name != "rstd" else abs(drawn_)
    if "target" in values:
        values["target"][0] = -100
    scalars = {var.name: {"eps": 1e-6, "p": 0.3}[var.name] for var in program.scalars}
    bound = 0.05 if "y" in values and "scale" in values else 8e-3
    return Case(program, schedule, values, scalars, bound, family="rows")


def beside_rows(made: tuple[Program, Any], **sizes: int) -> Case:
    """What row operations end with: sums of parts, and products in place."""
    program, schedule = made
    shapes = {one.name: [sizes[dim] for dim in one.dims] for one in program.arrays}
    random = np.random.default_rng(7)
    values: Values = {name: random.normal(size=shape) for name, shape in shapes.items()}
    values |= {name: np.ones(shapes[name]) for name in ("changes",) if name in shapes}
    return Case(program, schedule, values, family="rows")


def served(kind: str, name: str) -> Case:
    """A kernel of serving on the inputs of its own tests: decode, mixed batches, new tokens into a
    cache, experts, narrow weights."""
    made = import_module(f"tests.kernels.test_{kind}")
    config, *sizes = (
        one if isinstance(one := getattr(made, SERVED[kind][0])[name], tuple) else [one]
    )
    program, policy, arrays = SERVED[kind][1](made, config, list(sizes))
    bound = 0.05 if "8 bits" in name or kind == "append" else 8e-3
    schedule = schedule_for(program, policy) if isinstance(policy, Policy) else policy
    return Case(program, schedule, arrays, bound=bound, family="serving")


def _decode(_: Any, config: Any, sizes: list[Any]) -> tuple[Program, Any, Values]:
    return decode(config), decode_policy(config), decode_case(config, *sizes)[0]


def _mixed(made: Any, config: Any, _: list[Any]) -> tuple[Program, Any, Values]:
    return decode(config), decode_policy(config), made.case(config)[0]


def _append(made: Any, config: Any, _: list[Any]) -> tuple[Program, Any, Values]:
    return append(config), append_schedule(config), made.arrays_of(config)


def _grouped(_: Any, config: Any, sizes: list[Any]) -> tuple[Program, Any, Values]:
    counts, n, k = sizes
    whole = -(-k // 16) * 16  # TMA wants rows of multiples of 16 bytes
    return grouped(config), grouped_policy(config), grouped_case(config, counts, n, whole)[0]


def _weight_only(made: Any, config: Any, sizes: list[Any]) -> tuple[Program, Any, Values]:
    return weight_only(config), weight_only_policy(config), made.case(config, *sizes)[0]


# kind -> (its tests' table of configurations, what makes program, schedule and inputs, which names)
SERVED: dict[str, tuple[str, Callable[..., tuple[Program, Any, Values]], tuple[str, ...]]] = {
    "decode": ("CASES", _decode, (
        "dense", "one part", "pages of 16", "window", "sinks", "8 bits", "8 bits, pages of 16",
        "latent", "latent, 8 bits", "two groups",
        "few rows", "few rows, one part", "few rows, 8 bits",
    )),
    "mixed": ("CONFIGS", _mixed, ("one group", "two groups, window")),
    "append": ("CASES", _append, ("rotated", "pages", "8 bits")),
    "grouped": ("CASES", _grouped, (
        "blocks", "promoted rows", "rows of experts", "rows of experts, rows", "turned", "masked",
        "swiglu, blocks",
    )),
    "weight_only": ("CASES", _weight_only, ("two groups", "slices", "nibbles of groups")),
}  # fmt: skip


def packed_gradients(name: str, part: str) -> Case:
    """One of the kernels of a backward pass over packed sequences."""
    made = import_module("tests.kernels.test_attention_packed_backward")
    config, values, want = made.packed_case(name)
    cases: dict[str, Case] = {}

    def run(step: str, program: Program, policy: Policy, given: Values) -> Values:
        schedule, allow = schedule_for(program, policy), gradient_kernel(config, step)[2]
        cases[step] = Case(program, schedule, dict(given), allow=allow,
                           family="attention backward", counters=("turns",))  # fmt: skip
        return {} if part in cases else interpret(program, given)

    made.run_parts(config, values, want, run)
    return cases[part]


def cut_gradients(part: str) -> Case:
    """One of the kernels of gradients whose last tasks are cut in pieces."""
    made = import_module("tests.kernels.test_attention_backward")
    config, rows, keys, heads = made.CUT["cut"]
    values, _ = made.backward_case(config, rows, keys, heads=heads)
    for step in ("main", "tail", "settle"):
        program, policy, allow = gradient_kernel(config, step)
        arrays: Values = {array.name: values[array.name] for array in program.arrays}
        if step == part:
            break
        values |= interpret(program, arrays)
    return Case(program, schedule_for(program, policy), arrays, allow=allow,
                family="attention backward", counters=("turns",))  # fmt: skip


def convolution(config: ConvolutionConfig, batch: int = 3) -> Case:
    """Long convolution of so many sequences of two tiles of heads."""
    made = import_module("tests.kernels.test_convolution")
    program = long_convolution(config)
    schedule = schedule_for(program, convolution_policy(config))
    return Case(program, schedule, made.case(config, batch)[0], bound=1e-3, family="convolution")


ROWS = {
    "held": ("rmsnorm", 8192),
    "several-a-task": ("softmax", 1024),
    "staged": ("layernorm", 16384),
    "cluster": ("softmax", 65536),
    "cluster-of-8": ("rmsnorm", 131072),
    "picked": ("cross_entropy", 32000),
    "in-place": ("cross_entropy_both", 4096),
    "odd": ("layernorm_backward", 1001, "bias"),
    "again": ("rmsnorm_backward", 16384, "residual"),
    "again-in-a-cluster": ("rmsnorm_backward", 32768),
    "fp8": ("rmsnorm", 4096, "fp8", "residual"),
    "dropout": ("layernorm", 4096, "dropout", "residual"),
    "gates": ("gated_backward", 14336),
}


def recurrence_in_two(name: str, number: int) -> Case:
    """One of the two kernels of a delta rule, the second one with what the first leaves."""
    made = import_module("tests.kernels.test_recurrent_solved")
    config, scale = made.CASES[name], {"scale": 0.5}
    both, values = list(solved.kernels(config)), made.inputs(config)
    for program, _ in both[:number]:
        values |= interpret(program, made.of(program, values), scale)
    program, policy = both[number]
    return Case(program, schedule_for(program, policy), made.of(program, values), scale,
                allow=solved.FEW, family="recurrent")  # fmt: skip


def recurrence_backward(name: str, part: str) -> Case:
    """One of the kernels of a recurrence's backward pass."""
    inputs = import_module("tests.kernels.recurrent_backward_case")
    config = import_module("tests.kernels.test_recurrent_backward").CASES[name]
    values, _ = inputs.backward_case(config)
    if part != parts_of(config)[0]:
        values |= inputs.interpreted(config, values)
    program, policy = recurrent_backward(config, part), backward_policy(config, part)
    arrays = inputs.of_part(config, values, part)
    return Case(program, schedule_for(program, policy), arrays, {"scale": inputs.SCALE},
                allow=ALLOW, family="recurrent")  # fmt: skip


RECURRENCES = {
    "mamba2": RecurrentConfig("step", softplus=True, skip=True, final=True),
    "gla": RecurrentConfig("channel", gates=BF16, initial=True),
    "simple-gla": RecurrentConfig("token", initial=True, final=True),
    "gated-delta": RecurrentConfig("token", delta=True, final=True),
    "based": RecurrentConfig("none", taylor=True, key_dim=16),
}
RECURRENT_GRADIENTS = {
    "mamba": ("rows",),
    "mamba-128": ("rows",),
    "wide": ("rows",),
    "gla": ("keys", "queries"),
    "delta": ("values", "rest"),
    "gated-delta": ("values", "rest"),
}
LOOSER = {"maps": 2e-3, "layernorm": 2e-5, "complex": 1e-5}
CASES: dict[str, Callable[[], Case]] = {
    "gemm": lambda: gemm("200x264x136", "128x256"),
    "gemm-one-row": lambda: gemm("1x264x72"),
    "gemm-no-depth": lambda: gemm("130x72x0", "128x256"),
    "gemm-one-step": lambda: gemm("130x264x8", "128x128"),
    "gemm-transposed": lambda: gemm("264x136x72", "128x128", a="km", b="nk"),
    "gemm-batched-epilogue": lambda: gemm(
        "2x200x264x136", "128x192", batched="true", bias="true", residual="true",
        activation="gelu", scale="0.5",
    ),
    "gemm-fp16-silu": lambda: gemm("200x264x136", "256x128", dtype="fp16", out="fp16",
                                   activation="silu"),
    "gemm-fp8": lambda: gemm("200x272x144", "128x256", dtype="e4m3", b="nk"),
    "gemm-swap-ab": lambda: gemm("328x264x136", "152x128-swap-ab"),
    "gemm-swap-ab-epilogue": lambda: gemm(
        "2x200x136x72", "152x128-swap-ab", a="km", b="nk", bias="true", residual="true"
    ),
    "gemm-any-columns": lambda: gemm("200x424x136", "128x200"),
    "gemm-cluster-reduce": lambda: gemm("300x136x1000", "in_cluster"),
    "gemm-cluster-reduce-of-six": lambda: gemm("200x136x1000", "cluster-reduce6-64x64"),
    "gemm-parts": lambda: gemm("300x136x1000", "parts"),
    "gemm-parts-added": lambda: gemm("300x136x1000", "parts", adding=True, bias="true"),
    "gemm-three-groups": lambda: gemm("800x520x200", "192x256"),
    "gemm-three-groups-epilogue": lambda: gemm(
        "400x264x136", "192x256-along-n", bias="true", activation="gelu"
    ),
    "gemm-cluster-of-4": lambda: gemm("700x264x136", "128x256-by-4"),
    "attention": lambda: attention(rows="200", keys="200"),
    **{
        f"attention-fp8-{d}": lambda d=d: attention(
            rows="300", keys="400", head_dim=d, dtype="e4m3", causal="true"
        )
        for d in ("64", "128", "256")
    },
    "attention-one-key": lambda: attention(rows="130", keys="1"),
    "attention-no-keys": lambda: attention(rows="130", keys="0", lse="true"),
    "attention-causal": lambda: attention(
        rows="300", keys="300", causal="true", heads="4", group="2", lse="true"
    ),
    "attention-window": lambda: attention(rows="300", keys="400", head_dim="64",
                                          causal="true", window="100"),
    "attention-optimistic": lambda: attention(
        "192x128-serpentine-early-optimistic", rows="300", keys="700", head_dim="64", causal="true",
        lse="true",
    ),
    "attention-optimistic-wrong": lambda: attention(
        "192x112-overlap-early-optimistic", rising=90.0, rows="200", keys="700", head_dim="96",
        lse="true",
    ),
    "attention-over": lambda: attention("128x80-cooperative-split", rows="300", keys="300",
                                        head_dim="256"),
    # More tasks than SMs: a block starts the next one's first matmul before its stores.
    "attention-overlap": lambda: attention("128x128-dynamic16-overlap", rows="300", keys="300",
                                         head_dim="64", causal="true", batch="8", heads="8"),
    **{
        f"backward-{part}": lambda part=part: gradients(part, 200, 300, causal=True)
        for part in ("prepare", "main", "finish")
    },
    "backward-full": lambda: gradients("main", 200, 300),
    "backward-grouped": lambda: gradients("main", 300, 300, heads=4, causal=True, group=2),
    "backward-grouped-full": lambda: gradients("main", 200, 300, heads=4, group=2),
    "backward-window": lambda: gradients("main", 400, 400, causal=True, window=100),
    "backward-window-64": lambda: gradients(
        "main", 400, 400, head_dim=64, causal=True, window=100
    ),
    "backward-64": lambda: gradients("main", 300, 300, head_dim=64, causal=True),
    "backward-fp16": lambda: gradients("main", 200, 300, head_dim=64, dtype=FP16),
    "backward-96": lambda: gradients("main", 300, 300, head_dim=96, causal=True),
    "backward-96-finish": lambda: gradients("finish", 300, 300, head_dim=96, causal=True),
    "backward-96-full": lambda: gradients("main", 200, 300, head_dim=96),
    # As from so many keys on that sums are added up in any order; at 64 tiles of 192 keys then.
    **{
        f"backward-long-{d}{'-causal' * causal}": lambda d=d, causal=causal: gradients(
            "main", 300, 300, head_dim=d, causal=causal, style=(STYLES | LONG_STYLES)[d, causal]
        )
        for d, causal in STYLES
    },
    "backward-in-turn": lambda: gradients("main", 600, 600, causal=True, deterministic=True),
    "backward-full-in-turn": lambda: gradients("main", 300, 600, deterministic=True),
    **{
        f"backward-256-{part}": lambda part=part: gradients(
            part, 200, 300, head_dim=256, causal=True
        )
        for part in ("values", "keys", "queries")
    },
    **{
        f"backward-192-{part}": lambda part=part: gradients(
            part, 200, 300, head_dim=192, value_dim=128, causal=True
        )
        for part in ("values", "keys", "queries")
    },
    "axes-wgmma": lambda: axes("sm_90a"),
    "axes-mma": lambda: axes("sm_90"),
    "narrow-wgmma": lambda: narrow("sm_90a"),
    "narrow-mma": lambda: narrow("sm_90"),
    "added-tma": lambda: added("tma", "sm_90a"),
    "added-direct": lambda: added("direct", "sm_90"),
    "state-wgmma": lambda: state(64, "sm_90a"),
    "state-two-groups": lambda: state(128, "sm_90a"),
    "state-mma": lambda: state(64, "sm_90"),
    **{
        f"recurrent-{name}": lambda name=name: recurrence(name)
        for name in (*RECURRENCES, "hedgehog")
    },
    **{
        f"recurrent-{name}-{kernel}": lambda name=name, number=number: (
            recurrence_in_two(name, number)
        )
        for name in ("gated-delta", "kda")
        for number, kernel in enumerate(("solve", "chunks"))
    },
    **{
        f"recurrent-backward-{name}-{part}": lambda name=name, part=part: (
            recurrence_backward(name, part)
        )
        for name, parts in RECURRENT_GRADIENTS.items()
        for part in parts
    },
    "exchange-wgmma": lambda: exchange("sm_90a", 1),
    "exchange-two-groups": lambda: exchange("sm_90a", 2),
    "exchange-mma": lambda: exchange("sm_90", 1),
    **{f"random-{n}": lambda n=n: drawn(n, "sm_90" if n % 4 == 3 else "sm_90a") for n in range(12)},
    "sm80-gemm": lambda: copied_gemm("200x264x136"),
    "sm80-gemm-transposed": lambda: copied_gemm("264x136x72", a="km", b="nk", bias="true",
                                                activation="gelu"),
    "sm80-gemm-no-depth": lambda: copied_gemm("130x72x0"),
    "sm80-attention": lambda: copied_attention(rows="200", keys="300", causal="true", lse="true"),
    **{f"simt-{name}": lambda name=name: simt_case(name) for name in SIMT_PROGRAMS},
    **{f"rows-{name}": lambda one=one: row_operation(*one) for name, one in ROWS.items()},
    "rows-sums": lambda: beside_rows(sums_kernel(BF16), parts=70, n=264),
    "rows-scaled": lambda: beside_rows(scaled_kernel(BF16), n=9000, one=1, parts=2),
    **{
        f"{kind}-{name}".replace("_", "-").replace(",", "").replace(" ", "-"): (
            lambda kind=kind, name=name: served(kind, name)
        )
        for kind, (_, _, names) in SERVED.items()
        for name in names
    },
    **{
        f"backward-packed-{name}-{part}": lambda name=name, part=part: packed_gradients(name, part)
        for name, part in (
            ("causal", "prepare"), ("causal", "main"), ("causal", "finish"), ("short", "main"),
            ("in-turn", "main"), ("wide", "main"), ("long", "main"),
        )
    },
    **{
        f"backward-cut-{part}": lambda part=part: cut_gradients(part)
        for part in ("main", "tail", "settle")
    },
    "convolution": lambda: convolution(ConvolutionConfig(1024, pairs=2)),
    # Of so many tasks that every group of a block has some.
    "convolution-around": lambda: convolution(ConvolutionConfig(4096, False, pairs=1), 557),
    "convolution-blocks": lambda: convolution(ConvolutionConfig(pairs=1, blocks=True)),
}  # fmt: skip
# Gradients whose groups make dq in turn: who is done arrives and does not wait, from which
# racecheck takes no order. It does from arrivals that wait.
IN_TURN = (
    "full", "fp16", "96", "96-full", "grouped-full", "long-64", "long-64-causal",
    "packed-wide-main", "packed-long-main", "cut-main", "cut-tail",
)  # fmt: skip
CASES |= {
    f"backward-{name}-waiting": lambda made=CASES[f"backward-{name}"]: replace(
        made(), edit=("named_arrive<", "named_sync<")
    )
    for name in IN_TURN
}


# What the tests of launches and PyTorch operators take: the kernels chosen for these shapes.
OPERATORS: dict[str, Callable[[], Case]] = {
    "chained-gemm": lambda: gemm("512x512x512", "128x128-dependent"),
    "operator-gemm": lambda: gemm("200x264x136"),
    "operator-bias": lambda: gemm("200x264x136", bias="true", activation="gelu"),
    "operator-transposed": lambda: gemm("200x264x136", a="km", b="nk"),
    "operator-left-gradient": lambda: gemm("200x136x264", b="nk"),
    "operator-right-gradient": lambda: gemm("136x264x200", a="km"),
    **{
        f"operator-attention-{lse}": lambda lse=lse: attention(
            causal="true", group="2", heads="4", lse=lse, rows="200", keys="200"
        )
        for lse in ("false", "true")
    },
}  # fmt: skip


# Kernels with a fault put in by hand: a tool that does not see it proves nothing of the others.
PLANTED: dict[str, Callable[[], Case]] = {
    "memcheck": lambda: replace(
        simt_case("line"), edit=("place + h < length) line", "place + h < length + 64) line")
    ),
    "racecheck": lambda: replace(simt_case("transposed"), edit=("__syncthreads();", "")),
}


def main() -> None:
    """Compile every case into the cache folder named on the command line."""
    os.environ["WARPLOOM_CACHE"] = sys.argv[1]
    for name, make in {**CASES, **OPERATORS, **PLANTED}.items():
        done = make().built()
        print(f"{name:32} {len(done.cubin):8} B  {done.resources.registers} registers")


if __name__ == "__main__":
    main()
