"""Row operators on a GPU: float64 beside them, whole graphs, CUDA graphs, the same bits twice."""

import pytest

torch = pytest.importorskip("torch")
rows = pytest.importorskip("warploom.integrations.torch_rows")
fused = pytest.importorskip("warploom.integrations.torch_loss")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
M, LENGTHS = 300, (1000, 1001, 40000)
F = torch.nn.functional


def leaf(*shape):
    return torch.randn(shape, device="cuda").bfloat16().requires_grad_()


def close(got, want, bound=8e-3):
    return float((got.double() - want.double()).norm() / want.double().norm()) < bound


def rms(x, w, h):
    a = x + h
    return F.rms_norm(a, w.shape, w, 1e-6), a


def block(x, w, h):
    y, h = rows.rms_norm(x, w, residual=h)
    return rows.softmax(rows.swiglu(y, h))


@pytest.mark.parametrize("columns", LENGTHS)
def test_a_norm_with_a_residual_and_its_gradients(columns):
    leaves = leaf(M, columns), leaf(columns), leaf(M, columns)
    wide = [one.detach().double().requires_grad_() for one in leaves]
    got, want = rows.rms_norm(leaves[0], leaves[1], residual=leaves[2]), rms(*wide)
    grads = [torch.randn_like(one) for one in got]
    ours = torch.autograd.grad(got, leaves, grads)
    theirs = torch.autograd.grad(want, wide, [one.double() for one in grads])
    for a, b in zip((*got, *ours), (*want, *theirs), strict=True):
        assert close(a, b)


@pytest.mark.parametrize("columns", LENGTHS)
def test_a_loss_and_its_gradient(columns):
    x = leaf(M, columns)
    target = torch.randint(0, columns, (M,), device="cuda")
    target[::7] = -100
    loss, wide = rows.cross_entropy(x, target), x.detach().double().requires_grad_()
    want = F.cross_entropy(wide, target)
    assert close(loss, want, 1e-5)
    (ours,), (theirs,) = torch.autograd.grad(loss, x), torch.autograd.grad(want, wide)
    assert close(ours, theirs)


def test_gradients_of_weights_are_the_same_bits_twice():
    x, w = leaf(M, 1000), leaf(1000)
    grad = torch.randn(M, 1000, device="cuda").bfloat16()
    first, second = (torch.autograd.grad(rows.layer_norm(x, w), w, grad)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_a_whole_graph_compiles_and_is_captured():
    x, w, h = leaf(M, 1000), leaf(1000), leaf(M, 1000)
    want = block(x, w, h)
    assert torch.equal(torch.compile(block, fullgraph=True)(x, w, h), want)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        got = block(x, w, h)
    graph.replay()
    assert torch.equal(got, want)


def test_rows_that_begin_anywhere_are_copied():
    x = torch.randn(M * 1000 + 3, device="cuda").bfloat16()[3:].view(M, 1000)
    assert torch.equal(rows.softmax(x), rows.softmax(x.clone()))


def test_opcheck_with_gradients():
    torch.library.opcheck(torch.ops.warploom.rmsnorm.default, (leaf(M, 1000), leaf(1000)))
    torch.library.opcheck(torch.ops.warploom.softmax.default, (leaf(M, 1000), True))


@pytest.mark.parametrize("pairs", [False, True])
def test_rotary_turns_back(pairs):
    x, angles = leaf(2, 50, 4, 64), torch.rand(50, 32, device="cuda")
    cos, sin = angles.cos(), angles.sin()
    y = rows.rotary(x, cos, sin, pairs)
    (back,) = torch.autograd.grad(y, x, y)
    assert close(back, x, 1e-2)


@pytest.mark.parametrize("pairs", [False, True])
def test_rotary_in_place(pairs):
    x, angles = torch.randn(2, 50, 4, 64, device="cuda").bfloat16(), torch.rand(50, 32).cuda()
    want = rows.rotary(x, angles.cos(), angles.sin(), pairs)
    assert torch.equal(rows.rotary_(x, angles.cos(), angles.sin(), pairs), want)


@pytest.mark.parametrize("columns", LENGTHS[:2])
def test_dropout_before_a_residual_is_undone_alike(columns):
    x, h, w = leaf(M, columns), leaf(M, columns), leaf(columns)
    torch.manual_seed(7)
    got = rows.rms_norm(x, w, residual=torch.zeros_like(h), dropout=0.25)[1]
    kept = got.detach() != 0
    torch.manual_seed(7)
    got = rows.rms_norm(x, w, residual=h, dropout=0.25)
    wide = [one.detach().double().requires_grad_() for one in (x, w, h)]
    want = rms(torch.where(kept, wide[0] / 0.75, 0), wide[1], wide[2])
    grads = [torch.randn_like(one) for one in got]
    ours = torch.autograd.grad(got, (x, w, h), grads)
    theirs = torch.autograd.grad(want, wide, [one.double() for one in grads])
    for a, b in zip((*got, *ours), (*want, *theirs), strict=True):
        assert close(a, b)
    assert abs(float(kept.float().mean()) - 0.75) < 0.01


@pytest.mark.parametrize("columns", LENGTHS)
def test_a_norm_as_rows_of_8_bits(columns):
    x, w, h = (leaf(*shape).detach() for shape in ((M, columns), (columns,), (M, columns)))
    y, scale, summed = rows.quantised_rms_norm(x, w, residual=h)
    want, _ = rms(x.double(), w.double(), h.double())
    assert torch.equal(summed, x + h) and close(y.double() * scale[:, None], want, 0.04)


@pytest.mark.parametrize(("count", "classes", "chunk"), [(700, 1000, 256), (300, 32000, 0)])
def test_a_loss_of_a_product_and_its_gradients(count, classes, chunk):
    x, weight = leaf(count, 512), (leaf(classes, 512).detach() / 20).requires_grad_()
    target = torch.randint(0, classes, (count,), device="cuda")
    target[::7] = -100
    wide = [one.detach().double().requires_grad_() for one in (x, weight)]
    got = fused.linear_cross_entropy(x, weight, target, chunk=chunk)
    want = F.cross_entropy(wide[0] @ wide[1].T, target)
    ours, theirs = torch.autograd.grad(got, (x, weight)), torch.autograd.grad(want, wide)
    assert close(got, want, 2e-3)
    assert all(close(a, b, 1e-2) for a, b in zip(ours, theirs, strict=True))
    with torch.no_grad():
        assert close(fused.linear_cross_entropy(x, weight, target, chunk=chunk), want, 2e-3)


@pytest.mark.parametrize("count", [8, 5000, 1 << 24, 999])
def test_scaling_in_place_reads_nothing_where_it_changes_nothing(count):
    x = torch.randn(count, device="cuda").bfloat16()
    want, by = (x.float() * 0.3).bfloat16(), torch.tensor(0.3, device="cuda")
    rows.scale_in_place(x, by)
    assert torch.equal(x, want)
    rows.scale_in_place(x, torch.ones((), device="cuda"))
    assert torch.equal(x, want)


def test_a_loss_of_a_product_compiles():
    x, weight = leaf(300, 512), leaf(1000, 512)
    target = torch.randint(0, 1000, (300,), device="cuda")
    want = fused.linear_cross_entropy(x, weight, target)
    call = torch.compile(fused.linear_cross_entropy, fullgraph=True)
    assert torch.equal(call(x, weight, target), want)
