"""The block of `examples/mamba2_block.py`, as far as it runs without a GPU."""

import importlib.util
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
PATH = Path(__file__).parents[2] / "examples" / "mamba2_block.py"
spec = importlib.util.spec_from_file_location("mamba2_block", PATH)
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)


@pytest.mark.parametrize("rows", [1, 64, 100])
def test_the_scan_in_chunks_is_the_loop(rows):
    torch.manual_seed(0)
    x, dt = torch.randn(2, rows, 4, 8).double(), torch.randn(2, rows, 4).double()
    b, c = torch.randn(2, 2, rows, 2, 16).double()
    a, skip, bias = -torch.rand(4).double(), *torch.randn(2, 4).double()
    step = torch.nn.functional.softplus(dt + bias)
    state, want = torch.zeros(2, 4, 16, 8).double(), []
    for i in range(rows):
        key, query = (one[:, i].repeat_interleave(2, 1) for one in (b, c))
        new = (step[:, i, :, None] * x[:, i])[:, :, None]
        state = torch.exp(step[:, i] * a)[..., None, None] * state + key[..., None] * new
        want.append(torch.einsum("zhn,zhnp->zhp", query, state) + skip[:, None] * x[:, i])
    got = example.scan_of_torch(x, dt, a, b, c, skip, bias)
    assert torch.allclose(got, torch.stack(want, 1))


def test_a_block_is_causal_and_all_its_weights_have_gradients():
    torch.manual_seed(0)
    block = example.Mamba2(64, 16, example.OfTorch()).double()
    x = torch.randn(1, 70, 64).double()
    y, *grads = example.step(block, x, torch.randn_like(x))
    assert y.shape == x.shape and all(one.abs().max() > 0 for one in grads)
    changed = x.clone()
    changed[:, 40:] += 1.0
    assert torch.equal(block(changed)[:, :40], y[:, :40])
    assert not torch.equal(block(changed)[:, 40:], y[:, 40:])


def test_our_operators_take_what_the_block_gives_them():
    """On tensors that have shapes alone."""
    block = example.Mamba2(256, 64, example.OfWarploom()).to("meta")
    x = torch.empty(2, 100, 256, device="meta", dtype=torch.bfloat16)
    y, *grads = example.step(block, x, torch.empty_like(x))
    shapes = [x.shape, x.shape, *(one.shape for one in block.parameters())]
    assert [one.shape for one in (y, *grads)] == shapes


def test_a_distance_is_noticed():
    right = [torch.ones(4).double(), torch.ones(2).double()]
    assert example.distance(right, right) == 0
    assert example.distance([right[0], right[1] * 1.1], right) > 0.09
