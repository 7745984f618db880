"""What attention is measured beside: FlashAttention-4 and -2, cuDNN through torch and by itself.

A baseline is a function that takes the next operands and gives its output. Those that a library
does not support, or that is not there, are left out with the reason (`usable`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bench.attention_cases import FA4
from warploom.kernels.attention.program import AttentionConfig

Pick = Callable[[], dict[str, Any]]
Calls = dict[str, Callable[[], Any]]
VARLEN = "torch varlen (FlashAttention-2)"
FRONT = "cuDNN front end"


def usable(torch: Any, calls: Mapping[str, Callable[[], Any]]) -> tuple[Calls, dict[str, str]]:
    """The baselines that run, and why the others do not."""
    found: Calls = {}
    refused: dict[str, str] = {}
    for name, call in calls.items():
        try:
            call()
            torch.cuda.synchronize()
            found[name] = call
        except Exception as error:  # whatever a library raises for what it does not support
            refused[name] = f"{type(error).__name__}: {error}"[:200]
    return found, refused


def baselines_of(
    torch: Any, what: str, data: list[dict[str, Any]], pick: Pick, config: AttentionConfig
) -> Calls:
    """The libraries to try; for 8-bit elements, the 16-bit ones on the same values too."""
    if what == "packed":
        return {
            **_packed(torch, pick, config.causal),
            FRONT: _front_packed(torch, data, pick, config),
        }
    for v in data:
        if what == "fp8":
            narrow = [v[x] for x in "qkv"]
            v["narrow"] = [x.transpose(1, 2).contiguous() for x in narrow]
            v["wide"] = [
                (x.to(torch.bfloat16) * v[f"scale_{n}"].to(torch.bfloat16))
                for n, x in zip("qkv", narrow, strict=True)
            ]
        else:
            v["wide"] = [v[x] for x in "qkv"]
        v["theirs"] = [x.transpose(1, 2).contiguous() for x in v["wide"]]
    front = {FRONT: _front(torch, data, pick, config)}
    if config.window is not None:
        return {**_window(torch, data, pick, config.window), **front}
    backends = torch.nn.attention

    def cudnn() -> Any:
        with backends.sdpa_kernel(backends.SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(
                *pick()["wide"], is_causal=config.causal, enable_gqa=config.group > 1
            )

    if what == "fp8":
        front |= {
            f"cuDNN fp8, {name} out": _front_fp8(torch, data, pick, config, kind)
            for name, kind in (("fp8", torch.float8_e4m3fn), ("bf16", torch.bfloat16))
        }
    return {**_four(pick, causal=config.causal), "cuDNN": cudnn, **front}


def _later(make: Callable[[], Callable[[], Any]]) -> Callable[[], Any]:
    """A call that is made ready the first time, so that what is missing is said by `usable`."""
    made: list[Callable[[], Any]] = []

    def call() -> Any:
        if not made:
            made.append(make())
        return made[0]()

    return call


def _four(pick: Pick, **options: Any) -> Calls:
    def make() -> Callable[[], Any]:
        function = importlib.import_module("flash_attn.cute").flash_attn_func

        def four() -> Any:
            out = function(*pick()["theirs"], **options)
            return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

        return four

    return {FA4: _later(make)}


@dataclass
class _Graph:
    """A graph of cuDNN's front end, its workspace, and what its tensors are bound to."""

    graph: Any
    handle: Any
    workspace: Any

    def run(self, torch: Any, values: Mapping[Any, Any]) -> None:
        """Queue it on torch's current stream."""
        stream = torch.cuda.current_stream().cuda_stream
        importlib.import_module("cudnn").set_stream(handle=self.handle, stream=stream)
        self.graph.execute(dict(values), self.workspace, handle=self.handle)


def _graph(torch: Any, kind: str) -> tuple[Any, Any]:
    """An empty graph of that element type, and its handle."""
    cudnn = importlib.import_module("cudnn")
    wide = cudnn.data_type.FLOAT
    handle = cudnn.create_handle()
    graph = cudnn.pygraph(
        io_data_type=getattr(cudnn.data_type, kind),
        intermediate_data_type=wide,
        compute_data_type=wide,
        handle=handle,
    )
    return graph, handle


def _ready(torch: Any, graph: Any, handle: Any) -> _Graph:
    modes = importlib.import_module("cudnn").heur_mode
    graph.build([modes.A, modes.FALLBACK])
    size = max(1, graph.get_workspace_size())
    return _Graph(graph, handle, torch.empty(size, dtype=torch.uint8, device="cuda"))


