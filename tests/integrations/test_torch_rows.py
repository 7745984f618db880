"""Row operators without a GPU: shapes from fake tensors, and results and gradients where the tile
programs run on the interpreter, beside torch's own."""

from types import SimpleNamespace

import numpy as np
import pytest

from warploom.errors import InputError
from warploom.kernels.rows.program import RowConfig, rotary, row_program
from warploom.kernels.user import written_names
from warploom.tile import interpret

torch = pytest.importorskip("torch")
rows = pytest.importorskip("warploom.integrations.torch_rows")
loss = pytest.importorskip("warploom.integrations.torch_loss")
torch_program = pytest.importorskip("warploom.integrations.torch_program")
FakeTensorMode = pytest.importorskip("torch._subclasses.fake_tensor").FakeTensorMode
functional = torch.nn.functional
compiling = pytest.importorskip("functorch.compile")
aot_function, make_boxed_func = compiling.aot_function, compiling.make_boxed_func
PARTS = 3


class Interpreted:
    """A program in the place of its kernel."""

    def __init__(self, program):
        self.program, self.interface = program, program

    def resident_tasks(self, tasks):
        return min(tasks, PARTS)

    def __call__(self, arrays, scalars, stream):
        values = {name: one.detach().float().numpy() for name, one in arrays.items()}
        found = interpret(self.program, values, scalars)
        for name in written_names(self.program):
            result = torch.from_numpy(np.ascontiguousarray(found[name]))
            arrays[name].copy_(result.to(arrays[name].dtype))


@pytest.fixture
def interpreted(monkeypatch):
    def kernel(config, device):
        make = rotary if config.op == "rotary" else row_program
        return Interpreted(make(config)), 1

    monkeypatch.setattr(rows, "_kernel", kernel)
    for name, make in (("_sums", rows.sums_kernel), ("_scaled", rows.scaled_kernel)):
        monkeypatch.setattr(rows, name, lambda kind, device, make=make: Interpreted(make(kind)[0]))
    monkeypatch.setattr(torch_program, "current_stream", lambda tensor: 0)
    monkeypatch.setattr(torch_program, "check_devices", lambda name, tensors: None)
    torch.manual_seed(3)


def leaf(*shape):
    return torch.randn(shape, requires_grad=True)


def rotated(x, cos, sin, pairs):
    half = x.shape[-1] // 2
    a, b = (x[..., ::2], x[..., 1::2]) if pairs else (x[..., :half], x[..., half:])
    cos, sin = cos[:, None], sin[:, None]
    turned = a * cos - b * sin, a * sin + b * cos
    return torch.stack(turned, -1).flatten(-2) if pairs else torch.cat(turned, -1)


def rms(x, w, b=None):
    return functional.rms_norm(x, w.shape, w, 1e-6) + (0 if b is None else b)


def layer(x, w, b=None):
    return functional.layer_norm(x, w.shape, w, b, 1e-5)


def both(ours, theirs):
    """(ours, theirs, leaves) of a norm with everything there is."""
    x, h, w, b = leaf(2, 3, 20), leaf(2, 3, 20), leaf(20), leaf(20)
    one = ours(x, w, b, h)
    return one, (theirs(x + h, w, b), x + h), (x, h, w, b)


def target():
    return torch.tensor([3, -100, 0, 10])


CASES = {
    "rms_norm": lambda x, w: (rows.rms_norm(x, w), rms(x, w)),
    "layer_norm": lambda x, w: (rows.layer_norm(x, w), layer(x, w)),
    "softmax": lambda x, w: (rows.softmax(x), functional.softmax(x, -1)),
    "log_softmax": lambda x, w: (rows.log_softmax(x), functional.log_softmax(x, -1)),
    "cross_entropy": lambda x, w: (
        rows.cross_entropy(x, target()), functional.cross_entropy(x, target())
    ),
    "swiglu": lambda x, w: (rows.swiglu(x, x * w), functional.silu(x) * (x * w)),
    "geglu": lambda x, w: (rows.geglu(x, x * w), functional.gelu(x) * (x * w)),
}  # fmt: skip


