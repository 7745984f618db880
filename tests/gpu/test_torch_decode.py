"""Attention over a cache of keys on a GPU: float64 beside it, CUDA graphs, torch.compile."""

import pytest

torch = pytest.importorskip("torch")
decode = pytest.importorskip("warploom.integrations.torch_decode")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
HEADS, KV_HEADS, D = 8, 2, 128


def caches(batch, keys, lengths, page=None, d=D):
    """(arguments, k, v): dense, or in pages of random order; large beyond the lengths."""
    kv = [torch.randn(batch, keys, KV_HEADS, d, device="cuda").bfloat16() for _ in "kv"]
    filled = [cache.clone() for cache in kv]
    for b, length in enumerate(lengths):
        for cache in filled:
            cache[b, length:] = 1e3
    found = {"cache_seqlens": torch.tensor(lengths, device="cuda", dtype=torch.int32)}
    if page is not None:
        count = batch * keys // page
        table = torch.randperm(count + 3, device="cuda")[:count]
        found["block_table"] = table.view(batch, -1).int()
        shape = (count + 3, page, KV_HEADS, d)
        pages = [torch.full(shape, 1e3, device="cuda").bfloat16() for _ in "kv"]
        for into, cache in zip(pages, filled, strict=True):
            into[table] = cache.view(count, page, KV_HEADS, d)
        filled = pages
    return {**found, "k_cache": filled[0], "v_cache": filled[1]}, *kv


def exact(q, k, v, lengths, causal=False, window=None):
    """The result in float64."""
    group = q.shape[2] // KV_HEADS
    out = torch.zeros(q.shape, dtype=torch.float64, device="cuda")
    for b, length in enumerate(lengths):
        if not length:
            continue
        keys, values = (x[b, :length].double().repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[b].double(), keys) / q.shape[3] ** 0.5
        at = torch.arange(length, device="cuda") - (length - q.shape[1])
        row = torch.arange(q.shape[1], device="cuda")[:, None]
        seen = (at <= row) | (not causal)
        if window is not None:
            seen &= at > row - window
        weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1).nan_to_num()
        out[b] = torch.einsum("hqk,khd->qhd", weights, values)
    return out


def close(got, want, bound=6e-3):
    return float((got.double() - want).norm() / want.norm()) < bound


@pytest.mark.parametrize("page", [None, 16, 64, 256])
@pytest.mark.parametrize("queries", [1, 3, 20])
def test_ragged_lengths_and_pages(page, queries):
    lengths = (700, 0, 1023, 1, 64)
    arguments, k, v = caches(len(lengths), 1024, lengths, page)
    q = torch.randn(len(lengths), queries, HEADS, D, device="cuda").bfloat16()
    want = exact(q, k, v, lengths, causal=True)
    for splits in (0, 1, 7):
        got = decode.attention_with_kvcache(q, **arguments, causal=True, num_splits=splits)
        assert close(got, want)


def test_windows_and_heads_of_64():
    lengths = (500, 90)
    arguments, k, v = caches(2, 512, lengths, d=64)
    q = torch.randn(2, 2, HEADS, 64, device="cuda").bfloat16()
    got = decode.attention_with_kvcache(q, **arguments, causal=True, window_size=(99, 0))
    assert close(got, exact(q, k, v, lengths, causal=True, window=100))


@pytest.mark.parametrize("queries", [1, 3])
def test_sinks_share_the_sum_of_weights(queries):
    lengths = (700, 0, 1023)
    arguments, k, v = caches(len(lengths), 1024, lengths, 64)
    q = torch.randn(len(lengths), queries, HEADS, D, device="cuda").bfloat16()
    sinks = torch.randn(HEADS, device="cuda") + 3.0
    want = exact(q, k, v, lengths, causal=True)
    for b, length in enumerate(lengths):
        keys = k[b, :length].double().repeat_interleave(HEADS // KV_HEADS, 1)
        scores = torch.einsum("qhd,khd->qhk", q[b].double(), keys) / D**0.5
        at = torch.arange(length, device="cuda") - (length - queries)
        hidden = at > torch.arange(queries, device="cuda")[:, None]
        weights = scores.exp().masked_fill(hidden[:, None], 0.0).sum(-1)
        want[b] *= (weights / (weights + sinks.double().exp()))[..., None]
    for splits in (0, 1, 7):
        got = decode.attention_with_kvcache(
            q, **arguments, causal=True, num_splits=splits, sinks=sinks
        )
        assert close(got, want)


def test_a_graph_follows_lengths_on_the_gpu():
    lengths = (2000, 1500, 30)
    arguments, k, v = caches(3, 2048, lengths, 64)
    q = torch.randn(3, 1, HEADS, D, device="cuda").bfloat16()
    decode.attention_with_kvcache(q, **arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode.attention_with_kvcache(q, **arguments)
    for now in (lengths, (1, 700, 0)):
        arguments["cache_seqlens"].copy_(torch.tensor(now))
        graph.replay()
        assert close(out, exact(q, k, v, now))


def test_the_operator_is_one_of_torchs():
    arguments, *_ = caches(2, 256, (256, 100))
    q = torch.randn(2, 1, HEADS, D, device="cuda").bfloat16()
    torch.library.opcheck(
        torch.ops.warploom.attention_with_kvcache,
        (q, arguments["k_cache"], arguments["v_cache"], arguments["cache_seqlens"]),
        test_utils=("test_schema", "test_faketensor"),
    )
    compiled = torch.compile(lambda q: decode.attention_with_kvcache(q, **arguments) * 2.0)
    assert torch.equal(compiled(q), decode.attention_with_kvcache(q, **arguments) * 2.0)


@pytest.mark.parametrize("page", [None, 16, 128])
def test_caches_of_8_bits(page):
    lengths, narrow = (700, 0, 1023, 64), torch.float8_e4m3fn
    arguments, k, v = caches(len(lengths), 1024, lengths, page)
    # What lies beyond a length is large and finite: torch's cast makes NaN of 1e3.
    rounded = {x: arguments[x].clamp(-448.0, 448.0).to(narrow) for x in ("k_cache", "v_cache")}
    q = torch.randn(len(lengths), 2, HEADS, D, device="cuda").to(narrow)
    factors = [torch.rand(len(lengths), KV_HEADS, device="cuda") + 0.5 for _ in "qkv"]
    names = ("q_descale", "k_descale", "v_descale")
    lifted = [
        x.to(narrow).double() * by[:, None, :, None]
        for x, by in zip((k, v), factors[1:], strict=True)
    ]
    wide = q.double() * factors[0].repeat_interleave(HEADS // KV_HEADS, 1)[:, None, :, None]
    want = exact(wide, *lifted, lengths, causal=True)
    for splits in (0, 1, 5):
        got = decode.attention_with_kvcache(
            q, **{**arguments, **rounded}, causal=True, num_splits=splits,
            **dict(zip(names, factors, strict=True)),
        )  # fmt: skip
        assert got.dtype is torch.bfloat16
        assert close(got, want, 0.06)
