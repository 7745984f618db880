"""A small GPT learns to add, once with warploom's attention and once with PyTorch's.

Both runs begin with the same weights and see the same text, sums such as "347+85=432;" that the
script makes up. A run gives its losses and the tokens it trained on in a second; the printed line
compares them. The bench script `bench/attention_training.py` records such runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # of [batch, heads, rows, d], causal
LETTERS = "0123456789+=;"
RATE, WARM_UP = 1e-3, 20  # of learning; steps over which it grows
SPREAD = 0.02  # of the first weights, as in GPT-2
UNTIMED = 10  # first steps, which compile kernels


def sums(count: int, generator: torch.Generator) -> str:
    """So many characters of additions."""
    pairs = torch.randint(0, 1000, (count // len("0+0=0;") + 1, 2), generator=generator).tolist()
    return "".join(f"{a}+{b}={a + b};" for a, b in pairs)[:count]


@cache
def angles(rows: int, d: int, like: tuple[torch.device, torch.dtype]) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angles by which every row turns, `[rows, d / 2]`."""
    turns = torch.arange(rows)[:, None] * 10000.0 ** -(torch.arange(0, d, 2) / d)
    return turns.cos().to(*like), turns.sin().to(*like)


def rotated(x: Tensor) -> Tensor:
    """Queries or keys turned by their place (rotary embedding), so that scores see distances."""
    cos, sin = angles(*x.shape[-2:], (x.device, x.dtype))
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class Block(nn.Module):
    """Attention and a feed-forward layer, each added to what it reads."""

    def __init__(self, width: int, heads: int, attention: Attention) -> None:
        super().__init__()
        self.heads, self.attention = heads, attention
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, rows, width = x.shape
        packed = self.qkv(self.norms[0](x)).view(batch, rows, 3, self.heads, -1)
        q, k, v = packed.permute(2, 0, 3, 1, 4)
        mixed = (
            self.attention(rotated(q), rotated(k), v).transpose(1, 2).reshape(batch, rows, width)
        )
        x = x + self.out(mixed)
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class Gpt(nn.Module):
    """Letters to logits of the next letter."""

    def __init__(self, width: int, heads: int, depth: int, attention: Attention) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(LETTERS), width)
        self.blocks = nn.Sequential(*(Block(width, heads, attention) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, len(LETTERS))
        for weights in self.parameters():
            if weights.dim() > 1:
                nn.init.normal_(weights, std=SPREAD)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.letters(text))))


def mark(device: str) -> Any:
    """The time when all that was asked for before is done."""
    if device != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds(begin: Any, end: Any) -> float:
    """From one mark to another."""
    return end - begin if isinstance(end, float) else begin.elapsed_time(end) * 1e-3


def train(attention: Attention, steps: int, options: argparse.Namespace) -> dict[str, Any]:
    """Losses of every step, and tokens a second of the median step."""
    torch.manual_seed(options.seed)
    model = Gpt(options.width, options.heads, options.depth, attention)
    model.to(options.device)
    tuner = torch.optim.AdamW(model.parameters(), lr=RATE)
    generator = torch.Generator().manual_seed(options.seed)
    text = sums(steps * options.batch * (options.rows + 1), generator)
    places = bytes.maketrans(LETTERS.encode(), bytes(range(len(LETTERS))))
    letters = torch.frombuffer(bytearray(text.encode().translate(places)), dtype=torch.uint8)
    letters = letters.to(options.device).long()
    losses, marks = list[Tensor](), [mark(options.device)]
    for step, batch in enumerate(letters.view(steps, options.batch, -1)):
        for group in tuner.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / WARM_UP)
        with torch.autocast(options.device, dtype=torch.bfloat16):
            logits = model(batch[:, :-1])
        loss = functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        tuner.step()
        tuner.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        marks.append(mark(options.device))
    curve = torch.stack(losses).tolist()  # waits for the last step
    taken = [seconds(a, b) for a, b in pairwise(marks)][min(UNTIMED, steps - 1) :]
    return {
        "losses": curve,
        "tokens_per_second": options.batch * options.rows / statistics.median(taken),
    }


def of_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's attention."""
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def of_warploom(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same of this package."""
    from warploom.integrations.torch_op import attention  # noqa: PLC0415 - needs a GPU

    return attention(q, k, v, causal=True)


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    sizes = {
        "steps": 300,
        "seed": 0,
        "batch": 4,
        "rows": 4096,
        "width": 512,
        "heads": 4,
        "depth": 6,
    }
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="a JSON file for the curves")
    return parser.parse_args(given)


def main() -> None:
    """Train both."""
    options = arguments()
    if not torch.cuda.is_available():
        raise SystemExit("train_gpt.py launches its operators, and there is no GPU here")
    runs = {
        name: train(attention, options.steps, options)
        for name, attention in {"warploom": of_warploom, "torch": of_torch}.items()
    }
    for name, run in runs.items():
        print(f"{name}: loss {run['losses'][-1]:.3f}, {run['tokens_per_second']:,.0f} tokens/s")
    if options.out:
        options.out.write_text(json.dumps(runs))


if __name__ == "__main__":
    main()
