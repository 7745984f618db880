"""Appending to a cache on a GPU: torch beside it, a graph that appends again and again."""

import pytest

torch = pytest.importorskip("torch")
cache = pytest.importorskip("warploom.integrations.torch_cache")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
BATCH, TOKENS, HEADS, KV_HEADS, D, ROOM = 3, 5, 16, 4, 128, 256


def tensors(page, kind=torch.bfloat16):
    """Random new heads, caches and angles, and a table in random order."""
    found = {x: torch.randn(BATCH, TOKENS, KV_HEADS, D, device="cuda").bfloat16() for x in "kv"}
    found["q"] = torch.randn(BATCH, TOKENS, HEADS, D, device="cuda").bfloat16()
    found["cache_seqlens"] = torch.tensor([0, 90, ROOM - 2], dtype=torch.int32, device="cuda")
    rows = (BATCH, ROOM)
    if page:
        count = BATCH * ROOM // page
        rows = (count + 2, page)
        table = torch.randperm(count + 2, device="cuda")[:count].int()
        found["block_table"] = table.view(BATCH, -1)
    for x in "kv":
        found[f"{x}_cache"] = torch.randn(*rows, KV_HEADS, D, device="cuda").to(kind)
    turn = torch.arange(ROOM, device="cuda")[:, None] * 1e4 ** (
        -torch.arange(0, D, 2, device="cuda") / D
    )
    return found | {"rotary_cos": turn.cos(), "rotary_sin": turn.sin()}


def rotated(x, cos, sin, pairs):
    wide = x.double()
    left, right = (wide[..., 0::2], wide[..., 1::2]) if pairs else wide.chunk(2, -1)
    parts = left * cos - right * sin, left * sin + right * cos
    return torch.stack(parts, -1).flatten(-2) if pairs else torch.cat(parts, -1)


def row_of(given, b, at):
    """Where the caches have a token."""
    if "block_table" not in given:
        return b, at
    page = given["k_cache"].shape[1]
    return int(given["block_table"][b, at // page]), at % page


@pytest.mark.parametrize("page", [None, 16])
@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("narrow", [False, True])
def test_tokens_come_behind_those_there_are(page, pairs, narrow):
    given = tensors(page, torch.float8_e4m3fn if narrow else torch.bfloat16)
    factors = {}
    if narrow:
        factors = {f"{x}_descale": torch.rand(BATCH, KV_HEADS, device="cuda") + 0.5 for x in "kv"}
    q = cache.append_kvcache(**given, **factors, rotary_interleaved=pairs)
    bound = 0.07 if narrow else 8e-3
    for b, length in enumerate(given["cache_seqlens"].tolist()):
        for t in range(min(TOKENS, ROOM - length)):
            turns = (
                given["rotary_cos"][length + t].double(),
                given["rotary_sin"][length + t].double(),
            )
            want = {"k": rotated(given["k"][b, t], *turns, pairs), "v": given["v"][b, t].double()}
            for x in "kv":
                found = given[f"{x}_cache"][row_of(given, b, length + t)].double()
                found = found * factors[f"{x}_descale"][b][:, None] if narrow else found
                assert (found - want[x]).abs().max() <= bound * want[x].abs().max()
            exact = rotated(given["q"][b, t], *turns, pairs)
            assert (q[b, t].double() - exact).abs().max() <= 8e-3 * exact.abs().max()


def test_a_graph_appends_where_lengths_on_the_gpu_say():
    given = tensors(16)
    given["cache_seqlens"].zero_()
    cache.append_kvcache(**given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cache.append_kvcache(**given)
        given["cache_seqlens"] += TOKENS
    for turn in range(3):
        for x in "kv":
            given[x].normal_()
        graph.replay()
        at = turn * TOKENS + TOKENS - 1
        for b in range(BATCH):
            assert torch.equal(given["v_cache"][row_of(given, b, at)], given["v"][b, -1])
    assert given["cache_seqlens"].tolist() == [3 * TOKENS] * BATCH
