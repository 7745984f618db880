"""The row operations as torch formulas, in the type `wide` (fp32 or float64), results cast as torch
does where it is fp32."""

from __future__ import annotations

from typing import Any

import torch

P = 0.1  # of dropout


def rmsnorm(x: Any, w: Any, eps: float, wide: Any) -> Any:
    """Norm and scale."""
    a = x.to(wide)
    scale = torch.rsqrt(a.square().mean(-1) + eps)
    return (a * scale[:, None] * w.to(wide)).to(_out(x, wide)), scale


def residual(x: Any, w: Any, residual: Any, eps: float, wide: Any) -> Any:
    """Of the sum, which is a result."""
    a = x.to(wide) + residual.to(wide)
    scale = torch.rsqrt(a.square().mean(-1) + eps)
    y = a * scale[:, None] * w.to(wide)
    return y.to(_out(x, wide)), a.to(_out(x, wide)), scale


def dropped(x: Any, w: Any, residual: Any, eps: float, wide: Any) -> Any:
    """With dropout before the sum."""
    a = torch.nn.functional.dropout(x.to(wide), P) + residual.to(wide)
    scale = torch.rsqrt(a.square().mean(-1) + eps)
    y = a * scale[:, None] * w.to(wide)
    return y.to(_out(x, wide)), a.to(_out(x, wide)), scale


def fp8(x: Any, w: Any, eps: float, wide: Any) -> Any:
    """As rows of 8 bits with a scale a row."""
    a = x.to(wide)
    rstd = torch.rsqrt(a.square().mean(-1) + eps)
    y, scale = quantised(a * rstd[:, None] * w.to(wide), wide)
    return y, rstd, scale


def both(x: Any, target: Any, dloss: Any, wide: Any) -> Any:
    """Gradient and loss."""
    a = x.to(wide)
    lse = torch.logsumexp(a, -1)
    own = torch.arange(x.shape[1], device=x.device)[None] == target[:, None]
    grad = torch.exp(a - lse[:, None]) - own.to(wide)
    loss = lse - x.gather(1, target[:, None])[:, 0].to(wide)
    return (grad * dloss.to(wide)[:, None]).to(_out(x, wide)), loss


def layernorm(x: Any, w: Any, eps: float, wide: Any) -> Any:
    """Norm, mean and scale."""
    a = x.to(wide)
    mean = a.mean(-1)
    a = a - mean[:, None]
    scale = torch.rsqrt(a.square().mean(-1) + eps)
    return (a * scale[:, None] * w.to(wide)).to(_out(x, wide)), mean, scale


def norm_backward(x: Any, w: Any, dy: Any, mean: Any, rstd: Any, wide: Any) -> Any:
    """Gradients of rows and weight; rows are centred where there is a mean."""
    scale = rstd.to(wide)[:, None]
    a = (x.to(wide) - (0 if mean is None else mean.to(wide)[:, None])) * scale
    grad = dy.to(wide)
    weighed = grad * w.to(wide)
    dx = weighed - a * (weighed * a).mean(-1, keepdim=True)
    dx = dx if mean is None else dx - weighed.mean(-1, keepdim=True)
    return (dx * scale).to(_out(x, wide)), (grad * a).sum(0).to(_out(x, wide))


def rmsnorm_backward(x: Any, w: Any, dy: Any, rstd: Any, wide: Any) -> Any:
    """Gradients of rows and weight."""
    return norm_backward(x, w, dy, None, rstd, wide)


def layernorm_backward(x: Any, w: Any, dy: Any, mean: Any, rstd: Any, wide: Any) -> Any:
    """Gradients of rows and weight."""
    return norm_backward(x, w, dy, mean, rstd, wide)


def softmax(x: Any, wide: Any) -> Any:
    """Along the rows."""
    return torch.softmax(x.to(wide), -1).to(_out(x, wide))


def softmax_backward(y: Any, dy: Any, wide: Any) -> Any:
    """From the results."""
    p, grad = y.to(wide), dy.to(wide)
    return (p * (grad - (p * grad).sum(-1, keepdim=True))).to(_out(y, wide))


def cross_entropy(x: Any, target: Any, wide: Any) -> Any:
    """Loss and logarithm of the sum."""
    lse = torch.logsumexp(x.to(wide), -1)
    return lse - x.gather(1, target[:, None])[:, 0].to(wide), lse


def cross_entropy_backward(x: Any, target: Any, lse: Any, dloss: Any, wide: Any) -> Any:
    """From the logarithm of the sum."""
    own = torch.arange(x.shape[1], device=x.device)[None] == target[:, None]
    weights = torch.exp(x.to(wide) - lse.to(wide)[:, None])
    weights = torch.where(own, weights - 1, weights)
    return (weights * dloss.to(wide)[:, None]).to(_out(x, wide))


def gated(gate: Any, up: Any, wide: Any) -> Any:
    """SwiGLU."""
    return (torch.nn.functional.silu(gate.to(wide)) * up.to(wide)).to(_out(gate, wide))


def gated_backward(gate: Any, up: Any, dy: Any, wide: Any) -> Any:
    """Gradients of both."""
    a, b, grad = gate.to(wide), up.to(wide), dy.to(wide)
    share = torch.sigmoid(a)
    slope = share * (1 + a * (1 - share))
    out = _out(gate, wide)
    return (grad * b * slope).to(out), (grad * a * share).to(out)


def quantised(x: Any, wide: Any) -> Any:
    """Rows of 8 bits and a scale a row."""
    a = x.to(wide)
    scale = (a.abs().amax(-1) / 448).clamp(min=1e-12)
    y = a / scale[:, None]
    return (y.to(torch.float8_e4m3fn) if wide is torch.float32 else y), scale


def rotary(x: Any, cos: Any, sin: Any, wide: Any) -> Any:
    """Halves."""
    a, b = x.to(wide).chunk(2, -1)
    c, s = cos.to(wide)[:, None], sin.to(wide)[:, None]
    return torch.cat((a * c - b * s, a * s + b * c), -1).to(_out(x, wide))


def pairs(x: Any, cos: Any, sin: Any, wide: Any) -> Any:
    """Neighbours."""
    a, b = x.to(wide).unflatten(-1, (-1, 2)).unbind(-1)
    c, s = cos.to(wide)[:, None], sin.to(wide)[:, None]
    return torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2).to(_out(x, wide))


def _out(like: Any, wide: Any) -> Any:
    return like.dtype if wide is torch.float32 else wide


FORMULAS = {
    "rmsnorm": rmsnorm,
    "rmsnorm_backward": rmsnorm_backward,
    "softmax": softmax,
    "softmax_backward": softmax_backward,
    "cross_entropy": cross_entropy,
    "cross_entropy_backward": cross_entropy_backward,
    "layernorm": layernorm,
    "layernorm_backward": layernorm_backward,
    "rmsnorm residual": residual,
    "rmsnorm residual dropout": dropped,
    "rmsnorm fp8": fp8,
    "cross_entropy with its gradient": both,
    "gated": gated,
    "gated_backward": gated_backward,
    "quantised": quantised,
    "rotary": rotary,
    "rotary pairs": pairs,
}
