"""The cases of `bench.gemm_serving`: models' shapes, operands, our kernels, others' calls."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from warploom.autosched.plans import ADDING
from warploom.autosched.schedules import compiled
from warploom.codegen.compile.build import Built
from warploom.errors import InputError
from warploom.kernels.gemm.experts import combine_rows, gather_rows, rows_schedule
from warploom.kernels.gemm.grouped import SCALED, GroupedConfig, grouped, work_list, work_schedule
from warploom.kernels.gemm.grouped_plan import plan_grouped
from warploom.kernels.gemm.program import GemmConfig, combine
from warploom.kernels.gemm.variant import choose_gemm
from warploom.kernels.gemm.weight_only import (
    GROUP,
    WeightOnlyConfig,
    plan_weight_only,
    weight_only,
    weight_only_policy,
)
from warploom.tile import E4M3, INT8

# Model -> (experts, of which a token takes, width, width of an expert)
MODELS = {
    "mixtral-8x7b": (8, 2, 4096, 14336),
    "deepseek-v3": (256, 8, 7168, 2048),
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "qwen3-235b-a22b": (128, 8, 4096, 1536),
    "gpt-oss-120b": (128, 4, 2880, 2880),
}
# TFLOP/s that DeepGEMM's authors publish for an H800, not measured here.
PUBLISHED = {
    "blocks 4096x7168x16384": 1484,
    "blocks 4096x4096x7168": 1424,
    "blocks 4096x24576x1536": 1263,
    "blocks 4096x2112x7168": 1296,
}
# Weights alone of 8 bits with a scale a column, and of 4 with one for a group of 128.
WEIGHTS = {
    "weights8": WeightOnlyConfig(),
    "integers8": WeightOnlyConfig(weights=INT8),
    "integers4": WeightOnlyConfig(weights=INT8, bits=4, grouped=True),
}
ROWS = (1, 16, 64, 128)  # of few
NARROW = ((4096, 4096), (28672, 4096), (4096, 14336))  # n, k
LARGE = ((7168, 2048), (7168, 16384), (4096, 7168), (24576, 1536), (2112, 7168))
CASES = (
    *(f"blocks {m}x{n}x{k}" for m in (4096, 128) for n, k in LARGE),
    *(f"scaled {m}x{n}x{k}" for m in (4096, 128) for n, k in LARGE),
    *(f"grouped {model} {layer} 4096" for model in MODELS for layer in ("up", "down")),
    *(f"grouped {model} up 128" for model in MODELS),
    *(f"grouped8 {model} {layer} 4096" for model in MODELS for layer in ("up", "down")),
    *(f"rows8 {model} {layer} 4096" for model in MODELS for layer in ("up", "down")),
    *(f"few {m}x{n}x{k}" for m in ROWS for n, k in NARROW),
    *(f"{kind} {m}x{n}x{k}" for kind in WEIGHTS for m in (1, 16, 64) for n, k in NARROW),
    *(f"experts {model} {tokens}" for tokens in (4096, 128) for model in MODELS),
    *(f"experts8 {model} 4096" for model in MODELS),
)
TYPES = {
    **dict.fromkeys(("grouped", "few", "experts"), "bf16"),
    **dict.fromkeys(("rows8", "scaled", "experts8"), "e4m3, scales of rows"),
    "weights8": "bf16, e4m3 weights",
    "integers8": "bf16, int8 weights",
    "integers4": "bf16, int4 weights",
}
BY_ROWS = "torch, by rows"
DENSE = "cuBLAS, dense"  # the same rows by one expert's weights
BESIDE = (BY_ROWS, DENSE)  # have other work: no baselines
LAYERS = ("experts", "experts8")
BY_VECTORS = ("rows8", "scaled")  # a scale a row and a column
LAYER = ("x", "up", "down", "chosen", "weights")  # the arguments of a layer of experts
SCALES = ("scale_up", "scale_down")  # those of e4m3 weights
MOST_E4M3 = 448.0
WRONG = 6e-3
INNER_TILES = 8  # of torch's packing
Call = Callable[[], Any]
Make = Callable[[], Built]


@dataclass(frozen=True)
class Case:
    """A kind of product and its sizes."""

    name: str

    @property
    def kind(self) -> str:
        """The first word of its name."""
        return self.name.split()[0]

    @cached_property
    def sizes(self) -> tuple[int, int, int, int]:
        """Experts, rows of all together, n, k; a layer of experts has the n of all its products."""
        words = self.name.split()
        if words[1][0].isdigit():
            m, n, k = (int(one) for one in words[1].split("x"))
            return 1, m, n, k
        if words[1] not in MODELS:
            raise InputError(f"case {self.name!r}: expected a model of {', '.join(MODELS)}")
        experts, taken, width, inner = MODELS[words[1]]
        layers = {"up": (2 * inner, width), "down": (width, inner), "": (3 * inner, width)}
        layer = "" if self.kind in LAYERS else words[2]
        return experts, int(words[-1]) * taken, *layers[layer]

    @property
    def width(self) -> float:
        """Bytes of a weight."""
        if self.kind in WEIGHTS:
            return WEIGHTS[self.kind].bits / 8
        return 2 if TYPES.get(self.kind) == "bf16" else 1

    @property
    def wrong(self) -> float:
        """The relative error of a result that fails; a layer rounds twice to bf16, or to e4m3 what
        is at times at the edge of another number."""
        return {"experts": 2 * WRONG, "experts8": 4 * WRONG}.get(self.kind, WRONG)

    @cached_property
    def kernels(self) -> dict[str, Make]:
        """What the operator runs, by what tells it from others; the product first."""
        _, rows, n, k = self.sizes
        if self.kind in WEIGHTS:
            few = plan_weight_only(WEIGHTS[self.kind], rows, n, k)
            make = partial(compiled, weight_only(few), weight_only_policy(few))
            return {f"{few.tile} {few.slices}": make}
        if self.kind in ("few", "scaled"):
            base = GemmConfig(b="nk")
            if self.kind == "scaled":
                base = replace(base, dtype=E4M3, row_scales=True)
            choice = choose_gemm(rows, n, k, base, 1, sliced=self.kind == "few")
            found: dict[str, Make] = {choice.name: lambda: choice.selected(base).build()}
            own = choice.config(base)
            if own.workspace:
                found["combine"] = partial(compiled, combine(own), ADDING)
            return found
        if self.kind in LAYERS:
            _, taken, width, inner = MODELS[self.name.split()[1]]
            plain = GroupedConfig(groups="rows")
            if self.kind == "experts8":
                plain = replace(plain, dtype=E4M3, scales="rows")
            up = self._grouped(replace(plain, swiglu=True), inner, width)
            down = self._grouped(plain, width, inner)
            around = {"gather": gather_rows(), "combine": combine_rows(taken)}
            moved = {name: partial(compiled, one, rows_schedule()) for name, one in around.items()}
            return {**up, **down, **moved}
        config = GroupedConfig(groups="none" if self.kind == "blocks" else "rows")
        if self.kind == "rows8":
            config = replace(config, dtype=E4M3, scales="rows")
        elif self.kind != "grouped":
            config = replace(config, dtype=E4M3, scales="blocks", promote=True)
        return self._grouped(config, n, k)

    def _grouped(self, config: GroupedConfig, n: int, k: int) -> dict[str, Make]:
        experts, rows, *_ = self.sizes
        plan = plan_grouped(config, rows // experts, n, k, config.scales != "none")
        tile = plan.config.tile
        word = f"{tile} swiglu" if config.swiglu else f"{tile}"
        found: dict[str, Make] = {word: partial(compiled, grouped(plan.config), plan.policy())}
        if config.groups == "rows":
            tasks = work_list(experts, tile[0], plan.even), work_schedule(experts)
            found[f"list {tile}"] = partial(compiled, *tasks)
        return found


def counts_of(torch: Any, experts: int, rows: int) -> Any:
    """Rows of every expert, uneven."""
    generator = torch.Generator().manual_seed(1)
    shares = torch.rand(experts, generator=generator) + 0.2
    if experts > 20:
        shares[::17] = 0
    found = (shares / shares.sum() * rows).floor().long()
    found[-1] += rows - found.sum()
    return found


def scaled(torch: Any, *shape: int) -> tuple[Any, Any]:
    """(fp8 elements, scales of their rows' blocks of 128). Drawn an expert at a time: all of them
    in 16 bits are more than some GPUs have beside the others' operands."""
    values = torch.empty(shape, device="cuda", dtype=torch.float8_e4m3fn)
    for part in values if len(shape) > 2 else (values,):
        part.copy_(torch.randn(part.shape, device="cuda", dtype=torch.bfloat16))
    return values, torch.rand((*shape[:-1], -(-shape[-1] // SCALED)), device="cuda") + 0.5


def operands(torch: Any, case: Case, number: int) -> dict[str, Any]:
    """Tensors of a case: a, b: [experts, n, k] with their scales, and whose rows are whose."""
    torch.manual_seed(number)
    if case.kind in LAYERS:
        return _layer(torch, case)
    experts, rows, n, k = case.sizes
    counts = counts_of(torch, experts, rows) if experts > 1 else torch.tensor([rows])
    found: dict[str, Any] = {"counts": counts.tolist()}
    found["ends"] = counts.cumsum(0).int().cuda()
    if case.kind in ("grouped", "few", *WEIGHTS):
        found["a"] = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
        found["b"] = torch.randn(experts, n, k, device="cuda", dtype=torch.bfloat16).mul_(k**-0.5)
        return found | (_narrow(torch, case, found["b"][0]) if case.kind in WEIGHTS else {})
    found["b"], _ = scaled(torch, experts, n, k)
    if case.kind in BY_VECTORS:
        found["a"], _ = scaled(torch, rows, k)
        found["scale_a"] = torch.rand(rows, device="cuda") + 0.5
        found["scale_b"] = torch.rand((experts, n), device="cuda") + 0.5
        return found
    wide, deep = -(-n // SCALED), -(-k // SCALED)
    found["scale_b"] = torch.rand((experts, wide, deep), device="cuda") + 0.5
    found["a"], found["scale_a"] = scaled(torch, rows, k)
    # torch has the scales of rows with the rows next to each other.
    found["scale_a"] = found["scale_a"].transpose(-1, -2).contiguous().transpose(-1, -2)
    return found


def _narrow(torch: Any, case: Case, drawn: Any) -> dict[str, Any]:
    """Narrow weights with their scales, and the bf16 ones that they stand for."""
    config, (n, k) = WEIGHTS[case.kind], drawn.shape
    scale = torch.rand((k // GROUP, n) if config.grouped else (n,), device="cuda") + 0.5
    scale = scale.bfloat16().float()
    if config.weights is E4M3:
        stored = (drawn * 8).to(torch.float8_e4m3fn)
    else:
        most = 1 << (config.bits - 1)
        stored = torch.randint(-most, most, (n, k), device="cuda", dtype=torch.int8)
    factors = scale.repeat_interleave(GROUP, 0).t() if config.grouped else scale[:, None]
    exact = stored.float() * factors
    return {"b": stored[None], "scale": scale, "wide": exact.bfloat16(), "exact": exact[None]}


def _layer(torch: Any, case: Case) -> dict[str, Any]:
    """A layer of experts with its tokens, and what a router of uneven shares chose for them."""
    experts, taken, width, inner = MODELS[case.name.split()[1]]
    tokens = case.sizes[1] // taken
    shares = counts_of(torch, experts, 1 << 20).double().log()
    noise = -torch.rand(tokens, experts).double().log().neg().log()
    weights, chosen = (shares + noise).topk(taken)
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    found = {
        "x": torch.randn(tokens, width, **options),
        "chosen": chosen.cuda(),
        "weights": weights.softmax(-1).float().cuda(),
    }
    sizes = {"up": (2 * inner, width), "down": (width, inner)}
    for name, (n, k) in sizes.items():
        if case.kind == "experts":
            found[name] = torch.randn(experts, n, k, **options).mul_(k**-0.5).transpose(1, 2)
        else:
            found[name] = scaled(torch, experts, n, k)[0].transpose(1, 2)
            found[f"scale_{name}"] = (torch.rand((experts, n), device="cuda") + 0.5) * k**-0.5
    return found


def rounded(torch: Any, rows: Any) -> tuple[Any, Any]:
    """(e4m3 rows, a scale of each), by torch's operators."""
    scale = rows.abs().amax(-1).float() / MOST_E4M3
    return (rows / scale[..., None]).to(torch.float8_e4m3fn), scale


def own_call(case: Case, t: Mapping[str, Any]) -> Call:
    """The operator."""
    module = importlib.import_module("warploom.integrations.torch_gemm")
    if case.kind in LAYERS:
        layer = importlib.import_module("warploom.integrations.torch_experts")
        return lambda: layer.experts_mlp(*(t[name] for name in (*LAYER, *SCALES) if name in t))
    if case.kind in WEIGHTS:
        narrow = importlib.import_module("warploom.integrations.torch_weight_only")
        stored = t["b"][0]
        stored = narrow.pack_int4(stored) if WEIGHTS[case.kind].bits == 4 else stored
        return lambda: narrow.weight_only_mm(t["a"], stored.t(), t["scale"])
    weights = t["b"].transpose(-1, -2)
    if case.kind == "grouped":
        return lambda: module.grouped_mm(t["a"], weights, t["ends"])
    if case.kind == "few":
        operators = importlib.import_module("warploom.integrations.torch_op")
        return lambda: operators.gemm(t["a"], weights[0])
    if case.kind == "rows8":
        fast: dict[str, Any] = {"offs": t["ends"], "use_fast_accum": True}
        scales = t["scale_a"], t["scale_b"]
        return lambda: module.scaled_grouped_mm(t["a"], weights, *scales, **fast)
    if case.kind == "scaled":
        scales = t["scale_a"][:, None], t["scale_b"]
        return lambda: module.scaled_mm(t["a"], weights[0], *scales, use_fast_accum=True)
    scale_b = t["scale_b"].transpose(-1, -2)
    if case.kind == "grouped8":
        return lambda: module.scaled_grouped_mm(t["a"], weights, t["scale_a"], scale_b, t["ends"])
    return lambda: module.scaled_mm(t["a"], weights[0], t["scale_a"], scale_b[0])


def libraries(torch: Any, case: Case, t: Mapping[str, Any], out: Any) -> dict[str, Call]:
    """The same product by others, and torch's by rows."""
    if case.kind in LAYERS:
        layer = _layer_of_torch if case.kind == "experts" else _narrow_layer_of_torch
        return {"torch": lambda: layer(torch, *(t[n] for n in (*LAYER, *SCALES) if n in t))}
    if case.kind in WEIGHTS:
        return {"torch": lambda: torch.mm(t["a"], t["wide"].t()), **_torch_int4(torch, case, t)}
    weights = t["b"].transpose(1, 2)
    fast = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
    rows = torch.ones(t["a"].shape[0], device="cuda")
    columns = torch.ones(t["b"].shape[:2], device="cuda")
    if case.kind in ("grouped", "grouped8", "rows8"):
        triton = importlib.import_module("bench.gemm_serving_triton")
        own = importlib.import_module("warploom.integrations.torch_gemm")

        def lists(rows: int) -> Any:
            return own.list_of_tasks(t["ends"], t["a"], rows)

        scales = () if case.kind == "grouped" else (t["scale_a"], t["scale_b"])
        found = triton.candidates(torch, t["a"], t["b"], out, lists, scales)
        if case.kind == "grouped":
            return {
                "torch": lambda: torch._grouped_mm(t["a"], weights, offs=t["ends"]),
                DENSE: lambda: torch.mm(t["a"], weights[0]),
                **found,
            }
        name, of_a, of_b = BY_ROWS, rows, columns
        if case.kind == "rows8":
            name, of_a, of_b = "torch", *scales
        return {
            name: lambda: torch._scaled_grouped_mm(
                t["a"], weights, of_a, of_b, offs=t["ends"], **fast
            ),
            DENSE: lambda: torch._scaled_mm(t["a"], weights[0], of_a[:, None], of_b[:1], **fast),
            **found,
        }
    if case.kind == "few":
        return {"torch": lambda: torch.mm(t["a"], weights[0])}
    if case.kind == "scaled":
        of_a, of_b = t["scale_a"][:, None], t["scale_b"]
        return {"torch": lambda: torch._scaled_mm(t["a"], weights[0], of_a, of_b, **fast)}
    wide, deep = t["scale_b"].shape[1:]
    # cuBLAS wants the rows of b's scales padded to 16 bytes.
    padded = columns.new_zeros(wide, -(-deep // 4) * 4)
    padded[:, :deep] = t["scale_b"][0]
    scale_b = padded[:, :deep].t()
    return {
        "torch": lambda: torch._scaled_mm(
            t["a"], weights[0], t["scale_a"], scale_b, out_dtype=torch.bfloat16
        ),
        BY_ROWS: lambda: torch._scaled_mm(t["a"], weights[0], rows[:, None], columns, **fast),
    }


def _layer_of_torch(torch: Any, x: Any, up: Any, down: Any, chosen: Any, weights: Any) -> Any:
    """A layer of experts of torch's operators, behind the order of rows that ours has."""
    route = importlib.import_module("warploom.integrations.torch_experts").route
    tokens, offs, places = route(chosen, up.shape[0])
    gate, other = torch._grouped_mm(x[tokens], up, offs=offs).chunk(2, 1)
    rows = torch._grouped_mm(torch.nn.functional.silu(gate) * other, down, offs=offs)
    return torch.einsum("tjn,tj->tn", rows[places], weights.to(rows.dtype))


def _narrow_layer_of_torch(
    torch: Any, x: Any, up: Any, down: Any, chosen: Any, weights: Any, of_up: Any, of_down: Any
) -> Any:
    """The same with e4m3 weights: rows are rounded to e4m3 before each product."""
    route = importlib.import_module("warploom.integrations.torch_experts").route
    tokens, offs, places = route(chosen, up.shape[0])
    fast = {"offs": offs, "out_dtype": x.dtype, "use_fast_accum": True}
    narrow, scale = rounded(torch, x)
    rows = narrow.view(torch.uint8)[tokens].view(narrow.dtype)
    both = torch._scaled_grouped_mm(rows, up, scale[tokens], of_up, **fast)
    gate, other = both.chunk(2, 1)
    narrow, scale = rounded(torch, torch.nn.functional.silu(gate) * other)
    results = torch._scaled_grouped_mm(narrow, down, scale, of_down, **fast)
    return torch.einsum("tjn,tj->tn", results[places], weights.to(results.dtype))


def _torch_int4(torch: Any, case: Case, t: Mapping[str, Any]) -> dict[str, Call]:
    """torch's own product with weights of 4 bits: a scale and a zero for 128 of a row."""
    if case.kind != "integers4":
        return {}
    codes = (t["b"][0] + 8).to(torch.uint8)
    packed = torch._convert_weight_to_int4pack(codes[:, ::2] << 4 | codes[:, 1::2], INNER_TILES)
    scales = torch.stack((t["scale"], torch.zeros_like(t["scale"])), -1).bfloat16().contiguous()
    return {"torch int4": lambda: torch._weight_int4pack_mm(t["a"], packed, GROUP, scales)}
