"""Loss of a language model's last layer, a row, without logits in memory: two kernels.

`blocks` gives each block of the vocabulary its share of a row's sum and of its target's logit,
`loss` joins them: log(sum(exp(x w^T))) - (x w^T)[target].

warploom optimize examples/programs/cross_entropy.py:blocks --set n=128256 --set blocks=501
warploom optimize examples/programs/cross_entropy.py:loss --set blocks=501
"""

import math

from warploom import tile as t
from warploom.kernels import UserKernel

BLOCK, PARTS = 256, t.array(t.FP32, "m blocks")  # tokens of the vocabulary in a block


def blocks_program(tile_m: int = t.tunable(128, 192)):
    """x: [m, k], w: [n, k] in bf16, targets: [m]; sums, picked: [m, blocks] in fp32."""

    def cross_entropy_blocks(x, w, targets, sums, picked):
        j, i = t.grid(blocks=t.size("blocks"), m=t.cdiv(t.size("m"), tile_m))
        rows, tokens = t.span(i * tile_m, tile_m), t.span(j * BLOCK, BLOCK)
        logits = t.zeros(m=tile_m, n=BLOCK)
        for step in t.loop(t.cdiv(t.size("k"), 64)):
            part = t.span(step * 64, 64)
            logits += t.load(x, rows, part) @ t.load(w, tokens, part)
        token = t.coordinate("n", BLOCK, j * BLOCK)
        logits[:] = t.where(token < t.size("n"), logits, -math.inf)
        highest = t.max_along(logits, "n")
        total = t.sum_along(t.exp(logits - highest), "n")
        t.store(sums, rows, j, tile=highest + t.log(total))
        own = t.load(targets, rows).equals(token)
        t.store(picked, rows, j, tile=t.sum_along(t.where(own, logits, 0.0), "n"))

    arrays = {"x": t.array(t.BF16, "m k"), "w": t.array(t.BF16, "n k")}
    arrays |= {"targets": t.array(t.INT32, "m"), "sums": PARTS, "picked": PARTS}
    return t.trace(cross_entropy_blocks, arrays)


def loss_program(tile_m: int = 4):
    """loss: [m]; at most 1024 blocks."""

    def cross_entropy(sums, picked, loss):
        (i,) = t.grid(m=t.cdiv(t.size("m"), tile_m))
        rows, every = t.span(i * tile_m, tile_m), t.span(0, 1024)
        parts = t.load(sums, rows, every, edge=-math.inf)
        highest = t.max_along(parts, "blocks")
        total = highest + t.log(t.sum_along(t.exp(parts - highest), "blocks"))
        t.store(loss, rows, tile=total - t.sum_along(t.load(picked, rows, every), "blocks"))

    return t.trace(cross_entropy, {"sums": PARTS, "picked": PARTS, "loss": t.array(t.FP32, "m")})


blocks = UserKernel(
    blocks_program,
    sizes={"m": 200, "n": 600, "k": 136, "blocks": 3},
    inputs=lambda sizes, random: {"targets": random.integers(0, sizes["n"], sizes["m"])},
)
loss = UserKernel(loss_program, sizes={"m": 200, "blocks": 501})
