"""A Mamba-2 block (arXiv 2405.21060, figure 6), forward and backward, by warploom and by PyTorch.

    python examples/mamba2_block.py --rows 4096

Projections, scan, gate and norm are warploom's operators with their gradients; the convolution over
four rows, a hundredth of the work, is PyTorch's in both blocks. The other block is plain PyTorch,
its scan in chunks as the paper's listing 1 has it. Both have the same weights; the script prints
how far outputs and gradients of the two are from a block in float64 and how long a training step
takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from blocks import compare, options
from torch import Tensor, nn
from torch.nn import functional

TAPS = 4
CHUNK = 64


def scan_of_torch(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor, bias: Tensor
) -> Tensor:
    """Mamba-2's scan in chunks: x [batch, rows, heads, p], dt [batch, rows, heads], b and c
    [batch, rows, groups, n], a, skip and bias [heads]; like x."""
    rows, kind = x.shape[1], x.dtype
    step = functional.softplus(dt.to(a.dtype) + bias)
    missing = -rows % CHUNK
    parts = [functional.pad(one.to(a.dtype), (*[0, 0] * (one.dim() - 2), 0, missing)) for one in
             (x, step, b, c)]  # fmt: skip
    value, step, key, query = (one.unflatten(1, (-1, CHUNK)) for one in parts)
    key, query = (one.repeat_interleave(x.shape[2] // b.shape[2], 3) for one in (key, query))
    value = value * step[..., None]
    sums = torch.cumsum(step * a, 2)
    seen = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=x.device).tril()
    apart = (sums[:, :, :, None] - sums[:, :, None]).masked_fill(~seen[..., None], -torch.inf)
    scores = torch.einsum("zclhn,zcshn->zclsh", query, key) * torch.exp(apart)
    out = torch.einsum("zclsh,zcshp->zclhp", scores, value)
    ahead = torch.exp(sums[:, :, -1:] - sums)[..., None] * key
    added = torch.einsum("zclhn,zclhp->zchnp", ahead, value)
    state, states = torch.zeros_like(added[:, 0]), list[Tensor]()
    for one, whole in zip(added.unbind(1), torch.exp(sums[:, :, -1]).unbind(1), strict=True):
        states.append(state)
        state = whole[..., None, None] * state + one
    before = torch.exp(sums)[..., None] * query
    out = out + torch.einsum("zclhn,zchnp->zclhp", before, torch.stack(states, 1))
    return (out.flatten(1, 2)[:, :rows] + skip[:, None] * x).to(kind)


class OfTorch:
    """The operators of a block, of plain PyTorch."""

    @staticmethod
    def project(x: Tensor, weight: Tensor) -> Tensor:
        return functional.linear(x, weight)

    @staticmethod
    def scan(*given: Tensor) -> Tensor:
        return scan_of_torch(*given)

    @staticmethod
    def gated_norm(y: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(y * functional.silu(gate), y.shape[-1:], weight, 1e-6)


class OfWarploom:
    """The same of this package."""

    def __init__(self) -> None:
        from warploom.integrations import torch_op, torch_recurrent, torch_rows  # noqa: PLC0415

        self.gemm, self.rows = torch_op.gemm, torch_rows
        self.chunked: Callable[..., Any] = torch_recurrent.mamba_chunk_scan_combined

    def project(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.gemm(x.flatten(0, -2), weight.T, None, None, "none").unflatten(0, x.shape[:-1])

    def scan(self, *given: Tensor) -> Tensor:
        x, dt, a, b, c, skip, bias = given
        return self.chunked(x, dt, a, b, c, D=skip, dt_bias=bias, dt_softplus=True)

    def gated_norm(self, y: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        return self.rows.rms_norm(self.rows.swiglu(gate, y), weight)


class Mamba2(nn.Module):
    """A block of `width`, with heads of 64 and states of `state`."""

    def __init__(self, width: int, state: int, ops: Any, head: int = 64) -> None:
        super().__init__()
        inner = 2 * width
        self.sizes, self.ops, self.head = (inner, inner, state, state, inner // head), ops, head
        mixed = inner + 2 * state
        self.into = nn.Parameter(torch.randn(sum(self.sizes), width) / width**0.5)
        self.taps = nn.Parameter(torch.randn(mixed, 1, TAPS) / TAPS**0.5)
        heads = self.sizes[-1]
        self.rate = nn.Parameter(torch.linspace(1.0, 16.0, heads).log())
        self.skip, self.bias = nn.Parameter(torch.ones(heads)), nn.Parameter(torch.zeros(heads) - 4)
        self.norm = nn.Parameter(torch.ones(inner))
        self.out = nn.Parameter(torch.randn(width, inner) / inner**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Like x: [batch, rows, width]."""
        inner, _, state, _, _ = self.sizes
        packed = self.ops.project(x, self.into.to(x.dtype))
        gate, mixed, dt = packed.split((inner, inner + 2 * state, self.sizes[-1]), -1)
        mixed = functional.pad(mixed.transpose(1, 2), (TAPS - 1, 0))
        mixed = functional.conv1d(mixed, self.taps.to(x.dtype), groups=self.taps.shape[0])
        value, key, query = functional.silu(mixed.transpose(1, 2)).split((inner, state, state), -1)
        value = value.unflatten(-1, (-1, self.head)).contiguous()
        key, query = (one.unsqueeze(2).contiguous() for one in (key, query))
        y = self.ops.scan(
            value, dt.contiguous(), -self.rate.exp(), key, query, self.skip, self.bias
        )
        gated = self.ops.gated_norm(y.flatten(2), gate.contiguous(), self.norm.to(x.dtype))
        return self.ops.project(gated, self.out.to(x.dtype))


def main() -> None:
    """Check both blocks and time them in turn."""
    given = options(__doc__, batch=4, rows=4096, width=1024, state=64)
    torch.manual_seed(0)

    def made(name: str) -> Mamba2:
        ops = OfWarploom() if name == "warploom" else OfTorch()
        return Mamba2(given.width, given.state, ops)

    compare(made, given.batch, given.rows, given.width)


if __name__ == "__main__":
    main()
