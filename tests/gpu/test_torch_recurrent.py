"""Recurrent operators on a GPU: beside a loop over rows in float64, in graphs, where they lie."""

import pytest

from warploom.kernels.recurrent.program import RecurrentConfig
from warploom.kernels.recurrent.reference import reference
from warploom.tile import BF16, FP32

torch = pytest.importorskip("torch")
ops = pytest.importorskip("warploom.integrations.torch_recurrent")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
BOUND = 5e-3  # relative error in norm: weights, state and result are rounded to bf16


def normal(*shape):
    return torch.randn(shape, device="cuda").bfloat16()


def decays(*shape):
    return torch.nn.functional.logsigmoid(torch.randn(shape, device="cuda")) / 8


def close(got, want, bound=BOUND):
    want = torch.from_numpy(want).cuda() if not isinstance(want, torch.Tensor) else want.double()
    return float((got.double() - want).norm() / want.norm()) < bound


def loop_over_rows(decay, scale, softplus=False, **given):
    """o and the last state in float64, from tensors by the names of the kernel's arrays."""
    given = {name: one for name, one in given.items() if one is not None}
    config = RecurrentConfig(
        decay,
        "beta" in given,
        softplus,
        BF16 if decay == "channel" else FP32,
        skip="skip" in given,
        initial="initial" in given,
        final=True,
    )
    wide = {name: one.double().cpu().numpy() for name, one in given.items()}
    return reference(config, wide, scale)


@pytest.mark.parametrize("rows", [1, 64, 1000])
@pytest.mark.parametrize("kind", ["token", "narrow", "head", "none"])
def test_gla_without_and_with_decays_of_rows_and_heads(kind, rows):
    heads, size = 4, 128 if kind == "head" else 64
    q, k, v = (normal(2, rows, heads, size) for _ in range(3))
    g = {"none": None, "head": decays(heads)}.get(kind, decays(2, rows, heads))
    g = g.bfloat16() if kind == "narrow" else g
    gate = {} if g is None else {"g_gamma" if kind == "head" else "g": g}
    out, state = ops.simple_gla(q, k, v, **gate, scale=0.5, output_final_state=True)
    decay = "token" if kind == "narrow" else kind
    want = loop_over_rows(decay, 0.5, q=q, k=k, v=v, g=g)
    assert close(out, want["o"]) and close(state, want["final"])


@pytest.mark.parametrize("rows", [1, 64, 1000])
def test_gla_is_its_loop(rows):
    q, k, v = (normal(2, rows, 4, 64) for _ in range(3))
    g, start = decays(2, rows, 4, 64).bfloat16(), torch.randn(2, 4, 64, 64, device="cuda")
    out, state = ops.gla(q, k, v, g, 0.5, start, True)
    want = loop_over_rows("channel", 0.5, q=q, k=k, v=v, g=g, initial=start)
    assert close(out, want["o"]) and close(state, want["final"])


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("rows", [1, 64, 1000])
def test_delta_rules_are_their_loops(rows, gated):
    q, k, v = (normal(2, rows, 4, 64) for _ in range(3))
    k = torch.nn.functional.normalize(k.float(), dim=-1).bfloat16()
    g, beta = decays(2, rows, 4), torch.rand(2, rows, 4, device="cuda")
    if gated:
        out, state = ops.gated_delta_rule(q, k, v, g, beta, 0.5, None, True)
    else:
        out, state = ops.delta_rule(q, k, v, beta, 0.5, None, True)
    decay, gates = ("token", {"g": g}) if gated else ("none", {})
    want = loop_over_rows(decay, 0.5, q=q, k=k, v=v, beta=beta, **gates)
    assert close(out, want["o"]) and close(state, want["final"])


def test_retention_is_its_loop():
    q, k, v = (normal(1, 300, 4, 128) for _ in range(3))
    g = torch.log1p(-torch.exp2(-5.0 - torch.arange(4, device="cuda")))
    out, state = ops.retention(q, k, v)
    assert state is None
    assert close(out, loop_over_rows("head", 128**-0.5, q=q, k=k, v=v, g=g)["o"])


