"""A small transformer serves requests with paged keys and continuous batching, on our operators.

Requests come one after another and are batched as they come: each step gives every running
sequence one token, and a sequence that ends makes room for the next one, whose prompt is read in
chunks. Keys and values lie in pages that sequences take as they grow and give back at their end.
A step is captured into a CUDA graph once and replayed.

    python examples/serve_tiny.py                    on a GPU; prints tokens a second
    python examples/serve_tiny.py --operators torch  the same loop on PyTorch's operators

Every token is then checked by a plain PyTorch loop that reads the whole sequence at once, without a
cache, in float64: it must be that loop's choice, or lie behind it by no more than what 16 bits do
to the same plain loop's logits.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

PAGE = 16  # tokens
CHUNK = 64  # tokens of a prompt that are read at a time


@dataclass(frozen=True)
class Model:
    """Sizes and weights of a decoder with grouped queries, rotary positions and SwiGLU."""

    width: int
    heads: int
    kv_heads: int
    vocabulary: int
    weights: dict[str, Tensor]
    layers: tuple[dict[str, Tensor], ...]

    @property
    def head_dim(self) -> int:
        """Of queries, keys and values."""
        return self.layers[0]["out"].shape[0] // self.heads


def made(options: argparse.Namespace) -> Model:
    """A model with random weights, from a seed."""
    generator = torch.Generator().manual_seed(options.seed)
    d, width = 64, options.width

    def random(rows: int, cols: int) -> Tensor:
        weights = torch.randn(rows, cols, generator=generator) / math.sqrt(rows)
        return weights.to(options.device, torch.bfloat16)

    def one() -> dict[str, Tensor]:
        ones = torch.ones(width, dtype=torch.bfloat16, device=options.device)
        return {
            "norm": ones,
            "qkv": random(width, (options.heads + 2 * options.kv_heads) * d),
            "out": random(options.heads * d, width),
            "second norm": ones,
            "gate": random(width, 4 * width),
            "up": random(width, 4 * width),
            "down": random(4 * width, width),
        }

    letters = random(width, options.vocabulary)
    weights = {
        "embedding": (letters.T * math.sqrt(width)).contiguous(),
        "head": random(width, options.vocabulary),
        "norm": torch.ones(width, dtype=torch.bfloat16, device=options.device),
    }
    layers = tuple(one() for _ in range(options.depth))
    return Model(width, options.heads, options.kv_heads, options.vocabulary, weights, layers)


@dataclass(frozen=True)
class Operators:
    """What a step is made of."""

    gemm: Callable[[Tensor, Tensor], Tensor]
    rms_norm: Callable[[Tensor, Tensor], Tensor]
    swiglu: Callable[[Tensor, Tensor], Tensor]
    append: Callable[..., Tensor]
    attend: Callable[..., Tensor]
    waits: bool = False  # for the GPU, so that a step cannot be captured


def exact(model: Model) -> Model:
    """The model in float64."""
    weights, *layers = (
        {name: one.double() for name, one in group.items()}
        for group in (model.weights, *model.layers)
    )
    return replace(model, weights=weights, layers=tuple(layers))


def of_warploom() -> Operators:
    """Our kernels."""
    from warploom.integrations import torch_cache, torch_decode, torch_op, torch_rows  # noqa: PLC0415 - needs a GPU

    return Operators(
        torch_op.gemm,
        torch_rows.rms_norm,
        torch_rows.swiglu,
        torch_cache.append_kvcache,
        torch_decode.attention_with_kvcache,
    )


def of_torch() -> Operators:
    """The same of PyTorch, a sequence at a time: for computers without a GPU."""

    def append(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor,
               table: Tensor, q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # fmt: skip
        at = lengths[:, None] + torch.arange(k.shape[1], device=k.device)
        turns = cos[at][:, :, None], sin[at][:, :, None]
        pages = table.gather(1, (at // PAGE).long()).long()
        k_cache[pages, (at % PAGE).long()] = rotated(k, *turns)
        v_cache[pages, (at % PAGE).long()] = v
        return rotated(q, *turns)

    def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, table: Tensor,
               causal: bool) -> Tensor:  # fmt: skip
        found = torch.empty_like(q)
        for b, length in enumerate(lengths.tolist()):
            k, v = (c[table[b].long()].flatten(0, 1)[:length] for c in (k_cache, v_cache))
            found[b] = plain_attention(q[b], k, v, causal)
        return found

    return Operators(torch.mm, plain_norm, plain_swiglu, append, attend, waits=True)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    """x / sqrt(mean x^2) weight."""
    wide = _wide(x)
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight


def plain_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) up."""
    return functional.silu(gate) * up


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Halves of heads, rotated."""
    left, right = _wide(x).chunk(2, -1)
    return torch.cat([left * cos - right * sin, left * sin + right * cos], -1).to(x.dtype)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Of one sequence, `q: [tokens, heads, d]` and `k, v: [keys, kv_heads, d]`; the last query
    stands at the last key."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    at = torch.arange(k.shape[2], device=q.device)
    seen = at <= at[k.shape[2] - q.shape[2] :, None] if causal else None
    out = functional.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
    return out[0].transpose(0, 1)


def angles(tokens: int, d: int, device: str) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position."""
    turn = torch.arange(tokens)[:, None] * 1e4 ** (-torch.arange(0, d, 2) / d)
    return turn.cos().to(device), turn.sin().to(device)


