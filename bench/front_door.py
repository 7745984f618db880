"""Does the command line give the kernel that the operators launch, in the same time?

    python -m bench.front_door --out DIR      on a GPU machine: rows of claim `front-door`
    python -m bench.front_door merge FILE     into bench/results/front_door.json

`warploom optimize NAME` runs whole, measuring included; its cubin is compared with the one that the
PyTorch operator of that name launches, and both are timed in one process, in shuffled rounds of
short bursts with a copy of the first as a control. A row's ratio is operator / command line.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench import kernel_bench as kb
from bench import sitting
from bench.evidence import Evidence, read_rows, write_rows
from warploom.codegen.compile.build import Built
from warploom.integrations import torch_op, torch_program
from warploom.runtime.stats import median_interval

RESULTS = Path(__file__).parent / "results" / "front_door.json"
CASES: dict[str, dict[str, int | bool]] = {
    "attention 128 full 16384": {"rows": 16384, "batch": 1, "heads": 16},
    "attention 128 causal 16384": {"rows": 16384, "batch": 1, "heads": 16, "causal": True},
    "attention 128 full 4096": {},
    "gemm 4096x4096x4096": {},
    "gemm 8192x8192x8192": {"m": 8192, "n": 8192, "k": 8192},
}
ROUNDS = 40


def optimized(name: str, settings: dict[str, Any], out: Path) -> tuple[Built, dict[str, Any]]:
    """What `warploom optimize` leaves: the kernel and its result.json."""
    given = [f"--set={key}={str(value).lower()}" for key, value in settings.items()]
    command = [sys.executable, "-m", "warploom", "optimize", name, *given, "-o", str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return Built.read(out), json.loads((out / "result.json").read_text())


def operands(torch: Any, name: str, sizes: dict[str, int]) -> dict[str, Any]:
    """Normal random bf16 arrays by parameter."""
    if name == "gemm":
        shapes = {"a": (sizes["m"], sizes["k"]), "b": (sizes["k"], sizes["n"])}
        shapes["c"] = (sizes["m"], sizes["n"])
    else:
        lead = (sizes["batch"], sizes["heads"])
        shapes = dict.fromkeys("qkvo", (*lead, sizes["rows"], 128))
    return {x: torch.randn(shape, device="cuda").bfloat16() for x, shape in shapes.items()}


def row(torch: Any, title: str, settings: dict[str, Any]) -> Evidence:
    """One case, optimised, launched both ways, timed."""
    name = title.split(maxsplit=1)[0]
    with tempfile.TemporaryDirectory() as text:
        built, result = optimized(name, settings, Path(text))
    sizes = result["measured"]["sizes"]
    arrays = operands(torch, name, sizes)
    kernel = built.kernel()

    def launched() -> Any:
        kernel(arrays, stream=int(torch.cuda.current_stream().cuda_stream))

    def operator() -> Any:
        if name == "gemm":
            return torch_op.gemm(arrays["a"], arrays["b"])
        return torch_op.attention(
            arrays["q"], arrays["k"], arrays["v"], causal=bool(settings.get("causal"))
        )

    torch_program.KERNELS.clear()
    operator()
    (own,) = [one for key, one in torch_program.KERNELS.items() if key[0] == name]
    same = own.cubin == built.cubin
    calls = {"operator": operator, "command line": launched, sitting.CONTROL: launched}
    bursts = sitting.measure(sitting.Gpu(torch, calls), ROUNDS, False, 0)["bursts"]
    samples = {key: [1e3 * ms for ms in one["ms"]] for key, one in bursts.items()}
    middle, *interval = median_interval(samples["command line"], samples["operator"])
    _, *control = median_interval(samples["command line"], samples[sitting.CONTROL])
    median = {key: statistics.median(one) for key, one in samples.items()}
    return Evidence(
        claim="front-door",
        kernel=f"{name} {result['schedule']}",
        shape=title.partition(" ")[2],
        dtype="bf16",
        **kb.provenance(),
        compiler=built.resources.compiler,
        unit="us",
        better="lower",
        ours=median["command line"],
        baselines={"operator": median["operator"]},
        ratio_to_best=middle,
        ci95=(interval[0], interval[1]),
        control=(control[0], control[1]),
        samples=ROUNDS,
        checks={
            "same cubin": "pass" if same else "fail",
            "numbers": "pass" if result["measured"]["check"]["passed"] else "fail",
            "sha256": hashlib.sha256(built.cubin).hexdigest(),
            "optimize's own time, us": result["measured"]["microseconds"],
        },
        notes=f"predicted {json.dumps(result['schedules'][0]['predicted'])} cycles an iteration",
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="?", default="run", choices=("run", "merge"))
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    args = parser.parse_args()
    if args.what == "merge":
        write_rows(RESULTS, [one for file in args.files for one in read_rows(file)])
        return
    import torch  # noqa: PLC0415

    rows: list[Evidence] = []
    for title, settings in CASES.items():
        rows.append(row(torch, title, dict(settings)))
        write_rows(args.out / "front_door.json", rows)
        print(title, rows[-1].ratio_to_best, rows[-1].control, rows[-1].checks, flush=True)


if __name__ == "__main__":
    main()
