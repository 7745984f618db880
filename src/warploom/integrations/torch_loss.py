"""Cross-entropy of a linear layer as a PyTorch operator: its logits exist for some rows at a time.

    loss = linear_cross_entropy(x, weight, target)        cross_entropy(x @ weight.T, target)

Rows are taken in chunks. A chunk's logits are a product, which one kernel turns into their
gradient in place while it gives the losses; two more products take that gradient back to x and to
the weight, whose gradient is added up in the weight's type. All of it is done forward, so that a
backward pass only multiplies by the gradient of the loss (the scheme of Liger's fused loss), in
place where the graph is not kept for another one. The products are cuBLAS's: of a few rows, ours
took up to 1.85 times as long for the weight's gradient (H200, 1024 rows and 128256 classes).
"""

from __future__ import annotations

from typing import Any

from warploom.errors import InputError
from warploom.integrations import torch_program as ops
from warploom.integrations.torch_rows import (
    cross_entropy,
    logits_to_gradients,
    scale_in_place,
    torch,
)
from warploom.kernels.rows.program import IGNORED

LEAST_ROWS = 512  # of a chunk
LINE = 8  # elements that rows of logits begin at multiples of
TYPES = ("bfloat16", "float16")
SCHEMA = (
    "(Tensor x, Tensor weight, Tensor target, bool mean=True, int chunk=0, bool gradients=False) "
    "-> (Tensor, Tensor, Tensor)"
)


def chunk_rows(depth: int) -> int:
    """Rows of a chunk of logits for a weight of so many columns: as many, so that its logits take
    what the gradient of the weight takes."""
    return max(LEAST_ROWS, -(-depth // 128) * 128)


def _checked(x: Any, weight: Any, target: Any, mean: bool, chunk: int, *_: Any) -> None:
    ops.check_devices("linear_cross_entropy", {"x": x, "weight": weight, "target": target})
    if weight.dim() != 2 or x.shape[-1] != weight.shape[-1] or x.shape[:-1] != target.shape:
        raise InputError(
            f"linear_cross_entropy of x {list(x.shape)}, weight {list(weight.shape)} and target "
            f"{list(target.shape)}: expected [..., k], [classes, k] and [...]"
        )
    if x.dtype != weight.dtype or str(x.dtype).removeprefix("torch.") not in TYPES:
        raise InputError(
            f"linear_cross_entropy of {x.dtype} and {weight.dtype}: expected one of "
            f"{', '.join(TYPES)} for both"
        )
    if chunk < 0:
        raise InputError(f"linear_cross_entropy chunk={chunk}: expected rows, or 0 for the default")


def _results(_: None, x: Any, weight: Any, *options: Any) -> tuple[Any, Any, Any]:
    """Room for the loss and the gradients; no gradients where nobody asks for them."""
    like = [one.shape if options[-1] else (0,) for one in (x, weight)]
    total = x.new_empty((), dtype=torch.float32)
    return total, x.new_empty(like[0]), weight.new_empty(like[1])


def _fill(_: None, results: tuple[Any, Any, Any], *args: Any) -> None:
    (total, dx, dweight), (x, weight, target, mean, chunk, gradients) = results, args
    classes, depth = weight.shape
    rows, wanted = x.reshape(-1, depth), target.reshape(-1)
    count = len(rows)
    if count == 0:
        total.zero_()
        dweight.zero_()
        return
    step = min(count, chunk or chunk_rows(depth))
    logits = x.new_empty(step, -(-classes // LINE) * LINE)[:, :classes]
    losses, each, share = None, None, None
    for first in range(0, count, step):
        part = slice(first, min(first + step, count))
        of_x, of_target = rows[part], wanted[part]
        now = logits[: len(of_x)]
        torch.mm(of_x, weight.t(), out=now)
        if losses is None or each is None:  # small kernels, behind the first of the large ones
            losses, each = (x.new_ones(count, dtype=torch.float32) for _ in range(2))
            if mean:
                share = (wanted != IGNORED).sum().float().reciprocal()
                each.mul_(share)
        if not gradients:
            losses[part] = cross_entropy(now, of_target, "none")
            continue
        logits_to_gradients(now, of_target, each[part], losses[part])
        torch.mm(now, weight, out=dx.view(-1, depth)[part])
        torch.addmm(dweight, now.t(), of_x, beta=min(first, 1), out=dweight)
    torch.sum(losses, 0, out=total)
    if share is not None:
        total.mul_(share)


def _context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, loss: Any, *others: Any) -> tuple[Any, ...]:
    dx, dweight = ctx.saved_tensors
    if loss is None:
        return (None,) * 6
    # Where no second backward pass may come, nobody else has them.
    kept = torch._C._autograd._get_current_graph_task_keep_graph()
    scaled = [one.clone() if kept else one for one in (dx, dweight)]
    for one in scaled:
        scale_in_place(one, loss)
    return *scaled, None, None, None, None


OPERATOR = ops.operator(
    "warploom::linear_cross_entropy",
    SCHEMA,
    *ops.steps(_checked, _results, _fill),
    _backward,
    _context,
)


def linear_cross_entropy(
    x: Any, weight: Any, target: Any, reduction: str = "mean", chunk: int = 0
) -> Any:
    """The loss of the logits x @ weight.T for classes `target`; class -100 does not count.

    x [..., k] and weight [classes, k] bf16 or fp16, `reduction` "mean" or "sum", `chunk` the rows
    whose logits exist at a time (0: as many as the weight has columns).
    """
    if reduction not in ("mean", "sum"):
        raise InputError(f"linear_cross_entropy reduction={reduction!r}: expected mean or sum")
    gradients = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return OPERATOR(x, weight, target, reduction == "mean", chunk, gradients)[0]


__all__ = ["linear_cross_entropy"]
