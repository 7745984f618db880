"""What `bench/gemm.py` builds, checks and times: variants, operands, references, shapes."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from bench.tuned import BATCH
from warploom.autosched.plans import ADDING
from warploom.autosched.schedules import Policy, schedule_for
from warploom.codegen.compile.build import Built, build
from warploom.codegen.ir.plan import KernelSchedule, LaunchPlan
from warploom.codegen.simt.schedule import SimtSchedule
from warploom.kernels.gemm.program import GemmConfig, combine, gemm
from warploom.kernels.gemm.variant import GEMM, choose_gemm
from warploom.kernels.tuned.variant import Variant as Choice
from warploom.tile import BF16, E4M3, FP16, FP32, Program

Make = Callable[[GemmConfig], KernelSchedule | SimtSchedule]
Variant = tuple[GemmConfig, Make, Callable[[GemmConfig], Program]]
DEVICE = "cuda"  # of operands; a dry run has them on the CPU
WIDE = (40, 232)  # registers a thread where the producer needs more than 24


def _hand(config: GemmConfig, plan: LaunchPlan, flying: int = 1, depth: int = 4) -> Variant:
    policy = Policy("inflight" if flying else "lcsf", plan, 2, depth, registers=WIDE)

    def make(c: GemmConfig) -> KernelSchedule | SimtSchedule:
        return schedule_for(gemm(c), policy)

    return config, make, gemm


def _plan(cluster: int = 2, **rest: Any) -> LaunchPlan:
    along = ("m_tile", cluster) if cluster > 1 else ("", 1)
    return LaunchPlan(split="m", cluster=along, supergroup=8, **rest)


def choice_variant(choice: Choice, base: GemmConfig | None = None) -> Variant:
    """A variant of the table for some element types and epilogue."""
    return choice.config(base or GemmConfig()), choice.schedule, gemm


FP8 = GemmConfig(dtype=E4M3, out=BF16, b="nk", scales=True, tile=(128, 256, 128))
WIDE_TILES = ("128x256-at-once", "128x192-at-once", "200x128-swap-ab")
# Of the family of transposed products: those timed at shapes whose waves they fill, and others.
SWAP_AB = (
    "152x256-swap-ab",
    "160x256-swap-ab-by-m",
    "184x256-swap-ab-by-m",
    "200x192-swap-ab",
    "200x128-swap-ab",
    "168x128-swap-ab",
    "144x128-swap-ab",
    "264x128-swap-ab",
)


PROMOTED = replace(FP8, promote=True)
LEAKY = GemmConfig(dtype=FP16, out=FP16, activation="leaky_relu")
NARROW = (128, 128, 64)
# Not for the chooser: no cluster, and bands that bring more from DRAM.
BANDS = (2, 32)
ASIDE = (
    GEMM.find("128x256").having("single", "cluster="),
    *(GEMM.find("128x256").having(f"128x256-bands-of-{rows}", f"raster={rows}") for rows in BANDS),
)
CHOICES = {choice.name: choice for choice in (*GEMM.variants.values(), *ASIDE)}
CONFIGS = {name: choice.config(PROMOTED) for name, choice in GEMM.variants.items()}
SLICES = sorted({config.slices for config in CONFIGS.values() if config.workspace})
VARIANTS: dict[str, Variant] = {
    **{c.name: choice_variant(c) for c in GEMM.variants.values() if c.takes(GemmConfig())},
    **{name: choice_variant(GEMM.find(name)) for name in SWAP_AB},
    "128x256-dependent": choice_variant(
        GEMM.find("128x256-at-once").having("128x256-dependent", "launch=dependent")
    ),
    **{choice.name: choice_variant(choice) for choice in ASIDE},
    "drain": _hand(GemmConfig(), _plan(), 0),
    "nt": _hand(GemmConfig(b="nk"), _plan()),
    "tn": _hand(GemmConfig(a="km"), _plan()),
    "tt": _hand(GemmConfig(a="km", b="nk"), _plan()),
    "fp16": _hand(GemmConfig(dtype=FP16, out=FP16), _plan()),
    "fp32-out": _hand(GemmConfig(out=FP32), _plan()),
    "batched": _hand(GemmConfig(batched=True), _plan()),
    "bias-gelu": _hand(GemmConfig(bias=True, activation="gelu"), _plan()),
    "silu-gate": _hand(GemmConfig(activation="silu", gate=True, tile=NARROW), _plan()),
    "swiglu": _hand(GemmConfig(activation="silu", dual=True, tile=NARROW), _plan()),
    "swap-ab tt": choice_variant(GEMM.find("152x256-swap-ab"), GemmConfig(a="km", b="nk")),
    "swap-ab tn": choice_variant(GEMM.find("200x192-swap-ab"), GemmConfig(a="km")),
    "swap-ab bias-gelu": choice_variant(
        GEMM.find("200x128-swap-ab"), GemmConfig(bias=True, activation="gelu", out=FP32)
    ),
    "swap-ab batched": choice_variant(GEMM.find("184x256-swap-ab-by-m"), GemmConfig(batched=True)),
    "residual-scale": _hand(GemmConfig(residual=True, scale=0.5), _plan()),
    **{f"combine{n}": (GemmConfig(slices=n), lambda config: ADDING, combine) for n in SLICES},
    **{
        f"leaky {name}": choice_variant(GEMM.find(name), LEAKY)
        for name in ("128x256", "192x256-along-n", "128x128-alone", *WIDE_TILES)
    },
    **{
        f"fp8 {name}": choice_variant(GEMM.find(name), FP8)
        for name in ("128x256", "192x256-along-n", "128x128-two-per-sm", *WIDE_TILES)
    },
    **{
        f"fp8 promoted {name}": choice_variant(GEMM.find(name), PROMOTED)
        for name in ("128x128-two-in-flight", "128x192", "192x128-along-n")
    },
}
FEW = (
    "128x256-dependent",
    "128x128",
    "128x64",
    "128x128-two-per-sm",
    "128x128-two-per-sm-dependent",
    "64x64-two-per-sm",
    "128x64-alone",
    "128x128-alone",
    "64x256-alone",
)
SLICED = tuple(name for name, c in CONFIGS.items() if c.workspace and c.slices < 16)
IN_CLUSTER = tuple(name for name, c in CONFIGS.items() if c.in_cluster)
# shape -> the variants timed beside the default one
SHAPES: dict[tuple[int, int, int], tuple[str, ...]] = {
    (4096, 4096, 4096): ("128x256", "128x256-at-once", "256x128-along-n", "128x128", "192x176"),
    (8192, 8192, 8192): ("128x256", "192x256", "128x192-at-once", "200x128-swap-ab"),
    (16384, 16384, 16384): ("128x256", "192x256", "192x256-along-n", "128x384"),
    (4000, 6008, 3000): (
        "184x256-swap-ab-by-m",
        "128x256",
        "128x192-at-once",
        "152x256-swap-ab",
        "192x256",
    ),
    (8200, 1032, 8192): ("192x176", "192x176-along-n", "128x192"),
    (5000, 5000, 5000): (
        "152x256-swap-ab",
        "264x128-swap-ab",
        "200x128-swap-ab",
        "160x256-swap-ab-by-m",
    ),
    (1000, 20000, 2000): ("200x128-swap-ab", "128x256", "128x256-at-once", "192x256-along-n"),
    (12345, 1544, 3080): ("192x200", "128x192", "128x320-direct", "264x128-swap-ab"),
    (2048, 2048, 16384): ("128x256", "128x256-at-once", "256x128-along-n", "128x128-two-per-sm"),
    (16384, 1024, 4096): ("128x256", "128x128", "200x128-swap-ab", "192x256", "256x128-along-n"),
    (2048, 2048, 2048): FEW,
    (1024, 1024, 1024): FEW,
    (512, 512, 16384): SLICED,
    (256, 256, 8192): IN_CLUSTER,
}
# kind of case -> element types and epilogue, shapes; each also runs with the variant it gets
OTHERS: dict[str, tuple[GemmConfig, tuple[tuple[int, int, int], ...]]] = {
    "fp8": (FP8, ((8192, 8192, 8192), (4096, 4096, 4096))),
    "promoted": (PROMOTED, ((8192, 8192, 8192), (4096, 4096, 4096))),
    "leaky": (LEAKY, tuple((n, n, n) for n in (2048, 4096, 8192, 16384))),
    "gelu": (GemmConfig(bias=True, activation="gelu"), ((8192, 8192, 2048),)),
    "gelu_tanh": (GemmConfig(bias=True, activation="gelu_tanh"), ((8192, 8192, 2048),)),
    "batched": (GemmConfig(batched=True), ((2048, 2048, 2048),)),
}


def default_of(what: str, shape: tuple[int, int, int]) -> str:
    """The name in `VARIANTS` of the variant a case gets."""
    if what == "time":
        chosen = choose_gemm(*shape, sliced=True)
        VARIANTS.setdefault(chosen.name, choice_variant(chosen))
        return chosen.name
    base = OTHERS[what][0]
    choice = choose_gemm(*shape, base, BATCH if base.batched else 1)
    name = f"{'fp8 promoted' if what == 'promoted' else what} {choice.name}"
    VARIANTS.setdefault(name, choice_variant(choice, base))
    return name


def _fuzzed() -> tuple[tuple[int, int, int], ...]:
    draw = random.Random(11)
    return tuple(
        (draw.randint(1, 3000), 8 * draw.randint(1, 300), 8 * draw.randint(1, 400))
        for _ in range(40)
    )


FUZZED = _fuzzed()  # ragged sizes of `bench/kernel_numerics.py`


def plain_of(shape: tuple[int, int, int]) -> str:
    """The name in `VARIANTS` of the variant a shape gets without a workspace."""
    chosen = choose_gemm(*shape)
    VARIANTS.setdefault(chosen.name, choice_variant(chosen))
    return chosen.name


for _shape in FUZZED:
    plain_of(_shape)
for _shape in SHAPES:
    default_of("time", _shape)
for _what, (_, _shapes) in OTHERS.items():
    for _shape in _shapes:
        default_of(_what, _shape)
# sizes of the numerics: m, n, k; 16-byte pitches for TMA
CHECKED = (
    (256, 256, 128),
    (1, 16, 16),
    (200, 272, 80),
    (520, 1040, 336),
    (129, 512, 4096),
    (1000, 1008, 1008),
    (2100, 4208, 208),  # more tasks than SMs
)


def built_of(name: str, debug: bool = False) -> Built:
    """Compile a variant."""
    config, make, program = VARIANTS[name]
    allow = ("spills", "stack") if debug else ()
    return build(program(config), make(config), allow=allow, debug=debug)


def operands(torch: Any, config: GemmConfig, m: int, n: int, k: int, seed: int) -> dict[str, Any]:
    """Random operands of a configuration, and c inside of a guarded buffer of NaN."""
    kinds = {
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp32": torch.float32,
        "e4m3": torch.float8_e4m3fn,
    }
    torch.manual_seed(seed)
    sizes = {"m": m, "n": n, "k": k, "batch": 3, "one": 1, "slices": config.slices}
    values: dict[str, Any] = {}
    for name, spec in {**config.arrays, **config.epilogue}.items():
        shape = [sizes[dim] for dim in spec.dims]
        values[name] = torch.randn(*shape, device=DEVICE).to(kinds[spec.dtype.name])
    for name in ("scale_a", "scale_b"):
        if name in values:
            values[name].fill_(0.5 if name == "scale_a" else 1.5)
    guard = 4096
    lead = (3,) if config.batched else ()
    count = math.prod(lead) * m * n
    kind = kinds[config.out.name]
    whole = torch.full((count + 2 * guard,), math.nan, device=DEVICE, dtype=kind)
    values["c"] = whole[guard : guard + count].view(*lead, m, n)
    values["whole"] = whole
    return values


def expected(torch: Any, config: GemmConfig, v: dict[str, Any], rows: Any, wide: Any) -> Any:
    """c in the type `wide`, of some rows (None: all)."""
    a = v["a"] if config.a == "mk" else v["a"].transpose(-1, -2)
    a = (a if rows is None else a[..., rows, :]).to(wide)

    def product(name: str) -> Any:
        return a @ (v[name] if config.b == "kn" else v[name].transpose(-1, -2)).to(wide)

    def some(name: str) -> Any:
        return (v[name] if rows is None else v[name][..., rows, :]).to(wide)

    x = product("b") * config.scale
    if config.scales:
        x = x * v["scale_a"].to(wide) * v["scale_b"].to(wide)
    if config.bias:
        x = x + v["bias"].to(wide)
    f = torch.nn.functional
    table = {"relu": f.relu, "leaky_relu": f.leaky_relu, "gelu": f.gelu, "silu": f.silu}
    table["gelu_tanh"] = functools.partial(f.gelu, approximate="tanh")
    x = table[config.activation](x) if config.activation != "none" else x
    if config.dual:
        x = x * product("b2")
    if config.gate:
        x = x * some("gate")
    return x + some("residual") if config.residual else x
