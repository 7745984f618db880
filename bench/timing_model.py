"""Claim `timing-model`: does the static timing model rank schedules as the GPU does?

    python -m bench.timing_model make    --data DIR [--kernels ...] [--count 512]   # needs Triton
    python -m bench.timing_model probes  --data DIR                                 # needs NVRTC
    python -m bench.timing_model measure --data DIR                                 # needs a GPU
    python -m bench.timing_model report  --data DIR                                 # needs neither

`make` draws random legal schedules of the suite's best Triton kernels (random walks of 1 to 400
legal steps each, verified) and stores them. `measure` runs the micro-benchmarks and then every
schedule beside the original, in two passes over different random orders, so that the repeatability
of a measurement bounds what any model can reach. `report` sets the model beside the times.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

from bench.calibration.images import build_images, write_images
from bench.timing_model_parts import make, measure, report
from warploom.errors import WarploomError

RESULTS = Path(__file__).parent / "results" / "timing_model.json"


def main(arguments: list[str]) -> int:
    """Run one step of the claim; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("step", choices=("make", "probes", "measure", "report"))
    parser.add_argument("--data", type=Path, required=True, help="folder of schedules and times")
    parser.add_argument("--kernels", default=",".join(make.BEST), help="names, comma-separated")
    parser.add_argument("--count", type=int, default=512, help="schedules of each kernel")
    parser.add_argument("--longest", type=int, default=400, help="steps of the longest walk")
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--raw", type=Path, help="where measure writes; default DATA/measured.json")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    kernels = tuple(given.kernels.split(","))
    if unknown := [name for name in kernels if name not in make.BEST]:
        parser.error(f"unknown kernel {unknown[0]!r}, expected some of {', '.join(make.BEST)}")
    raw = given.raw or given.data / "measured.json"
    try:
        if given.step == "make":
            make.make(given.data, kernels, given.count, given.seed, given.longest)
        elif given.step == "probes":
            write_images(given.data / "probes.tar.xz", build_images())
        elif given.step == "measure":
            measure.measure(given.data, kernels, raw, given.passes, given.seed)
        else:
            command = shlex.join(["python", "-m", "bench.timing_model", *arguments])
            report.report(given.data, json.loads(raw.read_text()), kernels, given.out, command)
    except WarploomError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
