"""Latent attention over a cache on a GPU: float64 beside it, CUDA graphs, torch.compile."""

import pytest

torch = pytest.importorskip("torch")
mla = pytest.importorskip("warploom.integrations.torch_mla")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
D, VALUES = 576, 512


def cache_of(lengths, keys, page=None):
    """(arguments, entries): dense, or in pages of random order; large beyond the lengths."""
    entries = torch.randn(len(lengths), keys, 1, D, device="cuda").bfloat16()
    filled = entries.clone()
    for b, length in enumerate(lengths):
        filled[b, length:] = 1e3
    found = {"cache_seqlens": torch.tensor(lengths, device="cuda", dtype=torch.int32)}
    if page is None:
        return {**found, "kv_cache": filled}, entries
    count = len(lengths) * keys // page
    table = torch.randperm(count + 3, device="cuda")[:count]
    pages = torch.full((count + 3, page, 1, D), 1e3, device="cuda").bfloat16()
    pages[table] = filled.view(count, page, 1, D)
    found["block_table"] = table.view(len(lengths), -1).int()
    return {**found, "kv_cache": pages}, entries


def exact(q, entries, lengths, causal=False, scale=D**-0.5):
    """The result in float64."""
    out = torch.zeros(*q.shape[:3], VALUES, dtype=torch.float64, device="cuda")
    for b, length in enumerate(lengths):
        if not length:
            continue
        keys = entries[b, :length, 0].double()
        scores = torch.einsum("qhd,kd->hqk", q[b].double(), keys) * scale
        at = torch.arange(length, device="cuda") - (length - q.shape[1])
        hidden = (at > torch.arange(q.shape[1], device="cuda")[:, None]) & causal
        weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1).nan_to_num()
        out[b] = torch.einsum("hqk,kd->qhd", weights, keys[:, :VALUES])
    return out


def close(got, want, bound=6e-3):
    return float((got.double() - want).norm() / want.norm()) < bound


@pytest.mark.parametrize(
    ("page", "queries", "heads"),
    [(None, 1, 128), (16, 1, 128), (64, 2, 128), (64, 1, 16), (None, 3, 40)],
)
def test_ragged_lengths_and_pages(page, queries, heads):
    lengths = (700, 0, 1023, 1, 64)
    arguments, entries = cache_of(lengths, 1024, page)
    q = torch.randn(len(lengths), queries, heads, D, device="cuda").bfloat16()
    want = exact(q, entries, lengths, causal=True)
    for splits in (0, 1, 7):
        got = mla.attention_mla(q, **arguments, causal=True, num_splits=splits)
        assert close(got, want)


@pytest.mark.parametrize(("page", "heads"), [(None, 128), (64, 20)])
def test_caches_of_8_bits(page, heads):
    lengths, narrow = (700, 0, 1023, 64), torch.float8_e4m3fn
    arguments, entries = cache_of(lengths, 1024, page)
    arguments["kv_cache"] = arguments["kv_cache"].clamp(-448.0, 448.0).to(narrow)
    q = torch.randn(len(lengths), 2, heads, D, device="cuda").to(narrow)
    by_q, by_k = (torch.rand(len(lengths), 1, device="cuda") + 0.5 for _ in "qk")
    wide, lifted = (
        x.to(narrow).double() * by.double()[:, :, None, None]
        for x, by in ((q, by_q), (entries, by_k))
    )
    want = exact(wide, lifted, lengths, causal=True)
    for splits in (0, 5):
        got = mla.attention_mla(
            q, **arguments, causal=True, num_splits=splits, q_descale=by_q, k_descale=by_k
        )
        assert got.dtype is torch.bfloat16
        assert close(got, want, 0.03)  # weights are of 8 bits


def test_many_sequences_of_several_tasks_a_multiprocessor():
    lengths = tuple(int(n) for n in torch.randint(1, 2049, (150,)))
    arguments, entries = cache_of(lengths, 2048, 64)
    q = torch.randn(len(lengths), 1, 128, D, device="cuda").bfloat16()
    scale = 192**-0.5
    got = mla.attention_mla(q, **arguments, softmax_scale=scale)
    assert close(got, exact(q, entries, lengths, scale=scale))
    same = mla.attention_mla(q, **arguments, softmax_scale=scale, batch_invariant=True)
    few = {**arguments, "cache_seqlens": arguments["cache_seqlens"][3:5].contiguous()}
    few["block_table"] = arguments["block_table"][3:5].contiguous()
    alone = mla.attention_mla(q[3:5], **few, softmax_scale=scale, batch_invariant=True)
    assert close(same, exact(q, entries, lengths, scale=scale)) and torch.equal(alone, same[3:5])


def test_a_graph_follows_lengths_on_the_gpu():
    lengths = (2000, 1500, 30)
    arguments, entries = cache_of(lengths, 2048, 64)
    q = torch.randn(3, 1, 128, D, device="cuda").bfloat16()
    mla.attention_mla(q, **arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mla.attention_mla(q, **arguments)
    for now in (lengths, (1, 700, 0)):
        arguments["cache_seqlens"].copy_(torch.tensor(now))
        graph.replay()
        assert close(out, exact(q, entries, now))


def test_the_operator_is_one_of_torchs():
    arguments, _ = cache_of((256, 100), 256)
    q = torch.randn(2, 1, 128, D, device="cuda").bfloat16()
    torch.library.opcheck(
        torch.ops.warploom.attention_mla,
        (q, arguments["kv_cache"], arguments["cache_seqlens"]),
        test_utils=("test_schema", "test_faketensor"),
    )
    compiled = torch.compile(lambda q: mla.attention_mla(q, **arguments) * 2.0)
    assert torch.equal(compiled(q), mla.attention_mla(q, **arguments) * 2.0)
