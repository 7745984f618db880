"""Gradients of the recurrent operators on a GPU: beside autograd through a loop in float64."""

import pytest

torch = pytest.importorskip("torch")
ops = pytest.importorskip("warploom.integrations.torch_recurrent")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
BOUND, OF_GATES = 6e-3, 2e-2  # relative error in norm; gates have small differences of large sums


def normal(*shape):
    return torch.randn(shape, device="cuda").bfloat16()


def decays(*shape):
    return torch.nn.functional.logsigmoid(torch.randn(shape, device="cuda")) / 8


def loop_over_rows(q, k, v, g, weights, scale, state, erased=0.0):
    """o and the last state in float64; g: [batch, rows, heads] or with d behind; with `erased` 1 by
    the delta rule."""
    heads = v.shape[2]
    q, k = (x.double().repeat_interleave(heads // x.shape[2], 2) for x in (q, k))
    gates, v, out = torch.exp(g.double()), v.double(), []
    gates = gates if gates.dim() == 4 else gates[..., None].expand(q.shape)
    for i in range(v.shape[1]):
        state = gates[:, i, :, :, None] * state
        known = erased * torch.einsum("bhd,bhde->bhe", k[:, i], state)
        new = weights[:, i, :, None] * (v[:, i] - known)
        state = state + k[:, i, :, :, None] * new[:, :, None]
        out.append(scale * torch.einsum("bhd,bhde->bhe", q[:, i], state))
    return torch.stack(out, 1), state


def judged(names, got, want):
    for name, one, other in zip(names, got, want, strict=True):
        bound = BOUND if name in ("q", "k", "v", "x", "b", "c", "start") else OF_GATES
        assert one.shape == other.shape
        assert float((one.double() - other).norm() / other.norm()) < bound, name


@pytest.mark.parametrize("rows", [1, 64, 500])
@pytest.mark.parametrize("kind", ["token", "narrow", "head", "none", "wide"])
def test_gradients_of_simple_gla_are_those_of_its_loop(kind, rows):
    heads, d, e = 4, *((128, 128) if kind == "wide" else (64, 64))
    q, k, v = normal(2, rows, 2, d), normal(2, rows, 2, d) / 8, normal(2, rows, heads, e)
    g = {"none": None, "head": decays(heads)}.get(kind, decays(2, rows, heads))
    g = g.bfloat16() if kind == "narrow" else g
    start = torch.randn(2, heads, d, e, device="cuda")
    leaves = [x.requires_grad_() for x in (q, k, v, start, *([] if g is None else [g]))]
    do, dfinal = normal(2, rows, heads, e), torch.randn(2, heads, d, e, device="cuda")
    gate = {} if g is None else {"g_gamma" if kind == "head" else "g": g}
    out, state = ops.simple_gla(
        q, k, v, **gate, scale=0.5, initial_state=start, output_final_state=True
    )
    got = torch.autograd.grad((out, state), leaves, (do, dfinal))
    wide = [x.detach().double().requires_grad_() for x in leaves]
    ones = torch.ones(2, rows, heads, device="cuda", dtype=torch.float64)
    gates = (0.0 if g is None else wide[4]) * ones
    right = loop_over_rows(*wide[:3], gates, ones, 0.5, wide[3])
    want = torch.autograd.grad(right, wide, (do.double(), dfinal.double()))
    judged(["q", "k", "v", "start", "g"][: len(got)], got, want)


@pytest.mark.parametrize("rows", [1, 64, 500])
def test_gradients_of_gla_are_those_of_its_loop(rows):
    q, k, v = normal(2, rows, 2, 64), normal(2, rows, 2, 64) / 8, normal(2, rows, 4, 128)
    g, start = decays(2, rows, 4, 64).bfloat16(), torch.randn(2, 4, 64, 128, device="cuda")
    leaves = [x.requires_grad_() for x in (q, k, v, g, start)]
    do, dfinal = normal(2, rows, 4, 128), torch.randn(2, 4, 64, 128, device="cuda")
    got = torch.autograd.grad(ops.gla(q, k, v, g, 0.5, start, True), leaves, (do, dfinal))
    wide = [x.detach().double().requires_grad_() for x in leaves]
    ones = torch.ones(2, rows, 4, device="cuda", dtype=torch.float64)
    right = loop_over_rows(*wide[:4], ones, 0.5, wide[4])
    want = torch.autograd.grad(right, wide, (do.double(), dfinal.double()))
    judged(["q", "k", "v", "g", "start"], got, want)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("rows", [1, 64, 500])
def test_gradients_of_delta_rules_are_those_of_their_loops(rows, gated):
    q, v, start = normal(2, rows, 2, 64), normal(2, rows, 4, 128), normal(2, 4, 64, 128).float()
    k = torch.nn.functional.normalize(normal(2, rows, 2, 64).float(), dim=-1).bfloat16()
    beta, g = torch.rand(2, rows, 4, device="cuda"), decays(2, rows, 4)
    leaves = [x.requires_grad_() for x in (q, k, v, beta, start, *([g] if gated else []))]
    do, dfinal = normal(2, rows, 4, 128), torch.randn(2, 4, 64, 128, device="cuda")
    if gated:
        results = ops.gated_delta_rule(q, k, v, g, beta, 0.5, start, True)
    else:
        results = ops.delta_rule(q, k, v, beta, 0.5, start, True)
    got = torch.autograd.grad(results, leaves, (do, dfinal))
    wide = [x.detach().double().requires_grad_() for x in leaves]
    gates = wide[5] if gated else torch.zeros_like(wide[3])
    right = loop_over_rows(*wide[:3], gates, wide[3], 0.5, wide[4], 1.0)
    want = torch.autograd.grad(right, wide, (do.double(), dfinal.double()))
    judged(["q", "k", "v", "beta", "start", "g"][: len(got)], got, want)


@pytest.mark.parametrize("size", [64, 128])
def test_gradients_of_mamba_with_all_that_it_takes(size):
    rows, heads = 300, 8
    x, b, c = normal(2, rows, heads, 64), normal(2, rows, 2, size) / 8, normal(2, rows, 2, size)
    dt = normal(2, rows, heads)
    a, skip, bias = -torch.rand(heads, device="cuda"), *torch.randn(2, heads, device="cuda")
    start, z = torch.randn(2, heads, 64, size, device="cuda"), normal(2, rows, heads, 64)
    leaves = [one.requires_grad_() for one in (x, dt, a, b, c, skip, bias, start, z)]
    y, state = ops.mamba_chunk_scan_combined(
        x, dt, a, b, c, 256, D=skip, z=z, dt_bias=bias, initial_states=start, dt_softplus=True,
        return_final_states=True,
    )  # fmt: skip
    do, dfinal = torch.randn_like(y), torch.randn_like(state)
    got = torch.autograd.grad((y, state), leaves, (do, dfinal))
    wide = [one.detach().double().requires_grad_() for one in leaves]
    x, dt, a, b, c, skip, bias, start, z = wide
    step = torch.nn.functional.softplus(dt + bias)
    out, last = loop_over_rows(c, b, x, step * a, step, 1.0, start.transpose(2, 3))
    y = (out + skip[:, None] * x) * torch.nn.functional.silu(z)
    right = y, last.transpose(2, 3)
    want = torch.autograd.grad(right, wide, (do.double(), dfinal.double()))
    judged(["x", "dt", "a", "b", "c", "skip", "bias", "start", "z"], got, want)


def test_a_whole_training_step_compiles():
    q, k, v, g = (*(normal(1, 300, 4, 64) for _ in range(3)), decays(1, 300, 4))
    leaves = [x.requires_grad_() for x in (q, k, v, g)]

    def loss(q, k, v, g):
        return (ops.simple_gla(q, k, v, g)[0].float() ** 2).mean()

    want = torch.autograd.grad(loss(*leaves), leaves)
    got = torch.autograd.grad(torch.compile(loss, fullgraph=True)(*leaves), leaves)
    for one, other in zip(got, want, strict=True):
        assert float((one.double() - other.double()).norm() / other.double().norm()) < BOUND


def test_gradients_of_every_run_have_the_same_bits():
    q, k, v, g = (*(normal(2, 300, 4, 64).requires_grad_() for _ in range(3)), decays(2, 300, 4))
    runs = [torch.autograd.grad(ops.simple_gla(q, k, v, g)[0].sum(), (q, k, v)) for _ in range(2)]
    assert all(torch.equal(*pair) for pair in zip(*runs, strict=True))


def test_opcheck():
    q, k, v, g = (*(normal(1, 100, 4, 64) for _ in range(3)), decays(1, 100, 4))
    q.requires_grad_()
    given = (q, k, v, g, None, None, None, None, None, None, 1.0, True, True)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.warploom.recurrent.default, given, test_utils=checks)
