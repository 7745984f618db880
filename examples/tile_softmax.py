"""A row softmax as a tile program, run by the interpreter at a ragged size."""

import numpy as np

from warploom import tile as t


def softmax(x: t.Array, y: t.Array, block: int) -> None:
    """y = softmax(x) along n, `block` rows a task; n up to 1024."""
    (i,) = t.grid(m=t.cdiv(t.size("m"), block))
    rows, cols = t.span(i * block, block), t.span(0, 1024)
    values = t.load(x, rows, cols, edge=-np.inf)
    values -= t.max_along(values, "n")
    weights = t.exp(values)
    t.store(y, rows, cols, tile=weights / t.sum_along(weights, "n"))


def main() -> None:
    """Trace, print, run, compare."""
    arrays = {"x": t.array(t.FP32, "m n"), "y": t.array(t.FP32, "m n")}
    program = t.trace(softmax, arrays, block=64)
    print(program)
    x = np.random.default_rng(0).normal(size=(100, 777)).astype(np.float32)
    got = t.interpret(program, {"x": x, "y": np.full_like(x, np.nan)})["y"]
    want = np.exp(x - x.max(1, keepdims=True))
    want /= want.sum(1, keepdims=True)
    print("largest error", float(np.abs(got - want).max()))


if __name__ == "__main__":
    main()
