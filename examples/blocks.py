"""What the examples of blocks share: a training step, its distance from float64, its time."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

SAMPLES, STEPS = 9, 5
SHORT = 500  # rows of the step that is judged


def step(block: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    """The output of a block and the gradients of x and of its weights."""
    x = x.detach().requires_grad_()
    y = block(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *block.parameters()], grad)]


def distance(found: Iterable[Tensor], right: Iterable[Tensor]) -> float:
    """The largest relative error in norm."""
    pairs = zip(found, right, strict=True)
    return max(float((one.double() - other).norm() / other.norm()) for one, other in pairs)


def milliseconds(block: nn.Module, x: Tensor, grad: Tensor) -> float:
    """Of a step."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(STEPS):
        step(block, x, grad)
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / STEPS


def options(description: str | None, **sizes: int) -> argparse.Namespace:
    """The command line: sizes by name; ends without a GPU, after `--help`."""
    parser = argparse.ArgumentParser(description=description)
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    found = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("it launches its operators, and there is no GPU here")
    return found


def compare(made: Callable[[str], nn.Module], batch: int, rows: int, width: int) -> None:
    """Check the blocks `made` of "warploom" and of "torch", with the same weights, and time them in
    turn; prints both."""
    blocks = {name: made(name).cuda() for name in ("warploom", "torch")}
    right = made("torch").cuda().double()
    for block in (*blocks.values(), right):
        block.load_state_dict(blocks["torch"].state_dict())
    x, grad = torch.randn(2, batch, rows, width, device="cuda")
    short = slice(0, 1), slice(0, min(rows, SHORT))
    want = step(right, x[short].bfloat16().double(), grad[short].bfloat16().double())
    x, grad = x.bfloat16(), grad.bfloat16()
    for name, block in blocks.items():
        print(f"{name}: error {distance(step(block, x[short], grad[short]), want):.4f}")
        step(block, x, grad)
    times: dict[str, list[float]] = {name: [] for name in blocks}
    for _ in range(SAMPLES):
        for name, block in blocks.items():
            times[name].append(milliseconds(block, x, grad))
    ours, theirs = (statistics.median(times[name]) for name in ("warploom", "torch"))
    print(f"a step: warploom {ours:.3f} ms, torch {theirs:.3f} ms, {theirs / ours:.2f} times")
