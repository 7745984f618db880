"""The blocks of `examples`, as far as they run without a GPU."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
mamba2, deltanet, transformer, blocks = map(
    importlib.import_module, ("mamba2_block", "gated_deltanet_block", "transformer_block", "blocks")
)
MADE = {
    "mamba2": lambda width, ops: mamba2.Mamba2(width, 16, getattr(mamba2, ops)()),
    "deltanet": lambda width, ops: deltanet.GatedDeltaNet(width, getattr(deltanet, ops)()),
    "transformer": lambda width, ops: transformer.Transformer(
        width, 2 * width, 64, getattr(transformer, ops)()
    ),
}


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
    got = mamba2.scan_of_torch(x, dt, a, b, c, skip, bias)
    assert torch.allclose(got, torch.stack(want, 1))


@pytest.mark.parametrize("rows", [1, 64, 100])
def test_the_rule_in_chunks_is_the_loop(rows):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, rows, 4, 16).double()
    k = torch.nn.functional.normalize(k, dim=-1)
    g, beta = -torch.rand(2, rows, 4).double(), torch.rand(2, rows, 4).double()
    state, want = torch.zeros(2, 4, 16, 16).double(), []
    for i in range(rows):
        state = torch.exp(g[:, i])[..., None, None] * state
        known = torch.einsum("zhd,zhde->zhe", k[:, i], state)
        new = beta[:, i, :, None] * (v[:, i] - known)
        state = state + k[:, i, :, :, None] * new[:, :, None]
        want.append(torch.einsum("zhd,zhde->zhe", q[:, i] / 4, state))
    got = deltanet.rule_of_torch(q, k, v, g, beta)
    assert torch.allclose(got, torch.stack(want, 1))


@pytest.mark.parametrize("name", MADE)
def test_a_block_is_causal_and_all_its_weights_have_gradients(name):
    torch.manual_seed(0)
    block = MADE[name](64, "OfTorch").double()
    x = torch.randn(1, 70, 64).double()
    y, *grads = blocks.step(block, x, torch.randn_like(x))
    assert y.shape == x.shape and all(one.abs().max() > 0 for one in grads)
    changed = x.clone()
    changed[:, 40:] += 1.0
    before, after = block(changed).split((40, 30), 1)
    assert torch.allclose(before, y[:, :40], rtol=0, atol=1e-12)
    assert not torch.allclose(after, y[:, 40:], rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", MADE)
def test_our_operators_take_what_a_block_gives_them(name):
    """On tensors that have shapes alone."""
    block = MADE[name](256, "OfWarploom").to("meta")
    x = torch.empty(2, 100, 256, device="meta", dtype=torch.bfloat16)
    y, *grads = blocks.step(block, x, torch.empty_like(x))
    shapes = [x.shape, x.shape, *(one.shape for one in block.parameters())]
    assert [one.shape for one in (y, *grads)] == shapes


def test_a_distance_is_noticed():
    right = [torch.ones(4).double(), torch.ones(2).double()]
    assert blocks.distance(right, right) == 0
    assert blocks.distance([right[0], right[1] * 1.1], right) > 0.09


@pytest.mark.parametrize("name", ["transformer_block", "gated_deltanet_block", "mamba2_block"])
def test_an_example_without_a_gpu_ends_in_a_line(name: str) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, f"examples/{name}.py", "--rows", "64"],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.endswith("error: it launches its operators, and there is no GPU here\n")
