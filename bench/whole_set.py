"""Claim `sass-search` with every instruction movable, many players at once.

    python -m bench.whole_set prepare --schedules DIR --data DIR     # anywhere; needs no GPU
    python -m bench.whole_set run     --data DIR --raw FILE          # needs a GPU, not Triton
    python -m bench.whole_set report  --data DIR --raw FILE          # anywhere; needs Triton

`prepare` climbs on some of the kernels under the timing model. `run` plays on each from there and
from the original, compares the leaders with the original (interleaved, reloads, A/A control, warm
and flushed) and every output bit for bit, and verifies what won. `report` writes the rows.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from bench.whole_set_parts import play, prepare
from warploom.errors import WarploomError

RESULTS = Path(__file__).parent / "results" / "sass_search_whole.json"


def main(arguments: list[str]) -> int:
    """Run one step of the claim; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("step", choices=("prepare", "run", "report"))
    parser.add_argument("--data", type=Path, required=True, help="folder of kernels and starts")
    parser.add_argument(
        "--schedules", type=Path, help="folder of bench/timing_model.py, for prepare"
    )
    parser.add_argument("--raw", type=Path, help="where run writes and report reads")
    parser.add_argument("--kernels", default=",".join(play.SECONDS), help="names, comma-separated")
    parser.add_argument("--scale", type=float, default=1.0, help="times the seconds of each kernel")
    parser.add_argument("--player", default="guided")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", action="store_true", help="run: score by the model, no GPU")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    kernels = tuple(given.kernels.split(","))
    if unknown := [name for name in kernels if name not in play.SECONDS]:
        parser.error(f"unknown kernel {unknown[0]!r}, expected some of {', '.join(play.SECONDS)}")
    if given.step == "prepare" and given.schedules is None:
        parser.error("prepare needs --schedules")
    if given.step != "prepare" and given.raw is None:
        parser.error(f"{given.step} needs --raw")
    command = shlex.join(["python", "-m", "bench.whole_set", *arguments])
    try:
        if given.step == "prepare":
            prepare.prepare(given.schedules, given.data, kernels, given.seed)
        elif given.step == "run":
            plan = play.Plan(given.scale, given.player, given.seed, given.model, command)
            play.run(given.data, kernels, given.raw, plan)
        else:
            from bench.whole_set_parts import report  # noqa: PLC0415  (needs Triton)

            report.report(given.raw, given.out)
    except WarploomError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
