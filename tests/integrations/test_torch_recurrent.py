"""Recurrent operators without a GPU: shapes and types of results, refusals."""

import pytest

from warploom.errors import InputError

torch = pytest.importorskip("torch")
ops = pytest.importorskip("warploom.integrations.torch_recurrent")


def make(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, device="meta", dtype=dtype)


def wide(*shape):
    return make(*shape, dtype=torch.float32)


def test_results_have_the_layouts_of_flash_linear_attention():
    q, v = make(2, 100, 4, 64), make(2, 100, 4, 128)
    for gates in ({}, {"g": wide(2, 100, 4)}, {"g": make(2, 100, 4)}, {"g_gamma": wide(4)}):
        out, state = ops.simple_gla(q, q, v, **gates, output_final_state=True)
        assert out.shape == v.shape and out.dtype is torch.bfloat16
        assert state.shape == (2, 4, 64, 128) and state.dtype is torch.float32
    shared = make(2, 100, 1, 64)
    assert ops.linear_attention(shared, shared, v)[1] is None
    assert ops.retention(q, q, v, initial_state=wide(2, 4, 64, 128))[0].shape == v.shape


def test_gla_and_delta_rules_have_the_layouts_of_flash_linear_attention():
    q, v, beta = make(2, 100, 4, 64), make(2, 100, 8, 128), make(2, 100, 8)
    for out, state in (
        ops.gla(q, q, v, make(2, 100, 8, 64), output_final_state=True),
        ops.kimi_delta_attention(q, q, v, make(2, 100, 8, 64), beta, output_final_state=True),
        ops.gated_delta_rule(q, q, v, wide(2, 100, 8), beta, output_final_state=True),
        ops.delta_rule(q, q, v, beta, output_final_state=True),
    ):
        assert out.shape == v.shape and state.shape == (2, 8, 64, 128)
    with pytest.raises(InputError, match="recurrent gates=fp32: expected bf16"):
        ops.gla(q, q, v, wide(2, 100, 8, 64))
    long, longer = make(2, 100, 4, 128), make(2, 100, 4, 136)
    assert ops.delta_rule(long, long, v, beta)[0].shape == v.shape
    with pytest.raises(InputError, match="key_dim=128: expected a multiple of 8, at most 64"):
        ops.gla(long, long, v, make(2, 100, 8, 128))
    with pytest.raises(InputError, match="key_dim=136: expected a multiple of 8, at most 128"):
        ops.delta_rule(longer, longer, v, beta)


def test_based_takes_few_channels_and_has_no_gradients():
    q, v = make(2, 100, 4, 16), make(2, 100, 8, 64)
    assert ops.based(q, q, v).shape == ops.based(q, q, v, use_norm=False).shape == v.shape
    with pytest.raises(InputError, match="key_dim=32: expected a multiple of 8, at most 16"):
        ops.based(make(2, 100, 4, 32), make(2, 100, 4, 32), v)
    with pytest.raises(NotImplementedError, match="no backward kernel for features of second"):
        ops.based(q.requires_grad_(), q, v, use_norm=False).sum().backward()
    q, beta = make(2, 100, 8, 64).requires_grad_(), make(2, 100, 8)
    with pytest.raises(NotImplementedError, match="decays of channels or keys above 64"):
        ops.kimi_delta_attention(q, q, v, q.detach(), beta)[0].sum().backward()