def _as_bhsd(graph: Any, name: str, tensor: Any, kind: Any) -> Any:
    """A tensor of the graph for one that is stored `[batch, rows, heads, d]`."""
    b, s, h, d = tensor.shape
    return graph.tensor(
        name=name, dim=[b, h, s, d], stride=[s * h * d, d, h * d, 1], data_type=kind
    )


def masks(cudnn: Any, config: AttentionConfig, right: str, left: str) -> dict[str, Any]:
    """The arguments of a mask; the two bounds are named differently for 16 and for 8 bits."""
    if not config.causal and config.window is None:
        return {}
    found: dict[str, Any] = {"diagonal_alignment": cudnn.diagonal_alignment.TOP_LEFT, right: 0}
    return found | ({left: config.window} if config.window is not None else {})


def _front(
    torch: Any, data: list[dict[str, Any]], pick: Pick, config: AttentionConfig
) -> Callable[[], Any]:
    def make() -> Callable[[], Any]:
        cudnn = importlib.import_module("cudnn")
        kind = cudnn.data_type.BFLOAT16
        graph, handle = _graph(torch, "BFLOAT16")
        first = data[0]["theirs"]
        q, k, v = (_as_bhsd(graph, n, x, kind) for n, x in zip("qkv", first, strict=True))
        bounds = masks(cudnn, config, "diagonal_band_right_bound", "diagonal_band_left_bound")
        o, _ = graph.sdpa(
            name="sdpa", q=q, k=k, v=v, generate_stats=False, attn_scale=config.factor, **bounds
        )
        out = first[0].new_empty((*first[0].shape[:3], first[2].shape[3]))
        rows, heads, d = out.shape[1:]
        o.set_output(True).set_dim([len(out), heads, rows, d]).set_data_type(kind)
        o.set_stride([rows * heads * d, d, heads * d, 1])
        ready = _ready(torch, graph, handle)

        def front() -> Any:
            theirs = pick()["theirs"]
            ready.run(torch, dict(zip((q, k, v), theirs, strict=True)) | {o: out})
            return out.transpose(1, 2)

        return front

    return _later(make)


PROBABILITIES = 256.0  # what cuDNN's fp8 weights are multiplied by before they are rounded
OUTPUTS = 16.0  # what its fp8 output is multiplied by


def _front_fp8(
    torch: Any, data: list[dict[str, Any]], pick: Pick, config: AttentionConfig, out_type: Any
) -> Callable[[], Any]:
    narrow_out = out_type is torch.float8_e4m3fn

    def make() -> Callable[[], Any]:
        cudnn = importlib.import_module("cudnn")
        types = cudnn.data_type
        graph, handle = _graph(torch, "FP8_E4M3")
        first = data[0]["narrow"]
        q, k, v = (_as_bhsd(graph, n, x, types.FP8_E4M3) for n, x in zip("qkv", first, strict=True))
        lift = OUTPUTS if narrow_out else 1.0
        given = {"descale_s": 1 / PROBABILITIES, "scale_s": PROBABILITIES, "scale_o": lift}
        names = ("descale_q", "descale_k", "descale_v", *given)
        one = {"dim": [1, 1, 1, 1], "stride": [1, 1, 1, 1], "data_type": types.FLOAT}
        scales = {name: graph.tensor(name=name, **one) for name in names}
        o, _, *most = graph.sdpa_fp8(
            q=q,
            k=k,
            v=v,
            **scales,
            generate_stats=False,
            attn_scale=config.factor,
            name="sdpa_fp8",
            **masks(cudnn, config, "right_bound", "left_bound"),
        )
        kind = types.FP8_E4M3 if narrow_out else types.BFLOAT16
        o.set_output(True).set_dim(q.get_dim()).set_stride(q.get_stride()).set_data_type(kind)
        for amax in most:
            amax.set_output(True).set_dim([1, 1, 1, 1]).set_stride([1, 1, 1, 1])
            amax.set_data_type(types.FLOAT)
        ready = _ready(torch, graph, handle)
        out = torch.empty(first[0].shape, dtype=out_type, device="cuda")
        floats = {"dtype": torch.float32, "device": "cuda"}
        fixed = {scales[name]: torch.full((1, 1, 1, 1), x, **floats) for name, x in given.items()}
        fixed |= {amax: torch.zeros(1, 1, 1, 1, **floats) for amax in most} | {o: out}

        def front() -> Any:
            v_of = pick()
            values = dict(zip((q, k, v), v_of["narrow"], strict=True))
            values |= {scales[f"descale_{x}"]: v_of[f"scale_{x}"].view(1, 1, 1, 1) for x in "qkv"}
            ready.run(torch, values | fixed)
            return Lifted(out.transpose(1, 2), lift)

        return front

    return _later(make)


