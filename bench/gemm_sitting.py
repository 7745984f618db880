"""Claim `gemm-sittings`: the GEMM a user gets for a shape, in sittings beside the libraries.

    python -m bench.gemm_sitting build              here, no GPU: cubins under out/bench/gemm
    python -m bench.gemm_sitting sit --dry          here: would every case run
    python -m bench.gemm_sitting sit --name one     on the GPU machine: a sitting, three at least
    python -m bench.gemm_sitting merge FILE...      sittings into bench/results/gemm_sittings.json

`bench/sitting.py` says what a sitting is, `bench/gemm.py` what a case is. The variants that the
chooser is fitted to stand in `gemm.json`. Operations: 2 m n k, of every product of a batch.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench import gemm as base
from bench import gemm_cases as cases
from bench import kernel_bench as kb
from bench import sitting as st
from warploom.codegen.compile.build import Built

RESULTS = kb.ROOT / "bench" / "results" / "gemm_sittings.json"
PLAIN = base.FOLDER / "plain"
CASES = (
    *(f"time {m}x{n}x{k}" for m, n, k in cases.SHAPES),
    *(f"{what} {m}x{n}x{k}" for what, (_, shapes) in cases.OTHERS.items() for m, n, k in shapes),
)
ALONE = ("time 8192x8192x8192", "time 16384x16384x16384", "leaky 16384x16384x16384")
SMALL = (16, 32, 64)  # the shape of a dry run


def chosen(name: str) -> str:
    """The variant of `bench/gemm_cases.py` that a case gets."""
    what, shape = name.split()
    return cases.default_of(what, tuple(map(int, shape.split("x"))))  # type: ignore[arg-type]


def build_all(wanted: Sequence[str]) -> None:
    """Compile what cases need."""
    names = dict.fromkeys(map(chosen, wanted))
    slices = {cases.VARIANTS[x][0].slices for x in names if cases.VARIANTS[x][0].workspace}
    for name in (*names, *(f"combine{n}" for n in sorted(slices))):
        built = cases.built_of(name)
        built.write(PLAIN / kb.slug(name))
        print(f"{name:32} {built.resources.registers} registers", flush=True)


def data_of(torch: Any, what: str, variant: str, shape: tuple[int, int, int]) -> list[base.Values]:
    """Sets of operands, several where one would stay in the cache."""
    m, n, k = shape
    config = cases.VARIANTS[variant][0]
    sets = [cases.operands(torch, config, m, n, k, s) for s in range(3 if m * n * k < 2**37 else 1)]
    for v in sets:
        if "bias" in v:
            v["bias16"] = v["bias"].to(v["c"].dtype)
        if config.workspace:
            v["parts"] = torch.empty(config.slices, m, n, device=cases.DEVICE)
    return sets


def sit(name: str, rounds: int, options: argparse.Namespace) -> dict[str, Any]:
    """One case of a sitting."""
    torch = kb.load_torch()
    gc.collect()
    if options.dry:
        cases.DEVICE = "cpu"
    else:
        torch.cuda.empty_cache()
    what, shape = name.split()
    full = m, n, k = tuple(map(int, shape.split("x")))
    variant = chosen(name)
    config = cases.VARIANTS[variant][0]
    data = data_of(torch, what, variant, SMALL if options.dry else full)  # type: ignore[arg-type]
    turn = [0]

    def bound(call: base.Call) -> Callable[[], None]:
        def run() -> None:
            turn[0] = (turn[0] + 1) % len(data)
            call(data[turn[0]])

        return run

    built = {"default": Built.read(PLAIN / kb.slug(variant))}
    for _, folder in (one for one in options.front_door if one[0] == name):
        built["front-door"] = Built.read(folder)
    every = base.baselines(torch, what) | (base.triton(torch) if what == "leaky" else {})
    libraries, left_out = st.kept(every, options)
    ours = dict.fromkeys(built, _nothing)
    if not options.dry:
        ours = {own: _caller(torch, one) for own, one in built.items() if own != "default"}
        ours = {"default": base.caller(torch, variant), **ours}
        checks = base.verify(torch, config, data[0], {**libraries, **ours})
    else:
        cases.expected(torch, config, data[0], None, torch.float64)
        libraries = dict.fromkeys(libraries, _nothing)
        checks = dict.fromkeys(ours, "pass")
    right = {b: call for b, call in libraries.items() if checks.get(b, "pass") == "pass"}
    calls = {b: bound(call) for b, call in right.items()}
    calls |= {own: bound(call) for own, call in ours.items()}
    timer: st.Timer = st.Dry(calls) if options.dry else st.Gpu(torch, calls)
    ran = [b for b in right if b in timer.names]
    timer.again(ran[0])
    kind = config.dtype.name if what not in ("fp8", "promoted") else f"{config.dtype.name} {what}"
    return {
        "shape": shape if what in ("time", "fp8", "promoted") else f"{shape} {what}",
        "dtype": kind,
        "default": variant,
        "compiler": built["default"].resources.compiler,
        "work": 2.0 * m * n * k * (cases.BATCH if config.batched else 1),
        "baselines": ran,
        "refused": {b: checks[b] for b in libraries if b not in right} | left_out | timer.refused,
        "checks": {own: checks[own] for own in ours},
        "same image": all(one.cubin == built["default"].cubin for one in built.values()),
        **st.measure(timer, rounds, name in ALONE and not options.no_alone, options.seed),
    }


def _nothing(v: base.Values) -> None:
    del v


def _caller(torch: Any, built: Built) -> base.Call:
    kernel = built.kernel()
    names = [spec.name for spec in built.source.arrays]

    def call(v: base.Values) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        kernel({x: v[x] for x in names}, stream=stream)

    return call


def merge(paths: list[Path]) -> None:
    """The rows of sittings; those of shapes that were not timed stay."""
    bursts, short = st.rows_of(paths, "gemm", st.seen_in_bursts)
    alone, less = st.rows_of(paths, "gemm-alone", st.seen_alone)
    note = f"bursts of {1e3 * st.BURST:.0f} ms after {1e3 * st.REST:.0f} ms of rest"
    after = f"alone for {st.ALONE} s after {st.SETTLE} s"
    kb.put(RESULTS, st.with_note(bursts, note))
    if alone:
        kb.put(RESULTS.with_name("gemm_alone.json"), st.with_note(alone, after))
    print(f"{len(bursts)} rows of bursts, {len(alone)} alone, from {len(paths)} sittings")
    for line in dict.fromkeys(short + less):
        print(f"left out: {line}")


def main() -> int:
    """Command line."""
    args = st.arguments(__doc__ or "", CASES, ("build", "sit", "merge"))
    names = [name for name in CASES if any(o in name for o in args.only.split(","))]
    if args.mode == "build":
        build_all(names)
    elif args.mode == "merge":
        merge(args.files)
    else:
        return st.sit(sit, args, names)
    return 0


if __name__ == "__main__":
    sys.exit(main())
