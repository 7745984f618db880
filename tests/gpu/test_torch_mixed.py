"""Mixed batches on a GPU: chunks of prompts beside single tokens, each against float64; a graph."""

import pytest

torch = pytest.importorskip("torch")
mixed = pytest.importorskip("warploom.integrations.torch_mixed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
HEADS, KV_HEADS, D, PAGE = 16, 4, 128, 16
SEQUENCES = ((1, 3000), (700, 700), (1, 17), (0, 60), (256, 1300), (1, 2049))


def operands(sequences):
    """Arguments, and the keys and values of each sequence."""
    counts, lengths = zip(*sequences, strict=True)
    columns = -(-max(lengths) // PAGE)
    table = torch.randperm(len(counts) * columns, device="cuda").view(len(counts), columns).int()
    caches = [torch.randn(table.numel(), PAGE, KV_HEADS, D, device="cuda").bfloat16() for _ in "kv"]
    bounds = torch.tensor([0, *counts], device="cuda").cumsum(0).int()
    q = torch.randn(sum(counts), HEADS, D, device="cuda").bfloat16()
    own = [
        [cache[row.long()].flatten(0, 1)[:n] for cache in caches]
        for row, n in zip(table, lengths, strict=True)
    ]
    seen = torch.tensor(lengths, device="cuda", dtype=torch.int32)
    return (q, *caches, seen, table, bounds), own


def exact(q, k, v):
    k, v = (x.double().repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) / D**0.5
    at = torch.arange(len(k), device="cuda")
    hidden = at > at[len(k) - len(q) :, None]
    return torch.einsum("hqk,khd->qhd", torch.softmax(scores.masked_fill(hidden, -1e300), -1), v)


@pytest.mark.parametrize("sequences", [SEQUENCES, ((1, 500),) * 9])
def test_chunks_and_tokens_in_one_launch(sequences):
    arguments, own = operands(sequences)
    bounds = arguments[-1].tolist()
    got = mixed.attention_mixed(*arguments)
    for s, (count, _) in enumerate(sequences):
        if count:
            rows = slice(bounds[s], bounds[s + 1])
            want = exact(arguments[0][rows], *own[s])
            assert float((got[rows].double() - want).norm() / want.norm()) < 6e-3


def test_caches_may_lie_in_one_with_keys_before_values():
    arguments, _ = operands(SEQUENCES)
    q, k, v, *rest = arguments
    both = torch.cat([k, v], -1).transpose(1, 2).contiguous()  # [pages, kv_heads, page, 2 d]
    views = both.transpose(1, 2).chunk(2, -1)
    assert torch.equal(mixed.attention_mixed(q, *views, *rest), mixed.attention_mixed(*arguments))


def test_a_graph_follows_what_the_gpu_says_of_the_batch():
    arguments, _ = operands(SEQUENCES)
    mixed.attention_mixed(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mixed.attention_mixed(*arguments)
    # As many tokens, shared out in another way.
    tokens = arguments[0].shape[0]
    counts = (50, tokens - 70, 0, 20, 0, 0)
    arguments[-1].copy_(torch.tensor([0, *counts]).cumsum(0))
    lengths = (3000, 700, 17, 60, 1300, 2049)
    lengths = tuple(max(n, count) for n, count in zip(lengths, counts, strict=True))
    arguments[3].copy_(torch.tensor(lengths))
    graph.replay()
    bounds, (q, k, v, _, table, _) = arguments[-1].tolist(), arguments
    for s in (0, 1, 3):
        rows = slice(bounds[s], bounds[s + 1])
        kv = [cache[table[s].long()].flatten(0, 1)[: lengths[s]] for cache in (k, v)]
        want = exact(q[rows], *kv)
        assert float((out[rows].double() - want).norm() / want.norm()) < 6e-3


@pytest.mark.parametrize("sequences", [SEQUENCES, ((1, 500),) * 9])
def test_a_list_made_before_gives_the_same_bits(sequences):
    arguments, _ = operands(sequences)
    q, _, _, seen, _, bounds = arguments
    tasks = mixed.get_scheduler_metadata(bounds, seen, q.shape[0], HEADS, KV_HEADS)
    got = mixed.attention_mixed(*arguments, scheduler_metadata=tasks)
    assert torch.equal(got, mixed.attention_mixed(*arguments))
