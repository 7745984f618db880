"""A transformer block made of warploom's operators alone, forward and backward, and by PyTorch.

    python examples/transformer_block.py --rows 4096

RMSNorm, rotary embedding, causal attention of heads in groups and a gated layer (SwiGLU), as
Llama's blocks have them (arXiv 2307.09288); both residuals are added in the matmuls before them.
The other block is plain PyTorch. Both have the same weights; the script prints how far outputs and
gradients of the two are from a block in float64 and how long a training step takes.
"""

from __future__ import annotations

from typing import Any

import torch
from blocks import compare, options
from torch import Tensor, nn
from torch.nn import functional

EPS = 1e-6
BASE = 10000.0  # of the wavelengths of rotary angles
SHARING = 4  # heads that share keys and values


class OfTorch:
    """The operators of a block, of plain PyTorch."""

    @staticmethod
    def project(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
        y = functional.linear(x, weight)
        return y if residual is None else y + residual

    @staticmethod
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], weight, EPS)

    @staticmethod
    def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        one, other = x.to(cos.dtype).chunk(2, -1)
        cos, sin = cos[:, None], sin[:, None]
        return torch.cat([one * cos - other * sin, other * cos + one * sin], -1).to(x.dtype)

    @staticmethod
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    @staticmethod
    def gated(gate: Tensor, up: Tensor) -> Tensor:
        return functional.silu(gate) * up


class OfWarploom:
    """The same of this package."""

    def __init__(self) -> None:
        from warploom.integrations import torch_op, torch_rows  # noqa: PLC0415

        self.ops, self.rows = torch_op, torch_rows

    def project(self, x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
        flat = None if residual is None else residual.flatten(0, -2)
        y = self.ops.gemm(x.flatten(0, -2), weight.T, None, flat, "none")
        return y.unflatten(0, x.shape[:-1])

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.rows.rms_norm(x, weight, eps=EPS)

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.rows.rotary(x, cos, sin)

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.ops.attention(q, k, v, causal=True)

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.rows.swiglu(gate, up)


class Transformer(nn.Module):
    """A block of `width` with heads of `head` and a gated layer of `inner`."""

    def __init__(self, width: int, inner: int, head: int, ops: Any) -> None:
        super().__init__()
        self.ops, self.head, heads = ops, head, width // head
        self.sizes = heads, max(1, heads // SHARING), max(1, heads // SHARING)

        def weight(rows: int, cols: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(rows, cols) / cols**0.5)

        self.norms = nn.ParameterList(torch.ones(width) for _ in range(2))
        self.qkv, self.out = weight(sum(self.sizes) * head, width), weight(width, width)
        self.gate, self.up, self.down = (
            weight(rows, cols) for rows, cols in ((inner, width), (inner, width), (width, inner))
        )

    def angles(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of every row, [rows, head / 2]."""
        kind = torch.promote_types(x.dtype, torch.float32)
        steps = torch.arange(0, self.head, 2, device=x.device, dtype=kind) / self.head
        rows = torch.arange(x.shape[1], device=x.device, dtype=kind)
        turned = rows[:, None] * BASE**-steps
        return turned.cos(), turned.sin()

    def forward(self, x: Tensor) -> Tensor:
        """Like x: [batch, rows, width]."""
        ops, kind = self.ops, x.dtype
        angles = self.angles(x)
        packed = ops.project(ops.norm(x, self.norms[0].to(kind)), self.qkv.to(kind))
        q, k, v = packed.unflatten(-1, (-1, self.head)).split(self.sizes, 2)
        q, k = (ops.rotary(one, *angles) for one in (q, k))
        mixed = ops.attention(*(one.transpose(1, 2) for one in (q, k, v)))
        x = ops.project(mixed.transpose(1, 2).flatten(2), self.out.to(kind), x)
        y = ops.norm(x, self.norms[1].to(kind))
        gated = ops.gated(ops.project(y, self.gate.to(kind)), ops.project(y, self.up.to(kind)))
        return ops.project(gated, self.down.to(kind), x)


def main() -> None:
    """Check both blocks and time them in turn."""
    given = options(__doc__, batch=4, rows=4096, width=2048, inner=5632, head=128)
    torch.manual_seed(0)

    def made(name: str) -> Transformer:
        ops = OfWarploom() if name == "warploom" else OfTorch()
        return Transformer(given.width, given.inner, given.head, ops)

    compare(made, given.batch, given.rows, given.width)


if __name__ == "__main__":
    main()
