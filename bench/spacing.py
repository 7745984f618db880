"""Which distances does the hardware keep by itself, and which corrupt a result when undercut?

    python -m bench.spacing build DIR              # needs NVRTC and nvdisasm
    python DIR/spacing.py DIR OUT.json             # needs a GPU, cuda-bindings and numpy
    python -m bench.spacing report OUT.json        # needs neither

`build` compiles random kernels and lowers one row of the mined table at a time, step by step, in
the control bits of the pairs that the row is about (`spacing_parts/closer.py`). The run launches
every patched kernel beside the original on the same inputs, with one warp on a scheduler and with
many, alone and beside another kernel, and compares every bit. `report` writes what came of it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import struct
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Final

from bench.spacing_parts.closer import ACROSS, LATENCY, SPACING, STALL, SYNC, Closer, Patch, Target
from bench.spacing_parts.source import PROFILES, kernel
from warploom.errors import WarploomError
from warploom.runtime.nvrtc import compile_source
from warploom.sass.decode.cubin import parse

RUNNER: Final = Path(__file__).parent / "spacing_parts" / "run.py"
SEEDS: Final = {"uniform": 4, "all": 3}
KERNELS: Final = {SPACING: 4, STALL: 3, SYNC: 3, ACROSS: 2, LATENCY: 2}  # of each target, at most


def build(folder: Path) -> None:
    """Write kernels, patches and the script that runs them."""
    folder.mkdir(parents=True, exist_ok=True)
    made: Counter[Target] = Counter()
    rows: list[dict[str, Any]] = []
    kernels: list[str] = []
    for profile in PROFILES:
        for seed in range(SEEDS.get(profile, 2)):
            name = f"{profile}-{seed}"
            image = compile_source(kernel(profile, seed), "sm_90a")
            (folder / f"{name}.cubin").write_bytes(image)
            closer = Closer(parse(image, name))
            start = closer.kernel.code.text.offset
            count = 0
            for target in closer.targets():
                if made[target] >= KERNELS[target.kind]:
                    continue
                patch = closer.patch(target)
                if patch is None:
                    continue
                made[target] += 1
                count += 1
                rows.append(_row(len(kernels), start, patch))
            kernels.append(name)
            print(f"{name}: {closer.known.count} instructions, {count} patches", flush=True)
    rows.sort(key=lambda row: (list(KERNELS).index(row["kind"]), -row["distance"]))
    (folder / "patches.json").write_text(json.dumps({"kernels": kernels, "rows": rows}))
    shutil.copy(RUNNER, folder / "spacing.py")


def _row(number: int, start: int, patch: Patch) -> dict[str, Any]:
    target = patch.target
    return {
        "kernel": number,
        "kind": target.kind,
        "key": target.key,
        "mined": target.mined,
        "distance": target.distance,
        "pairs": len(patch.pairs),
        "bytes": [
            [start + index * 16 + 8, struct.pack("<Q", high).hex()]
            for index, high in sorted(patch.words.items())
        ],
    }


def main(words: list[str]) -> int:
    """Run one step; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.spacing", description=__doc__)
    parser.add_argument("step", choices=("build",))
    parser.add_argument("path", type=Path)
    options = parser.parse_args(words)
    build(options.path)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except WarploomError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