@dataclass
class Lifted:
    """An output that a library multiplied by a factor before it rounded it."""

    values: Any
    factor: float


def _front_packed(
    torch: Any, data: list[dict[str, Any]], pick: Pick, config: AttentionConfig
) -> Callable[[], Any]:
    def make() -> Callable[[], Any]:
        cudnn = importlib.import_module("cudnn")
        types = cudnn.data_type
        graph, handle = _graph(torch, "BFLOAT16")
        first = data[0]
        count, longest = len(first["row_bounds"]) - 1, first["longest"]
        heads, d = first["q"].shape[1:]
        whole = {"stride": [1, 1, 1, 1], "data_type": types.INT32}
        starts = graph.tensor(name="starts", dim=[count + 1, 1, 1, 1], **whole)
        lengths = graph.tensor(name="lengths", dim=[count, 1, 1, 1], **whole)
        shape = {
            "dim": [count, heads, longest, d],
            "stride": [longest * heads * d, d, heads * d, 1],
            "data_type": types.BFLOAT16,
        }
        q, k, v = (graph.tensor(name=n, **shape).set_ragged_offset(starts) for n in "qkv")
        o, _ = graph.sdpa(
            name="sdpa",
            q=q,
            k=k,
            v=v,
            generate_stats=False,
            attn_scale=config.factor,
            use_padding_mask=True,
            seq_len_q=lengths,
            seq_len_kv=lengths,
            **masks(cudnn, config, "diagonal_band_right_bound", "diagonal_band_left_bound"),
        )
        o.set_output(True).set_dim(shape["dim"]).set_stride(shape["stride"])
        o.set_data_type(types.BFLOAT16).set_ragged_offset(starts)
        ready = _ready(torch, graph, handle)
        out = torch.empty_like(first["q"])
        bounds = first["row_bounds"]
        # Elements before each sequence, and its length: of all data sets the same.
        fixed = {
            starts: (bounds * (heads * d)).view(-1, 1, 1, 1),
            lengths: (bounds[1:] - bounds[:-1]).view(-1, 1, 1, 1),
            o: out,
        }

        def front() -> Any:
            values = pick()
            ready.run(torch, {q: values["q"], k: values["k"], v: values["v"]} | fixed)
            return out

        return front

    return _later(make)


def _window(torch: Any, data: list[dict[str, Any]], pick: Pick, window: int) -> Calls:
    for v in data:
        batch, rows = v["theirs"][0].shape[:2]
        v["flat"] = [x.flatten(0, 1) for x in v["theirs"]]
        v["every"] = torch.arange(
            0, batch * rows + 1, rows, dtype=torch.int32, device=v["flat"][0].device
        )

    def two() -> Any:
        v = pick()
        batch, rows, heads, d = v["theirs"][0].shape
        bounds = v["every"], v["every"]
        varlen = torch.nn.attention.varlen.varlen_attn
        out = varlen(*v["flat"], *bounds, rows, rows, window_size=(window - 1, 0))
        return out.view(batch, rows, heads, d).transpose(1, 2)

    return {**_four(pick, causal=True, window_size=(window - 1, 0)), VARLEN: two}


def _packed(torch: Any, pick: Pick, causal: bool) -> Calls:
    def two() -> Any:
        v = pick()
        bounds = v["row_bounds"], v["key_bounds"], v["longest"], v["longest"]
        varlen = torch.nn.attention.varlen.varlen_attn
        return varlen(v["q"], v["k"], v["v"], *bounds, window_size=(-1, 0 if causal else -1))

    def make() -> Callable[[], Any]:
        function = importlib.import_module("flash_attn.cute").flash_attn_varlen_func

        def four() -> Any:
            v = pick()
            out = function(
                v["q"],
                v["k"],
                v["v"],
                cu_seqlens_q=v["row_bounds"],
                cu_seqlens_k=v["key_bounds"],
                max_seqlen_q=v["longest"],
                max_seqlen_k=v["longest"],
                causal=causal,
            )
            return out[0] if isinstance(out, tuple) else out

        return four

    return {FA4: _later(make), VARLEN: two}