@dataclass
class Request:
    """A prompt, and what was given for it."""

    prompt: list[int]
    wanted: int
    given: list[int] = field(default_factory=list[int])


class Server:
    """Some sequences at a time, in the rows of one batch."""

    def __init__(self, model: Model, ops: Operators, options: argparse.Namespace) -> None:
        self.model, self.ops, self.device = model, ops, options.device
        columns = -(-(options.prompt + options.tokens) // PAGE)
        pages = 1 + options.rows * columns  # page 0 is for rows without a sequence
        shape = (len(model.layers), pages, PAGE, model.kv_heads, model.head_dim)
        self.caches = [
            torch.zeros(shape, dtype=torch.bfloat16, device=self.device) for _ in range(2)
        ]
        self.turns = angles(columns * PAGE, model.head_dim, self.device)
        self.free = list(range(1, pages))
        whole = {"dtype": torch.int32, "device": self.device}
        self.table = torch.zeros(options.rows, columns, **whole)
        self.lengths = torch.zeros(options.rows, **whole)
        self.tokens = torch.zeros(options.rows, 1, dtype=torch.int64, device=self.device)
        self.running: list[Request | None] = [None] * options.rows
        self.chosen = torch.zeros(options.rows, dtype=torch.int64, device=self.device)
        self.graph: Any = None
        self.steps = 0

    def logits(self, tokens: Tensor, lengths: Tensor, table: Tensor) -> Tensor:
        """Of the last of `tokens: [rows, count]`, which stand behind so many others each."""
        model, ops = self.model, self.ops
        (rows, count), d = tokens.shape, model.head_dim
        x = model.weights["embedding"][tokens.flatten()]
        after = lengths + count
        for layer, k_cache, v_cache in zip(model.layers, *self.caches, strict=True):
            packed = ops.gemm(ops.rms_norm(x, layer["norm"]), layer["qkv"])
            heads = packed.view(rows, count, -1, d)
            q, k, v = heads.split([model.heads, model.kv_heads, model.kv_heads], 2)
            q = ops.append(k, v, k_cache, v_cache, lengths, table, q, *self.turns)
            mixed = ops.attend(q, k_cache, v_cache, after, table, causal=True)
            x = x + ops.gemm(mixed.view(rows * count, -1), layer["out"])
            inner = ops.rms_norm(x, layer["second norm"])
            wide = ops.swiglu(ops.gemm(inner, layer["gate"]), ops.gemm(inner, layer["up"]))
            x = x + ops.gemm(wide, layer["down"])
        last = x.view(rows, count, -1)[:, -1]
        return ops.gemm(ops.rms_norm(last, model.weights["norm"]), model.weights["head"])

    def admit(self, request: Request) -> bool:
        """Read a prompt into a row that nobody has; False where there is no row."""
        if None not in self.running:
            return False
        row = self.running.index(None)
        total = len(request.prompt) + request.wanted
        pages = [self.free.pop() for _ in range(-(-total // PAGE))]
        own = torch.tensor(pages, dtype=torch.int32, device=self.device)
        self.table[row, : len(pages)] = own
        table, found = self.table[row : row + 1], torch.empty(0)
        for first in range(0, len(request.prompt), CHUNK):
            chunk = torch.tensor([request.prompt[first : first + CHUNK]], device=self.device)
            before = torch.full((1,), first, dtype=torch.int32, device=self.device)
            found = self.logits(chunk, before, table)
        request.given.append(int(found.argmax()))
        self.running[row] = request
        self.lengths[row] = len(request.prompt)
        self.tokens[row, 0] = request.given[-1]
        return True

    def step(self) -> None:
        """One token for every row; what a row without a sequence gives is not looked at."""
        if self.device == "cpu" or self.ops.waits:
            self._step()
        elif self.graph is None:
            self._captured()
        else:
            self.graph.replay()
        self.steps += 1
        for row, token in enumerate(self.chosen.tolist()):
            request = self.running[row]
            if request is None:
                continue
            request.given.append(token)
            if len(request.given) == request.wanted:
                self._leave(row)

    def _step(self) -> None:
        self.chosen.copy_(self.logits(self.tokens, self.lengths, self.table).argmax(-1))
        self.lengths += (self.lengths > 0).int()
        self.tokens[:, 0] = self.chosen

    def _captured(self) -> None:
        """Run a step once, which compiles its kernels, and capture it from where that began."""
        before = [one.clone() for one in (self.tokens, self.lengths)]
        self._step()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        self.tokens.copy_(before[0])
        self.lengths.copy_(before[1])
        with torch.cuda.graph(self.graph):
            self._step()
        self.graph.replay()

    def _leave(self, row: int) -> None:
        """A sequence ends: its pages are free."""
        pages = self.table[row].tolist()
        self.free += [page for page in pages if page]
        self.table[row] = 0
        self.lengths[row] = 0
        self.running[row] = None


def served(server: Server, requests: list[Request]) -> None:
    """Serve all requests, each as soon as there is a row for it."""
    waiting = deque(requests)
    while waiting or any(server.running):
        while waiting and server.admit(waiting[0]):
            waiting.popleft()
        server.step()


def plain_logits(model: Model, tokens: list[int], device: str) -> Tensor:
    """Of every token of one sequence, read at once, without a cache."""
    x = model.weights["embedding"][torch.tensor(tokens, device=device)]
    cos, sin = (one[:, None] for one in angles(len(tokens), model.head_dim, device))
    for layer in model.layers:
        heads = (plain_norm(x, layer["norm"]) @ layer["qkv"]).unflatten(1, (-1, model.head_dim))
        q, k, v = heads.split([model.heads, model.kv_heads, model.kv_heads], 1)
        mixed = plain_attention(rotated(q, cos, sin), rotated(k, cos, sin), v, causal=True)
        x = x + mixed.flatten(1) @ layer["out"]
        inner = plain_norm(x, layer["second norm"])
        x = x + plain_swiglu(inner @ layer["gate"], inner @ layer["up"]) @ layer["down"]
    return plain_norm(x, model.weights["norm"]) @ model.weights["head"]


@dataclass
class Verdicts:
    """Tokens that are the exact choice, as good, and neither; and of the plain loop in 16 bits how
    many of its own choices are not the exact one, and its largest error, in spreads of logits."""

    same: int = 0
    tie: int = 0
    wrong: int = 0
    plain_off: int = 0
    rounding: float = 0.0


def judged(model: Model, requests: list[Request], device: str) -> Verdicts:
    """What all tokens are, by the plain loop in float64 and in 16 bits."""
    found, wide, behind = Verdicts(), exact(model), list[float]()
    for request in requests:
        first, tokens = len(request.prompt) - 1, request.prompt + request.given
        true = plain_logits(wide, tokens, device)[first:-1]
        plain = plain_logits(model, tokens, device)[first:-1].double()
        spread, best = true.std(-1, keepdim=True), true.max(-1, keepdim=True).values
        given = torch.tensor(request.given, device=device)[:, None]
        behind += ((best - true.gather(1, given)) / spread).flatten().tolist()
        found.plain_off += int((plain.argmax(-1) != true.argmax(-1)).sum())
        found.rounding = max(found.rounding, float(((plain - true).abs() / spread).max()))
    for distance in behind:
        word = "same" if distance == 0 else "tie" if distance <= found.rounding else "wrong"
        setattr(found, word, getattr(found, word) + 1)
    return found


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    sizes = {"seed": 0, "requests": 40, "rows": 8, "prompt": 200, "tokens": 64}
    sizes |= {"width": 512, "heads": 8, "kv-heads": 2, "depth": 4, "vocabulary": 512}
    for name, usual in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--operators", choices=("warploom", "torch"), default="warploom")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    """Serve, check every token, and say how fast it was."""
    options = arguments(given)
    model = made(options)
    ops = of_warploom() if options.operators == "warploom" else of_torch()
    generator = torch.Generator().manual_seed(options.seed + 1)

    def draw(least: int, most: int) -> int:
        return int(torch.randint(least, most + 1, (1,), generator=generator))

    requests = [
        Request(
            [draw(0, options.vocabulary - 1) for _ in range(draw(1, options.prompt))],
            draw(2, options.tokens),
        )
        for _ in range(options.requests)
    ]
    with torch.no_grad():
        server = Server(model, ops, options)
        began = time.perf_counter()
        served(server, requests)
        seconds = time.perf_counter() - began
        found = judged(model, requests, options.device)
    count = found.same + found.tie + found.wrong
    rate = count / seconds
    result = {"tokens": count, "steps": server.steps, "tokens_per_second": rate, **asdict(found)}
    if options.json:
        print(json.dumps(result))
    else:
        print(
            f"{len(requests)} requests, {count} tokens in {server.steps} steps, {rate:.0f} a "
            f"second: {found.same} as the exact loop's, {found.tie} ties, {found.wrong} wrong; "
            f"{found.plain_off} of the 16-bit loop's choices are not the exact one's, its logits "
            f"are off by {found.rounding:.3f} of their spread at most"
        )
    return 1 if found.wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
