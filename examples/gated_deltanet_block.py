"""A gated DeltaNet block (arXiv 2412.06464), forward and backward, by warploom and by PyTorch.

    python examples/gated_deltanet_block.py --rows 4096

Projections, the gated delta rule, norm and gate are warploom's operators with their gradients; the
convolution over four rows and the norms of keys and queries are PyTorch's in both blocks. The other
block is plain PyTorch, its recurrence in chunks with a triangular solve each. Both have the same
weights; the script prints how far outputs and gradients of the two are from a block in float64 and
how long a training step takes.
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
HEAD = 64  # channels of a head's keys and values


def rule_of_torch(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule in chunks: q, k, v [batch, rows, heads, d], g (logarithms) and beta
    [batch, rows, heads]; like v."""
    rows, kind, wide = v.shape[1], v.dtype, g.dtype
    missing = -rows % CHUNK
    parts = [functional.pad(one.to(wide), (*[0, 0] * (one.dim() - 2), 0, missing)) for one in
             (q, k, v, g[..., None], beta[..., None])]  # fmt: skip
    q, k, v, g, beta = (one.unflatten(1, (-1, CHUNK)).transpose(2, 3) for one in parts)
    q = q / q.shape[-1] ** 0.5
    sums = torch.cumsum(g, -2)  # [batch, chunks, heads, rows, 1]
    seen = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=v.device).tril()
    between = torch.exp((sums - sums.mT).masked_fill(~seen, -torch.inf))
    system = torch.eye(CHUNK, dtype=wide, device=v.device) + (beta * (k @ k.mT) * between).tril(-1)
    given = torch.cat([beta * v, beta * torch.exp(sums) * k], -1)
    solved = torch.linalg.solve_triangular(system, given, upper=False, unitriangular=True)
    new, old = solved.split((v.shape[-1], k.shape[-1]), -1)
    scores, whole = (q @ k.mT) * between, torch.exp(sums[..., -1:, :])
    before, ahead = torch.exp(sums) * q, torch.exp(sums[..., -1:, :] - sums) * k
    state, out = torch.zeros_like(k[:, 0].mT @ v[:, 0]), list[Tensor]()
    for c in range(q.shape[1]):
        added = new[:, c] - old[:, c] @ state
        out.append(before[:, c] @ state + scores[:, c] @ added)
        state = whole[:, c] * state + ahead[:, c].mT @ added
    return torch.stack(out, 1).transpose(2, 3).flatten(1, 2)[:, :rows].to(kind)


class OfTorch:
    """The operators of a block, of plain PyTorch."""

    @staticmethod
    def project(x: Tensor, weight: Tensor) -> Tensor:
        return functional.linear(x, weight)

    @staticmethod
    def rule(*given: Tensor) -> Tensor:
        return rule_of_torch(*given)

    @staticmethod
    def norm_and_gate(y: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(y, y.shape[-1:], weight, 1e-6) * functional.silu(gate)


class OfWarploom:
    """The same of this package."""

    def __init__(self) -> None:
        from warploom.integrations import torch_op, torch_recurrent, torch_rows  # noqa: PLC0415

        self.gemm, self.rows = torch_op.gemm, torch_rows
        self.chunked: Callable[..., Any] = torch_recurrent.gated_delta_rule

    def project(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.gemm(x.flatten(0, -2), weight.T, None, None, "none").unflatten(0, x.shape[:-1])

    def rule(self, *given: Tensor) -> Tensor:
        return self.chunked(*given)[0]

    def norm_and_gate(self, y: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        return self.rows.swiglu(gate, self.rows.rms_norm(y, weight))


class GatedDeltaNet(nn.Module):
    """A block of `width` with heads of 64."""

    def __init__(self, width: int, ops: Any) -> None:
        super().__init__()
        self.ops, heads = ops, width // HEAD
        self.sizes = 3 * width, width, heads, heads  # q, k and v; gate; decay; beta
        self.into = nn.Parameter(torch.randn(sum(self.sizes), width) / width**0.5)
        self.taps = nn.Parameter(torch.randn(3 * width, 1, TAPS) / TAPS**0.5)
        self.rate = nn.Parameter(torch.linspace(1.0, 16.0, heads).log())
        self.bias = nn.Parameter(torch.zeros(heads) - 4)
        self.norm = nn.Parameter(torch.ones(HEAD))
        self.out = nn.Parameter(torch.randn(width, width) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Like x: [batch, rows, width]."""
        packed = self.ops.project(x, self.into.to(x.dtype))
        mixed, gate, decay, beta = packed.split(self.sizes, -1)
        mixed = functional.pad(mixed.transpose(1, 2), (TAPS - 1, 0))
        mixed = functional.conv1d(mixed, self.taps.to(x.dtype), groups=self.taps.shape[0])
        parts = functional.silu(mixed.transpose(1, 2)).chunk(3, -1)
        q, k, v = (one.unflatten(-1, (-1, HEAD)).contiguous() for one in parts)
        q, k = (functional.normalize(one, dim=-1) for one in (q, k))
        g = -self.rate.exp() * functional.softplus(decay.to(self.rate.dtype) + self.bias)
        y = self.ops.rule(q, k, v, g, torch.sigmoid(beta.to(g.dtype)))
        gate = gate.unflatten(-1, (-1, HEAD)).contiguous()
        done = self.ops.norm_and_gate(y, gate, self.norm.to(x.dtype))
        return self.ops.project(done.flatten(2), self.out.to(x.dtype))


def main() -> None:
    """Check both blocks and time them in turn."""
    given = options(__doc__, batch=4, rows=4096, width=1024)
    torch.manual_seed(0)

    def made(name: str) -> GatedDeltaNet:
        return GatedDeltaNet(given.width, OfWarploom() if name == "warploom" else OfTorch())

    compare(made, given.batch, given.rows, given.width)


if __name__ == "__main__":
    main()