def test_rows_in_two_calls_are_rows_in_one():
    q, k, v, g = (*(normal(2, 300, 4, 64) for _ in range(3)), decays(2, 300, 4))
    whole, last = ops.simple_gla(q, k, v, g, output_final_state=True)
    state, parts = torch.zeros(2, 4, 64, 64, device="cuda"), []
    for rows in (slice(0, 130), slice(130, 300)):
        given = [one[:, rows] for one in (q, k, v, g)]
        out, state = ops.simple_gla(*given, initial_state=state, output_final_state=True)
        parts.append(out)
    assert close(torch.cat(parts, 1), whole) and close(state, last)


@pytest.mark.parametrize("rows", [1, 1000])
def test_mamba_with_all_that_it_takes(rows):
    x, dt, b, c = normal(2, rows, 8, 64), normal(2, rows, 8), *(normal(2, rows, 2, 128) / 8,) * 2
    a, skip, bias = -torch.rand(8, device="cuda"), *torch.randn(2, 8, device="cuda")
    start, z = torch.randn(2, 8, 64, 128, device="cuda"), normal(2, rows, 8, 64)
    y, state = ops.mamba_chunk_scan_combined(
        x, dt, a, b, c, 256, D=skip, z=z, dt_bias=bias, initial_states=start, dt_softplus=True,
        return_final_states=True,
    )  # fmt: skip
    want = loop_over_rows(
        "step", 1.0, True, q=c, k=b, v=x, dt=dt, a=a, bias=bias, skip=skip,
        initial=start.transpose(2, 3),
    )  # fmt: skip
    assert close(y, torch.from_numpy(want["o"]).cuda() * torch.nn.functional.silu(z.double()))
    assert close(state.transpose(2, 3), want["final"])


def test_a_whole_graph_compiles_and_is_captured():
    q, k, v, g = (*(normal(1, 300, 4, 64) for _ in range(3)), decays(1, 300, 4))

    def block(q, k, v, g):
        return ops.simple_gla(q, k, v, g)[0] * 2

    with torch.no_grad():
        want = block(q, k, v, g)
        assert torch.equal(torch.compile(block, fullgraph=True)(q, k, v, g), want)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = block(q, k, v, g)
    graph.replay()
    assert torch.equal(got, want)


def test_tensors_are_used_where_they_lie():
    packed, g = normal(2, 300, 3, 4, 64), decays(2, 300, 4)
    apart = packed.unbind(2)
    got, want = (ops.simple_gla(*qkv, g)[0] for qkv in (apart, [x.contiguous() for x in apart]))
    assert torch.equal(got, want)


def test_opcheck():
    q, k, v, g = (*(normal(1, 100, 4, 64) for _ in range(3)), decays(1, 100, 4))
    given = (q, k, v, g, None, None, None, None, None, None, 1.0, True)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.warploom.recurrent.default, given, test_utils=checks)


@pytest.mark.parametrize("kind", ["none", "head", "token", "channel", "delta"])
def test_a_step_of_decoding_moves_the_state_in_place(kind):
    steps = pytest.importorskip("warploom.integrations.torch_recurrent_step")
    q, k, v = (normal(2, 1, 4, 64) for _ in range(3))
    k = torch.nn.functional.normalize(k.float(), dim=-1).bfloat16()
    state = torch.randn(2, 4, 64, 64, device="cuda")
    gates = {"head": decays(4), "token": decays(2, 1, 4), "delta": decays(2, 1, 4)}
    g = decays(2, 1, 4, 64).bfloat16() if kind == "channel" else gates.get(kind)
    beta = torch.rand(2, 1, 4, device="cuda") if kind == "delta" else None
    given = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial": state.clone()}
    want = loop_over_rows("token" if kind == "delta" else kind, 0.125, **given)
    row = [None if one is None else one if one.dim() == 1 else one[:, 0] for one in (g, beta)]
    out = steps.recurrent_step(q[:, 0], k[:, 0], v[:, 0], state, *row)
    assert close(out, want["o"][:, 0]) and close(state, want["final"], 1e-5)


