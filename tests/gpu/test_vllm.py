"""A layer of vLLM's back end on a GPU: steps of prompts and tokens beside float64. vLLM itself is
not needed; `tests/integrations/test_vllm_interface.py` has its classes."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
vllm = pytest.importorskip("warploom.integrations.vllm")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
HEADS, KV_HEADS, D, PAGE, PAGES = 8, 2, 128, 16, 80
# New tokens of each request, step by step: prompts, then tokens beside a chunk.
STEPS = ((37, 5, 300), (1, 1, 40), (1, 1, 1))


def caches(newer):
    """An empty cache as vLLM 0.33 has it, or as before."""
    shape = (PAGES, KV_HEADS, PAGE, 2 * D) if newer else (2, PAGES, PAGE, KV_HEADS, D)
    return torch.zeros(shape, device="cuda").bfloat16()


def exact(q, k, v, window):
    """Rows of a request that are the last of its keys."""
    k, v = (x.double().repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) / D**0.5
    at = torch.arange(len(k), device="cuda")
    behind = at[len(k) - len(q) :, None] - at
    hidden = (behind < 0) | (behind >= (window or len(k)))
    return torch.einsum("hqk,khd->qhd", torch.softmax(scores.masked_fill(hidden, -1e300), -1), v)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("newer", [True, False])
def test_steps_store_their_tokens_and_attend(newer, window):
    layer = vllm.layer_of({"scale": D**-0.5, "kv_cache_dtype": "auto", "sliding_window": window})
    table = torch.randperm(PAGES - 1, device="cuda")[: 3 * 22].view(3, 22).int()
    cache, kept = caches(newer), [[torch.empty(0, KV_HEADS, D, device="cuda")] * 2] * 3
    for counts in STEPS:
        tokens = sum(counts)
        bounds = torch.tensor([0, *counts], device="cuda").cumsum(0).int()
        q = torch.randn(tokens + 3, HEADS, D, device="cuda").bfloat16()
        k, v = (torch.randn(tokens + 3, KV_HEADS, D, device="cuda").bfloat16() for _ in "kv")
        places = [
            torch.arange(len(old), len(old) + n, device="cuda")
            for (old, _), n in zip(kept, counts, strict=True)
        ]
        slots = [table[s].long()[at // PAGE] * PAGE + at % PAGE for s, at in enumerate(places)]
        kept = [
            [torch.cat([x, y[bounds[s] : bounds[s + 1]]]) for x, y in zip(old, (k, v), strict=True)]
            for s, old in enumerate(kept)
        ]
        step = SimpleNamespace(
            causal=True,
            num_reqs=3,
            num_actual_tokens=tokens,
            query_start_loc=bounds,
            seq_lens=torch.tensor([len(x) for x, _ in kept], device="cuda", dtype=torch.int32),
            block_table_tensor=table,
            slot_mapping=torch.cat([*slots, torch.full((3,), -1, device="cuda")]),
        )
        out = torch.full((tokens + 3, HEADS * D), 7.0, device="cuda").bfloat16()
        layer.run(q, k, v, cache, vllm.batch_of(step), out)
        for s in range(3):
            rows = slice(int(bounds[s]), int(bounds[s + 1]))
            want = exact(q[rows], *kept[s], window)
            got = out[rows].view(-1, HEADS, D).double()
            assert float((got - want).norm() / want.norm()) < 6e-3
        assert bool((out[tokens:] == 7.0).all())
