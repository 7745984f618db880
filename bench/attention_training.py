"""Claim `attention-training`: a small GPT trained with our attention and with PyTorch's.

    python -m bench.attention_training run --out curves.json   on the GPU machine
    python -m bench.attention_training merge curves.json       the row and docs/img/train_gpt.svg

`examples/train_gpt.py` is what is trained. PyTorch's run is repeated with the same seed: its own
sums have no fixed order, so that the distance of its two curves is the noise that ours is held to.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import kernel_bench as kb
from bench.evidence import Evidence, write_rows
from warploom.errors import CheckFailed
from warploom.files import write_text_atomically

CLAIM = "attention-training"
PLOT = kb.ROOT / "docs" / "img" / "train_gpt.svg"
OURS, TORCH, AGAIN = "warploom", "torch", "torch again"
ROUNDS = 3  # of each, for the interval of tokens a second
LAST = 50  # steps whose mean loss is compared
NOISE = 3.0  # times the distance of PyTorch's own runs that ours may be away
COLORS = {OURS: "#c2410c", TORCH: "#1d4ed8"}
WIDTH, HEIGHT, EDGE = 480, 260, 40


def example() -> Any:
    """The module `examples/train_gpt.py`."""
    path = kb.ROOT / "examples" / "train_gpt.py"
    spec = importlib.util.spec_from_file_location("train_gpt", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_gpt"] = module
    spec.loader.exec_module(module)
    return module


def run(given: list[str], rounds: int, out: Path) -> dict[str, Any]:
    """The runs of every name, in turn, and where they were made; kept after every round."""
    made = example()
    options = made.arguments(given)
    tried = {OURS: made.of_warploom, TORCH: made.of_torch, AGAIN: made.of_torch}
    runs: dict[str, list[Any]] = {name: [] for name in tried}
    shape = f"{options.steps} steps of {options.batch} x {options.rows}, width {options.width}, "
    shape += f"{options.heads} heads, {options.depth} layers"
    found = {"shape": shape, "runs": runs, "command": kb.command_line(), **kb.environment()}
    for _ in range(rounds):
        for name, attention in tried.items():
            runs[name].append(made.train(attention, options.steps, options))
        out.write_text(json.dumps(found))
    return found


def ends(runs: Sequence[Any]) -> list[float]:
    """The mean loss of each run's last steps."""
    return [statistics.fmean(one["losses"][-LAST:]) for one in runs]


def row(found: dict[str, Any]) -> Evidence:
    """The row of the runs; raises `CheckFailed` where our losses are not those of PyTorch."""
    runs = found["runs"]
    rates = {name: [one["tokens_per_second"] for one in own] for name, own in runs.items()}
    ratios = [a / b for a, b in zip(rates[OURS], rates[TORCH], strict=True)]
    control = [a / b for a, b in zip(rates[AGAIN], rates[TORCH], strict=True)]
    theirs = [*ends(runs[TORCH]), *ends(runs[AGAIN])]
    noise = max(theirs) - min(theirs)
    away = abs(statistics.fmean(ends(runs[OURS])) - statistics.fmean(theirs))
    if away > NOISE * max(noise, 1e-4):
        raise CheckFailed(
            f"our loss ends {away:.5f} from PyTorch's, whose own runs end {noise:.5f}"
        )
    return Evidence(
        claim=CLAIM,
        kernel="examples/train_gpt.py",
        shape=found["shape"],
        dtype="bf16",
        device=found["device"],
        driver=found["driver"],
        compiler=f"torch {found['torch']}",
        date=found["date"],
        command=found["command"],
        unit="tokens/s",
        better="higher",
        ours=statistics.median(rates[OURS]),
        baselines={"torch SDPA": statistics.median(rates[TORCH])},
        ratio_to_best=statistics.geometric_mean(ratios),
        ci95=(min(ratios), max(ratios)),
        control=(min(control), max(control)),
        samples=len(ratios),
        checks={
            "loss at the end": round(statistics.fmean(ends(runs[OURS])), 6),
            "torch's loss": round(statistics.fmean(theirs), 6),
            "torch's spread": round(noise, 6),
        },
        notes=f"of the median step; interval: all of {len(ratios)} rounds; loss: mean of the last "
        f"{LAST} steps",
    )


def plot(runs: dict[str, Any]) -> str:
    """The first run's losses of ours and of PyTorch over the steps."""
    curves = {name: runs[name][0]["losses"] for name in COLORS}
    top, count = max(max(c) for c in curves.values()), max(len(c) for c in curves.values())
    low = min(min(c) for c in curves.values())

    def at(step: int, loss: float) -> str:
        across = EDGE + step / max(1, count - 1) * (WIDTH - 2 * EDGE)
        high = (loss - low) / ((top - low) or 1.0) * (HEIGHT - 2 * EDGE)
        return f"{across:.1f},{HEIGHT - EDGE - high:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{EDGE}" y="20">cross entropy of a letter, from {top:.2f} to {low:.2f}</text>',
        f'<text x="{WIDTH - EDGE}" y="{HEIGHT - 15}" text-anchor="end">{count} steps</text>',
    ]
    for number, (name, losses) in enumerate(curves.items()):
        points = " ".join(at(step, loss) for step, loss in enumerate(losses))
        dash = "" if number == 0 else ' stroke-dasharray="4 3"'
        parts += [
            f'<polyline points="{points}" fill="none" stroke="{COLORS[name]}"{dash}/>',
            f'<text x="{WIDTH - EDGE}" y="{45 + 15 * number}" text-anchor="end" '
            f'fill="{COLORS[name]}">{name}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=("run", "merge"))
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--out", type=Path, default=Path("curves.json"))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    args, rest = parser.parse_known_args()
    if args.mode == "run":
        print(row(run(rest, args.rounds, args.out)))
        return
    found = json.loads(args.file.read_text())
    write_rows(kb.ROOT / "bench" / "results" / "attention_training.json", [row(found)])
    write_text_atomically(PLOT, plot(found["runs"]))


if __name__ == "__main__":
    main()