def test_a_step_of_mamba_moves_the_state_in_place():
    steps = pytest.importorskip("warploom.integrations.torch_recurrent_step")
    x, b, c = normal(2, 1, 8, 64), normal(2, 1, 2, 64), normal(2, 1, 2, 64)
    dt, a = torch.rand(2, 1, 8, device="cuda"), -torch.rand(8, device="cuda")
    skip, bias = torch.randn(8, device="cuda"), torch.randn(8, device="cuda")
    state = torch.randn(2, 8, 64, 64, device="cuda")
    start = state.transpose(-1, -2).clone()
    given = {"q": c, "k": b, "v": x, "dt": dt, "a": a, "skip": skip, "bias": bias}
    want = loop_over_rows("step", 1.0, True, **given, initial=start)
    row = [one[:, 0] for one in (x, dt, b, c)]
    y = steps.selective_state_update(state, row[0], row[1], a, row[2], row[3], skip, bias, True)
    assert close(y, want["o"][:, 0])
    assert close(state.transpose(-1, -2), want["final"], 1e-5)


@pytest.mark.parametrize("kind", ["token", "head", "step", "none"])
def test_few_heads_of_many_rows_are_cut_in_segments(kind, monkeypatch):
    counts, run = [], ops.run_segments
    monkeypatch.setattr(ops, "run_segments", lambda *a: (counts.append(a[-1]), run(*a)))
    rows, heads = 4096, 4
    q, k, v = (normal(1, rows, heads, 64) for _ in range(3))
    start = torch.randn(1, heads, 64, 64, device="cuda")
    if kind == "step":
        dt, a = torch.rand(1, rows, heads, device="cuda") * 0.1, -1 - torch.rand(heads).cuda()
        out, state = ops.mamba_chunk_scan_combined(
            v, dt, a, k, q, initial_states=start.transpose(2, 3), return_final_states=True
        )
        state = state.transpose(2, 3)
        want = loop_over_rows("step", 1.0, q=q, k=k, v=v, dt=dt, a=a, initial=start)
    else:
        g = {"token": decays(1, rows, heads), "head": decays(heads)}.get(kind)
        gate = {} if g is None else {"g_gamma" if kind == "head" else "g": g}
        more = {"scale": 0.5, "initial_state": start, "output_final_state": True}
        out, state = ops.simple_gla(q, k, v, **gate, **more)
        want = loop_over_rows(kind, 0.5, q=q, k=k, v=v, g=g, initial=start)
    assert counts and counts[0] > 1
    assert close(out, want["o"]) and close(state, want["final"])


def test_gated_delta_rule_with_keys_of_128():
    q, v, beta = normal(2, 300, 2, 128), normal(2, 300, 4, 128), torch.rand(2, 300, 4).cuda()
    k = torch.nn.functional.normalize(normal(2, 300, 2, 128).float(), dim=-1).bfloat16()
    g = decays(2, 300, 4)
    out, state = ops.gated_delta_rule(q, k, v, g, beta, scale=0.5, output_final_state=True)
    want = loop_over_rows("token", 0.5, q=q, k=k, v=v, g=g, beta=beta)
    assert close(out, want["o"]) and close(state, want["final"])


@pytest.mark.parametrize("norm", [True, False])
def test_based_is_its_quadratic_form(norm):
    q, k, v = normal(2, 300, 2, 16), normal(2, 300, 2, 16), normal(2, 300, 4, 64)
    got = ops.based(q, k, v, use_norm=norm)
    wide = [x.double().repeat_interleave(4 // x.shape[2], 2) for x in (q, k, v)]
    s = torch.einsum("bmhd,bnhd->bhmn", *wide[:2]) / 4
    weights = torch.tril(1 + s + s * s / 2)
    want = torch.einsum("bhmn,bnhe->bmhe", weights, wide[2])
    if norm:
        want = want / weights.sum(-1).transpose(1, 2)[..., None]
    assert float((got.double() - want).norm() / want.norm()) < BOUND


@pytest.mark.parametrize("rows", [1, 64, 1000])
def test_kimi_delta_attention_is_its_loop(rows):
    q, v, beta = normal(2, rows, 2, 64), normal(2, rows, 4, 128), torch.rand(2, rows, 4).cuda()
    k = torch.nn.functional.normalize(normal(2, rows, 2, 64).float(), dim=-1).bfloat16()
    g, start = decays(2, rows, 4, 64).bfloat16(), torch.randn(2, 4, 64, 128, device="cuda")
    out, state = ops.kimi_delta_attention(q, k, v, g, beta, 0.5, start, True)
    want = loop_over_rows("channel", 0.5, q=q, k=k, v=v, g=g, beta=beta, initial=start)
    assert close(out, want["o"]) and close(state, want["final"])
