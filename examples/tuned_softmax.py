"""A Triton softmax: captured with no GPU, searched offline, run from a store.

    python examples/tuned_softmax.py capture out/softmax     any machine: cubin + launch, a key
    python examples/tuned_softmax.py run tuned/              a GPU: stored cubin, else the original

Between the two, `warploom tune` searches the captured cubin and writes the winner to the store.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import triton
import triton.language as tl

from warploom.files import write_bytes_atomically, write_text_atomically
from warploom.integrations.triton import ScalarArgument, TensorArgument, capture, events, tuned

ROWS, COLS = 8192, 4096


@triton.jit
def softmax(x_ptr, y_ptr, cols, block: tl.constexpr):
    """One row a block: y = softmax(x), fp16 in and out."""
    lanes = tl.arange(0, block)
    at = tl.program_id(0) * cols + lanes
    x = tl.load(x_ptr + at, mask=lanes < cols, other=float("-inf")).to(tl.float32)
    numerator = tl.exp(x - tl.max(x, 0))
    y = numerator / tl.sum(numerator, 0)
    tl.store(y_ptr + at, y.to(tl.float16), mask=lanes < cols)


def capture_softmax(folder: Path) -> None:
    """Compile for sm_90a as the launch below would, and write what a search needs."""
    kernel = capture(
        softmax,
        {
            "x_ptr": TensorArgument("fp16", (ROWS, COLS)),
            "y_ptr": TensorArgument("fp16", (ROWS, COLS), role="out"),
            "cols": ScalarArgument("i32", COLS),
        },
        constexprs={"block": 4096},
        grid=(ROWS, 1, 1),
        num_warps=8,
        arch=90,
    )
    write_bytes_atomically(folder / "softmax.cubin", kernel.cubin)
    write_text_atomically(
        folder / "softmax.launch.json", json.dumps(kernel.launch.to_json(), indent=1) + "\n"
    )
    print(f"{folder}/softmax.cubin ({kernel.compiler}), deploy key {kernel.key}")


def run_softmax(store: Path) -> None:
    """Launch the function as ever; what runs is the stored cubin when there is one."""
    torch = importlib.import_module("torch")
    fast = tuned(store=store, on_miss="original")(softmax)
    x = torch.randn(ROWS, COLS, device="cuda", dtype=torch.float16)
    y = torch.empty_like(x)
    fast[(ROWS,)](x, y, COLS, block=4096, num_warps=8)
    error = (y.double() - x.double().softmax(-1)).norm() / x.double().softmax(-1).norm()
    print(f"{events()[-1].outcome}: relative error {float(error):.1e}")


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("capture", "run"):
        sys.exit((__doc__ or "").strip())
    {"capture": capture_softmax, "run": run_softmax}[sys.argv[1]](Path(sys.argv[2]))
