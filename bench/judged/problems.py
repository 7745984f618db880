"""The problems of the corpus: small, each with sizes that fit no tile."""

import torch

from warploom import tile as t
from warploom.judge import Problem

PATTERNS = ("randn", "integers", "large", "alternating")
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "mv", "dot")


def rows(kind: t.DType) -> t.Array:
    return t.array(kind, "rows n")


softmax = Problem(
    lambda x: torch.softmax(x, -1),
    inputs={"x": rows(t.FP32)},
    outputs={"y": rows(t.FP32)},
    sizes=[{"rows": 4, "n": 64}, {"rows": 3, "n": 37}],
    patterns=PATTERNS,
)
gemm = Problem(
    lambda a, b: a @ b,
    inputs={"a": t.array(t.BF16, "m k"), "b": t.array(t.BF16, "k n")},
    outputs={"c": t.array(t.FP32, "m n")},
    sizes=[{"m": 16, "n": 16, "k": 64}, {"m": 17, "n": 24, "k": 41}],
    patterns=PATTERNS,
    forbidden=PRODUCTS,
    work=lambda sizes: 2.0 * sizes["m"] * sizes["n"] * sizes["k"],
)
row_sum = Problem(
    lambda x: x.sum(-1),
    inputs={"x": rows(t.FP32)},
    outputs={"y": t.array(t.FP32, "rows")},
    sizes=[{"rows": 4, "n": 64}, {"rows": 6, "n": 37}],
    patterns=("randn", "integers"),
    forbidden=("*",),
)
gather = Problem(
    lambda table, index: 2 * table[index.long()],
    inputs={"table": t.array(t.FP16, "entries n"), "index": t.array(t.INT32, "rows")},
    outputs={"y": rows(t.FP16)},
    sizes=[{"entries": 9, "rows": 16, "n": 8}, {"entries": 5, "rows": 3, "n": 7}],
    patterns=PATTERNS,
    spans={"index": "entries"},
)


def add_norm_reference(x: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = x + r
    return h * torch.rsqrt((h * h).mean(-1, keepdim=True) + 1e-6), h


add_norm = Problem(
    add_norm_reference,
    inputs={"x": rows(t.FP32), "r": rows(t.FP32)},
    outputs={"y": rows(t.FP32), "h": rows(t.FP32)},
    sizes=[{"rows": 2, "n": 32}, {"rows": 3, "n": 21}],
    patterns=("randn", "uniform", "small"),
)