def test_results_have_the_layouts_of_mamba_ssm():
    x, dt, b = make(2, 100, 8, 64), make(2, 100, 8), make(2, 100, 2, 128)
    more = {"D": wide(8), "z": x, "dt_bias": wide(8), "dt_softplus": True}
    y = ops.mamba_chunk_scan_combined(x, dt, wide(8), b, b, 256, **more)
    assert y.shape == x.shape
    start = wide(2, 8, 64, 128)
    y, state = ops.mamba_chunk_scan_combined(
        x, dt, wide(8), b, b, initial_states=start, return_final_states=True
    )
    assert y.shape == x.shape and state.shape == start.shape


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": (2, 100, 3, 64), "k": (2, 100, 3, 64)}, "heads must be a multiple of groups"),
        ({"q": (2, 100, 4, 32)}, "expected twice"),
        ({"g": (2, 100, 3)}, r"g has shape \[2, 100, 3\], expected \[2, 100, 4\]"),
        ({"initial_state": (2, 4, 64, 64)}, "initial has shape"),
        ({"q": (2, 100, 4, 160), "k": (2, 100, 4, 160)}, "recurrent key_dim=160"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(changes, message):
    shapes = {"q": (2, 100, 4, 64), "k": (2, 100, 4, 64), "v": (2, 100, 4, 128)} | changes
    given = {n: wide(*s) if n in ("g", "initial_state") else make(*s) for n, s in shapes.items()}
    with pytest.raises(InputError, match=message):
        ops.simple_gla(**given)


def test_types_and_gates_that_exclude_each_other_are_refused():
    q = make(1, 64, 2, 64)
    with pytest.raises(InputError, match=r"expected torch\.bfloat16"):
        ops.linear_attention(q, q, q.float())
    with pytest.raises(InputError, match="g or g_gamma, not both"):
        ops.simple_gla(q, q, q, wide(1, 64, 2), wide(2))
    with pytest.raises(InputError, match="dt_bias with dt_softplus"):
        ops.mamba_chunk_scan_combined(q, make(1, 64, 2), wide(2), q, q, dt_bias=wide(2))
    with pytest.raises(InputError, match=r"a is torch\.bfloat16, expected torch\.float32"):
        ops.mamba_chunk_scan_combined(q, make(1, 64, 2), make(2), q, q)


def trained(*given):
    """Tensors on "meta" that want gradients, and a check that they get some like themselves."""
    for one in given:
        one.requires_grad_()

    def check(*results):
        sum(one.float().sum() for one in results).backward()
        assert all(x.grad.shape == x.shape and x.grad.dtype is x.dtype for x in given)

    return check


def test_gradients_are_like_their_tensors():
    q, v, start = make(2, 100, 4, 64), make(2, 100, 8, 128), wide(2, 8, 64, 128)
    for g in (wide(8), wide(2, 100, 8), make(2, 100, 8), make(2, 100, 8, 64)):
        given = [x.clone() for x in (q, q, v, start)]
        check = trained(*given, g)
        *qkv, initial = given
        if g.dim() == 4:
            check(*ops.gla(*qkv, g, initial_state=initial, output_final_state=True))
        else:
            gates = {"g_gamma" if g.dim() == 1 else "g": g}
            check(*ops.simple_gla(*qkv, **gates, initial_state=initial, output_final_state=True))
    check = trained(q)
    check(ops.linear_attention(q, q, v)[0])


def test_gradients_of_mamba_are_like_their_tensors():
    x, dt, b, c = (make(2, 50, *more) for more in ((8, 64), (8,), (2, 128), (2, 128)))
    a, skip, bias = wide(8), wide(8), wide(8)
    check = trained(x, dt, b, c, a, skip, bias)
    check(ops.mamba_chunk_scan_combined(x, dt, a, b, c, D=skip, dt_bias=bias, dt_softplus=True))


def test_gradients_of_delta_rules_are_like_their_tensors():
    for gates in (wide, make):
        q, k, v, start = (
            make(2, 70, 4, 64),
            make(2, 70, 4, 64),
            make(2, 70, 8, 128),
            wide(2, 8, 64, 128),
        )
        g, beta = gates(2, 70, 8), gates(2, 70, 8)
        check = trained(q, k, v, g, beta, start)
        check(*ops.gated_delta_rule(q, k, v, g, beta, None, start, True))
        check = trained(q, k, v, beta)
        check(ops.delta_rule(q, k, v, beta)[0])
    q, beta = make(1, 100, 4, 128).requires_grad_(), make(1, 100, 4)
    with pytest.raises(NotImplementedError, match="or keys above 64"):
        ops.delta_rule(q, q, q, beta)[0].sum().backward()


def test_gradients_of_shapes_that_a_trace_leaves_open():
    shapes = pytest.importorskip("torch.fx.experimental.symbolic_shapes")
    fake = pytest.importorskip("torch._subclasses.fake_tensor")
    mode = fake.FakeTensorMode(shape_env=shapes.ShapeEnv())
    given = (*(make(2, 100, 4, 64) for _ in range(3)), wide(2, 100, 4))
    q, k, v, g = (mode.from_tensor(x.requires_grad_(), static_shapes=False) for x in given)
    with mode:
        out, _ = ops.simple_gla(q, k, v, g)
        found = torch.autograd.grad(out.sum(), (q, k, v, g))
    assert all(type(x.shape[1]) is torch.SymInt for x in (out, *found)), "still open"
    assert [int(x.shape[-1]) for x in found] == [64, 64, 64, 4]