def agree(got, want, leaves):
    """Results and gradients of two computations of the same leaves are equal in fp32."""
    got, want = (one if isinstance(one, tuple) else (one,) for one in (got, want))
    grads = [torch.randn_like(one) for one in want]
    ours, theirs = (
        torch.autograd.grad(one, leaves, grads, retain_graph=True, allow_unused=True)
        for one in (got, want)
    )
    for a, b in zip((*got, *ours), (*want, *theirs), strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a, b, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_torchs(interpreted, name):
    x, w = leaf(4, 24), leaf(24)
    agree(*CASES[name](x, w), (x, w))


@pytest.mark.parametrize(
    ("ours", "theirs"), [(rows.rms_norm, rms), (rows.layer_norm, layer)], ids=["rms", "layer"]
)
def test_norms_with_bias_and_residual(interpreted, ours, theirs):
    agree(*both(ours, theirs))


@pytest.mark.parametrize("pairs", [False, True])
def test_rotary_turns_and_its_gradient_turns_back(interpreted, pairs):
    x = leaf(2, 5, 3, 8)
    cos, sin = torch.randn(2, 5, 4)
    agree(rows.rotary(x, cos, sin, pairs), rotated(x, cos, sin, pairs), (x,))


def test_quantised_rows_are_rows_of_the_type_times_a_scale(interpreted):
    x = torch.randn(4, 24)
    x[2] = 0
    y, scale = rows.quantised_rows(x)
    assert y.dtype is torch.float8_e4m3fn and float(y.float().abs().max()) == 448.0
    assert torch.allclose(y.float() * scale[:, None], x, rtol=2**-3, atol=2**-9)


def test_dropout_before_a_residual_is_undone_alike(interpreted):
    x, h, w = leaf(40, 64), leaf(40, 64), leaf(64)
    state = torch.get_rng_state()
    y, summed = rows.rms_norm(x, w, residual=h, dropout=0.25)
    kept = (summed - h).detach() != 0
    assert abs(float(kept.float().mean()) - 0.75) < 0.03
    theirs = torch.where(kept, x / 0.75, 0) + h
    agree((y, summed), (rms(theirs, w), theirs), (x, h, w))
    torch.set_rng_state(state)
    assert torch.equal(rows.rms_norm(x, w, residual=h, dropout=0.25)[1], summed)
    assert not torch.equal(rows.rms_norm(x, w, residual=h, dropout=0.25)[1], summed)


@pytest.mark.parametrize("ours", [rows.quantised_rms_norm, rows.quantised_layer_norm])
def test_norms_as_rows_of_8_bits(interpreted, ours):
    x, h, w, b = leaf(4, 24), leaf(4, 24), leaf(24), leaf(24)
    plain = {rows.quantised_rms_norm: rows.rms_norm, rows.quantised_layer_norm: rows.layer_norm}
    y, scale, summed = ours(x, w, b, h)
    want, total = plain[ours](x, w, b, h)
    assert y.dtype is torch.float8_e4m3fn and torch.equal(summed, total)
    assert torch.allclose(y.float() * scale[:, None], want, rtol=2**-3, atol=2**-7)


@pytest.mark.parametrize("pairs", [False, True])
def test_rotary_in_place(interpreted, pairs):
    x = torch.randn(2, 5, 3, 8)
    cos, sin = torch.randn(2, 5, 4)
    want = rotated(x, cos, sin, pairs)
    assert rows.rotary_(x, cos, sin, pairs) is x and torch.allclose(x, want, atol=1e-6)
    with pytest.raises(InputError, match="has a gradient"):
        rows.rotary_(x.requires_grad_(), cos, sin)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_of_a_product_and_its_gradients(interpreted, monkeypatch, reduction):
    monkeypatch.setattr(loss, "TYPES", ("float32",))
    x, weight = leaf(7, 12), leaf(21, 12)
    labels = torch.tensor([3, -100, 0, 20, 5, 5, 1])
    got = loss.linear_cross_entropy(x, weight, labels, reduction, chunk=3)
    agree(got, functional.cross_entropy(x @ weight.T, labels, reduction=reduction), (x, weight))
    with torch.no_grad():
        assert torch.allclose(loss.linear_cross_entropy(x, weight, labels, reduction), got)
    once = loss.linear_cross_entropy(x, weight, labels, reduction)
    twice = torch.autograd.grad(2 * once, (x, weight), retain_graph=True)
    again = torch.autograd.grad(once, (x, weight))
    assert all(torch.allclose(a, 2 * b) for a, b in zip(twice, again, strict=True))


@pytest.mark.parametrize("count", [16, 5000, 9 * 4096 + 8, 7])
def test_scaling_in_place_is_left_out_where_it_changes_nothing(interpreted, monkeypatch, count):
    monkeypatch.setattr(rows, "TASKS", 3)
    x, two, one = torch.randn(count), torch.tensor(2.0), torch.tensor(1.0)
    want = 2 * x
    rows.scale_in_place(x, two)
    assert torch.equal(x, want)
    rows.scale_in_place(x, one)
    assert torch.equal(x, want)


def test_gradients_of_a_loss_of_a_product_are_traced(monkeypatch):
    """As torch.compile sees them: what the backward pass launches is an operator of its own."""
    monkeypatch.setattr(torch_program, "check_devices", lambda name, tensors: None)
    x, weight = (
        torch.empty(n, 64, device="meta", dtype=torch.bfloat16, requires_grad=True) for n in (30, 9)
    )
    seen = []
    call = aot_function(
        loss.linear_cross_entropy,
        fw_compiler=lambda graph, _: make_boxed_func(graph),
        bw_compiler=lambda graph, _: seen.append(graph.code) or make_boxed_func(graph),
    )
    call(x, weight, torch.empty(30, device="meta", dtype=torch.int64)).backward()
    assert seen[0].count("torch.ops.warploom.scale_") == 2
    assert x.grad.shape == x.shape and weight.grad.shape == weight.shape


def test_shapes_of_fake_tensors():
    with FakeTensorMode():
        x = torch.empty(2, 3, 64, device="cuda", dtype=torch.bfloat16)
        w = torch.empty(64, device="cuda", dtype=torch.float32)
        y, h = rows.rms_norm(x, w, residual=x)
        assert y.shape == h.shape == x.shape and y.dtype is torch.bfloat16
        q, scale = rows.quantised_rows(x)
        assert q.dtype is torch.float8_e4m3fn and scale.shape == (2, 3)


REFUSED = {
    r"expected \[..., k\], \[classes, k\] and \[...\]": lambda x: loss.linear_cross_entropy(
        x, x, x
    ),
    r"w has shape \[8\], expected \[64\]": lambda x: rows.rms_norm(
        x, torch.empty(8, device="cuda")
    ),
    "gated up has shape": lambda x: rows.swiglu(x, torch.empty(1, 64, device="cuda")),
    "expected mean, sum or none": lambda x: rows.cross_entropy(x, x, "max"),
    "softmax x is float64": lambda x: rows.softmax(x.double()),
    "dropout=0.5 without a residual": lambda x: rows.rms_norm(x, x, dropout=0.5),
    "even size": lambda x: rows.rotary(x, x, x),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_an_operator_does_not_take_is_refused(message):
    with FakeTensorMode(), pytest.raises(InputError, match=message):
        REFUSED[message](torch.empty(3, 64, device="cuda", dtype=torch.bfloat16))


@pytest.mark.parametrize("op", ["rmsnorm_backward", "layernorm_backward"])
def test_rows_loaded_again_change_nothing(op):
    values = {n: np.random.default_rng(2).normal(size=(5, 8)) for n in ("x", "dy")}
    values |= {n: np.ones(5) for n in ("mean", "rstd")} | {"w": np.ones(8), "dx": np.zeros((5, 8))}
    values["dw_parts"] = np.zeros((2, 8))
    results = []
    for options in (frozenset(), frozenset({"again"})):
        program = row_program(RowConfig(op, 8, 2, options=options))
        results.append(interpret(program, {a.name: values[a.name] for a in program.arrays}))
    assert all((results[0][name] == results[1][name]).all() for name in ("dx", "dw_parts"))


@pytest.mark.parametrize(
    ("op", "shapes", "flags"), [("rmsnorm", ((5, 24), (24,)), ()), ("softmax", ((5, 24),), (True,))]
)
def test_shapes_may_be_symbols_of_a_graph(interpreted, op, shapes, flags):
    given = [torch.randn(shape, requires_grad=True) for shape in shapes]
    torch.library.opcheck(
        getattr(torch.ops.warploom, op).default,
        (*given, *flags),
        test_utils=("test_faketensor", "test_aot_dispatch_dynamic"),
        rtol=1e-4,
        atol=1e-4,
    )


def test_rows_that_l2_holds_have_no_priority_there(monkeypatch):
    found = []
    monkeypatch.setattr(rows, "_l2_bytes", lambda device: 50 << 20)
    monkeypatch.setattr(
        torch_program, "built_kernel", lambda key, like, make: found.append((key[2], make))
    )
    config = RowConfig("rmsnorm", 8192)
    for count in (3200, 3201):
        like = SimpleNamespace(
            is_cuda=True, device=0, numel=lambda count=count: count * 8192, element_size=lambda: 2
        )
        rows._kernel(config, like)
    assert [beyond for beyond, _ in found] == [False, True]
    assert [make().source.text.count("read_last(") > 1 for _, make in found] == [False, True]
