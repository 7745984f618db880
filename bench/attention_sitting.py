"""Claims `attention-forward` and `attention-alone`: what a user gets, in sittings beside libraries.

    python -m bench.attention_sitting build               here, no GPU: cubins, out/bench/sitting
    python -m bench.attention_sitting sit --dry           here: would every case run
    python -m bench.attention_sitting prepare             on the GPU machine: libraries compile
    python -m bench.attention_sitting sit --name one      there: a sitting, three at least
    python -m bench.attention_sitting merge FILE...       sittings into bench/results [--only CASES]
    python -m bench.attention_sitting variants FILE...    of one sitting each, the times of variants
                                                          that tuned tables are made from

`bench/sitting.py` says what a sitting is. A case's kernel is what the chooser takes for its shape.
`sit --front-door "CASE=FOLDER"` times what `warploom optimize` built into FOLDER beside it.
Packed cases named `tables` make the table of tasks and bring it to the GPU inside every timed call
(no CUDA graph, for anyone); the others find it there. fp8 cases stand beside cuDNN's fp8 and
the 16-bit libraries on the same values; `ordered` is our kernel for v that lies in the order of
`kernels.attention.values` already. `latent` cases have values of 128 columns beside wider keys,
as multi-head latent attention reads its prompts.
Operations: 2 * batch * heads * (head sizes of keys and of values) * pairs of a query and a key it
sees (half when causal).
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import math
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench import attention as base
from bench import attention_cases as cases
from bench import kernel_bench as kb
from bench import sitting as st
from bench.attention_baselines import Lifted, baselines_of, usable
from bench.evidence import Evidence
from warploom.codegen.compile.build import Built, build
from warploom.errors import InputError
from warploom.kernels.attention.program import AttentionConfig, attention
from warploom.kernels.attention.reference import task_table
from warploom.kernels.attention.variants import choose_attention
from warploom.kernels.tuned.variant import Variant
from warploom.runtime.stats import median_interval
from warploom.tile import BF16, E4M3

FOLDER = kb.ROOT / "out" / "bench" / "sitting"
ORDERED = "ordered "  # begins the folders of kernels whose values lie in the order of quads
RESULTS = kb.ROOT / "bench" / "results"
TOKENS, WIDTH = 16384, 2048  # batch * rows and heads * head size
MASKS = ("full", "causal")
LATENT = 128  # the head size of values where keys have another one
RESHAPED = ("sharp", "rising", "jump")
WRONG = {"bf16": 0.01, "e4m3": 0.06}  # relative error of our output that fails
WRONG_THEIRS = {"bf16": 0.02, "e4m3": 0.12}  # and of a baseline's, which then is none
CASES = (
    *(f"time {d} {m} {n}" for d in (64, 128) for m in MASKS for n in cases.LENGTHS),
    *(f"time {d} {m} {n}" for d in (96, 256) for m in MASKS for n in cases.LENGTHS[:4]),
    *(f"time {d} {m} {n}" for d in (64, 128) for m, n in cases.SHORT),
    *(f"fp8 {d} {m} {n}" for d in (128, 64) for m in MASKS for n in cases.LENGTHS),
    *(f"fp8 256 {m} {n}" for m in MASKS for n in cases.LENGTHS[:4]),
    *(f"latent 192 {m} {n}" for m in MASKS for n in cases.LENGTHS[::2]),
    "gqa 128 causal 8192",
    "window 128 causal 8192",
    *(f"packed {d} causal {which}" for d in (64, 128) for which in ("mixed", "short")),
    *(f"packed {d} causal {which} tables" for d in (64, 128) for which in ("mixed", "short")),
    *(f"{what} {which} 8192" for what in RESHAPED for which in ("64 full", "128 causal")),
)
ALONE = (
    *(f"time {d} {m} 16384" for d in (64, 128) for m in MASKS),
    *(f"time 256 {m} 8192" for m in MASKS),
    *(f"fp8 128 {m} 16384" for m in MASKS),
)


@dataclass(frozen=True)
class Case:
    """One shape, mask and kind of data."""

    name: str

    @property
    def words(self) -> list[str]:
        """Kind, head size, mask, length and whether tables are made inside the call."""
        return self.name.split()

    @property
    def kind(self) -> str:
        """`time`, `fp8`, `gqa`, `window`, `packed`, or how the scores are reshaped."""
        return self.words[0]

    @property
    def tables(self) -> bool:
        """Whether the table of tasks is made inside the timed call."""
        return self.words[-1] == "tables"

    @property
    def shape(self) -> str:
        """As rows name it."""
        return self.name.removeprefix("time ")

    @property
    def config(self) -> AttentionConfig:
        """What the user asks for."""
        return AttentionConfig(
            dtype=E4M3 if self.kind == "fp8" else BF16,
            head_dim=int(self.words[1]),
            value_dim=LATENT if self.kind == "latent" else None,
            causal=self.words[2] == "causal",
            packed=self.kind == "packed",
            window=cases.WINDOW if self.kind == "window" else None,
            group=cases.GROUP if self.kind == "gqa" else 1,
        )

    @property
    def heads(self) -> int:
        """Query heads of a sequence."""
        return WIDTH // (self.config.value_dim or self.config.head_dim)

    @property
    def lengths(self) -> int | list[int]:
        """Rows of every sequence, or of each packed one."""
        return cases.PACKED[self.words[3]] if self.kind == "packed" else int(self.words[3])

    @property
    def batch(self) -> int:
        """Sequences of that length; packed ones are one."""
        return 1 if isinstance(self.lengths, list) else max(1, TOKENS // self.lengths)

    def choice(self) -> Variant:
        """What the chooser takes."""
        return choose_attention(self.lengths, self.config, heads=self.batch * self.heads)

    @property
    def folder(self) -> str:
        """Of its kernel: cases share those that are the same."""
        own = ("packed", "window", "fp8", "gqa", "latent")
        lead = f"{self.kind} " if self.kind in own else ""
        return kb.slug(f"{lead}d{self.words[1]} {self.words[2]} {self.choice().name}")

    @property
    def configs(self) -> dict[str, AttentionConfig]:
        """What is built, by its folder."""
        found = {self.folder: self.config}
        if self.kind == "fp8":
            found[kb.slug(ORDERED + self.folder)] = replace(self.config, ordered=True)
        return found


def build_all(names: list[str]) -> None:
    """Compile what cases need; `cases.json` says which kernel each gets."""
    table: dict[str, dict[str, Any]] = {}
    for case in map(Case, names):
        choice = case.choice()
        config = choice.config(case.config)
        table[case.name] = {"folder": case.folder, "variant": choice.name, "tile": config.tile}
        for folder, asked in case.configs.items():
            if (FOLDER / folder).is_dir():
                continue
            own = choice.config(asked)
            built = build(attention(own), choice.schedule(own), allow=choice.allow)
            built.write(FOLDER / folder)
            print(f"{case.name:34} {folder:60} {built.resources.registers} registers", flush=True)
    (FOLDER / "cases.json").write_text(json.dumps(table, indent=1))


def kernel_table() -> dict[str, dict[str, Any]]:
    """What `build` wrote: a case's kernel folder, its variant and tile."""
    path = FOLDER / "cases.json"
    if not path.is_file():
        raise InputError(f"{path}: not there; run `python -m bench.attention_sitting build`")
    return json.loads(path.read_text())


class Listed:
    """Stands for a kernel in a dry run: takes what its program takes, and does nothing."""

    def __init__(self, built: Built) -> None:
        self.needed = {spec.name for spec in built.source.arrays}
        self.calls = 0

    def __call__(self, arrays: Mapping[str, Any], stream: int = 0) -> None:
        """Refuse other arrays than the program's."""
        if set(arrays) != self.needed:
            raise InputError(f"arrays {sorted(arrays)}, the kernel takes {sorted(self.needed)}")
        self.calls += 1


def own_call(
    torch: Any, kernel: Any, case: Case, rows: int, pick: Callable[[], dict[str, Any]], stream: Any
) -> Callable[[], None]:
    """A call of our kernel; with `tables`, the table of tasks is made inside of it."""
    arrays = case.config.arrays
    lengths = case.lengths

    def plain() -> None:
        v = pick()
        tables = {"tiles": v[f"tiles {rows}"]} if case.config.packed else {}
        kernel({x: v[x] for x in arrays} | tables, stream=stream())

    def with_table() -> None:
        v = pick()
        made = torch.from_numpy(task_table(lengths, lengths, rows))
        tiles = made.to(cases.DEVICE, non_blocking=True)
        kernel({x: v[x] for x in arrays} | {"tiles": tiles}, stream=stream())

    return with_table if case.tables else plain


def ordered_call(
    kernel: Any, case: Case, pick: Callable[[], dict[str, Any]], stream: Any
) -> Callable[[], None]:
    """A call of the kernel whose values lie in the order of quads."""

    def call() -> None:
        v = pick()
        kernel({x: v[x] for x in case.config.arrays} | {"v": v["ordered"]}, stream=stream())

    return call


def data_of(torch: Any, case: Case, block: int, dry: bool) -> list[dict[str, Any]]:
    """Two sets of operands, so that one call does not find its data in the cache."""
    config, lengths = case.config, case.lengths
    if isinstance(lengths, list):
        pairs = [(n, n) for n in ([100, 37] if dry else lengths)]
        heads = config.group if dry else case.heads
        return [cases.pack(torch, config, heads, pairs) for _ in range(2)]
    size = (1, config.group, 128, 128) if dry else (case.batch, case.heads, lengths, lengths)
    sets = [cases.operands(torch, config, *size, seed) for seed in range(2)]
    for v in sets:
        cases.reshape_scores(torch, case.kind, v, block)
    return sets


def work_of(case: Case) -> float:
    """Operations of a call."""
    lengths, config = case.lengths, case.config
    if isinstance(lengths, list):
        pairs = case.heads * sum(n * n for n in lengths)
        return 4 * pairs * 0.5 * config.head_dim
    pairs = case.batch * case.heads * lengths * lengths
    if config.window is not None:
        seen = min(config.window, lengths)
        pairs = pairs / lengths * (seen - seen * (seen - 1) / 2 / lengths)
    elif config.causal:
        pairs = pairs / 2
    return 2 * pairs * (config.head_dim + (config.value_dim or config.head_dim))


def sit(name: str, rounds: int, options: argparse.Namespace) -> dict[str, Any]:
    """One case of a sitting."""
    torch = kb.load_torch()
    gc.collect()
    if options.dry:
        cases.DEVICE = "cpu"
    else:
        torch.cuda.empty_cache()
    case, entry = Case(name), kernel_table()[name]
    config, (rows, block) = case.config, entry["tile"]
    data = data_of(torch, case, block, options.dry)
    turn = [0]

    def pick() -> dict[str, Any]:
        turn[0] ^= 1
        return data[turn[0]]

    def stream() -> int:
        return 0 if options.dry else torch.cuda.current_stream().cuda_stream

    folders = {"default": FOLDER / entry["folder"]}
    for _, folder in (one for one in options.front_door if one[0] == name):
        folders["front-door"] = folder
    built = {own: Built.read(folder) for own, folder in folders.items()}
    kernels = {own: Listed(one) if options.dry else one.kernel() for own, one in built.items()}
    ours = {own: own_call(torch, one, case, rows, pick, stream) for own, one in kernels.items()}
    if case.kind == "fp8":
        second = Built.read(FOLDER / kb.slug(ORDERED + entry["folder"]))
        kernel = Listed(second) if options.dry else second.kernel()
        ours["ordered"] = ordered_call(kernel, case, pick, stream)
    what = "packed" if config.packed else case.kind
    libraries, left_out = st.kept(baselines_of(torch, what, data, pick, config), options)
    if options.dry:
        cases.expected(torch, config, data[0])
        nothing = {library: (lambda: None) for library in libraries}
        bases, refused, checks = nothing, left_out, dict.fromkeys(ours, "pass")
    else:
        bases, refused = usable(torch, libraries)
        bases, wrong, checks = judged(torch, case, data, turn, bases, ours)
        refused |= wrong | left_out
    if options.prepare:
        return {"refused": refused, "checks": checks}
    candidates = {**bases, **ours}
    if options.dry:
        timer: st.Timer = st.Dry(candidates, eager=case.tables)
    else:
        timer = st.Gpu(torch, candidates, eager=case.tables)
    ran = [b for b in bases if b in timer.names]
    if not ran:
        raise InputError(f"{name}: no baseline ran: {refused | timer.refused}")
    timer.again(ran[0])
    alone = name in ALONE and not options.no_alone
    return {
        "shape": case.shape,
        "dtype": config.dtype.name,
        "default": entry["variant"],
        "compiler": built["default"].resources.compiler,
        "work": work_of(case),
        "baselines": ran,
        "refused": refused | timer.refused,
        "checks": checks,
        "same image": all(one.cubin == built["default"].cubin for one in built.values()),
        **st.measure(timer, rounds, alone, seed=options.seed),
    }


def judged(
    torch: Any,
    case: Case,
    data: list[dict[str, Any]],
    turn: list[int],
    bases: Mapping[str, Callable[[], Any]],
    ours: Mapping[str, Callable[[], None]],
) -> tuple[dict[str, Callable[[], Any]], dict[str, str], dict[str, str]]:
    """The baselines whose output is right, why the others are not, and what ours are worth."""
    config, kind = case.config, case.config.dtype.name
    part = data[0] if config.packed else base.first_heads(config, data[0])
    want, _ = cases.expected(torch, config, part)

    def error(out: Any) -> float:
        scale = 1.0
        if isinstance(out, Lifted):
            out, scale = out.values, out.factor
        found = out if config.packed else out[:1, : want.shape[1]]
        return float((found.float().double() / scale - want).norm() / want.norm())

    right: dict[str, Callable[[], Any]] = {}
    refused: dict[str, str] = {}
    for name, call in bases.items():
        turn[0] = 1
        off = error(call())
        if off < WRONG_THEIRS[kind]:
            right[name] = call
        else:
            refused[name] = f"wrong: relative error {off:.3g}"
    checks: dict[str, str] = {}
    for name, call in ours.items():
        turn[0] = 1
        data[0]["o"].fill_(math.nan)
        call()
        off = error(data[0]["o"])
        whole = not bool(torch.isnan(data[0]["o"]).any())
        checks[name] = "pass" if off < WRONG[kind] and whole else f"fail {off:.3g}"
    return right, refused, checks


def _prepare(args: argparse.Namespace, names: list[str]) -> int:
    """Libraries compile each kind of kernel once, several at a time; their own caches keep it."""
    kinds: dict[tuple[str, ...], str] = {}
    for name in names:
        kind, dim, mask = name.split()[:3]
        kinds.setdefault(("time" if kind in RESHAPED else kind, dim, mask), name)

    def one(item: tuple[int, str]) -> list[dict[str, Any]]:
        kept = f"prepare-{item[0]}.jsonl"
        case = functools.partial(sit, options=args)
        return kb.run_workers(case, args, [item[1]], kept, limit_s=300.0)  # eight compile at once

    with ThreadPoolExecutor(8) as pool:
        found = [r for part in pool.map(one, enumerate(kinds.values())) for r in part]
    for path in args.out.glob("prepare-*.jsonl"):
        path.unlink()
    for result in found:
        print(json.dumps({k: result.get(k) for k in ("name", "error", "refused", "checks")}))
    return 1 if any("error" in r for r in found) else 0


def merge(paths: list[Path], results: Path, names: list[str]) -> None:
    """The rows of these cases of sittings; those of shapes that were not timed stay."""
    shapes = {Case(name).shape for name in names}
    bursts, short = st.rows_of(paths, "attention-forward", st.seen_in_bursts)
    bursts = [row for row in bursts if row.shape in shapes]
    note = f"bursts of {1e3 * st.BURST:.0f} ms after {1e3 * st.REST:.0f} ms of rest"
    kb.put(results / "attention_forward.json", st.with_note(bursts, note))
    alone, less = st.rows_of(paths, "attention-alone", st.seen_alone)
    alone = [row for row in alone if row.shape in shapes]
    note = f"alone for {st.ALONE} s after {st.SETTLE} s"
    if alone:
        kb.put(results / "attention_alone.json", st.with_note(alone, note))
    print(f"{len(bursts)} rows of bursts, {len(alone)} alone, from {len(paths)} sittings")
    for line in dict.fromkeys(short + less):
        print(f"left out: {line}")


def variants(path: Path) -> list[Evidence]:
    """What one sitting saw of the 8-bit variants that its cases got, as `bench.attention` has it of
    a run."""
    header, found = st.read_sitting(path)
    rows: list[Evidence] = []
    for case in (one for one in found if one["name"].startswith("fp8")):
        seen = st.seen_in_bursts(case)
        bases = {name: seen.rates[name] for name in case["baselines"]}
        best = max(bases, key=lambda name: bases[name])
        middle, *interval = median_interval(seen.samples["default"], seen.samples[best])
        first = seen.samples[case["baselines"][0]]
        _, *control = median_interval(seen.samples[st.CONTROL], first)
        _, head, mask, _ = case["name"].split()
        variant = f"fp8 d{head}{' causal' * (mask == 'causal')} {case['default']}"
        rows.append(
            Evidence(
                "attention-forward",
                f"attention-forward {variant}",
                case["shape"],
                case["dtype"],
                header["device"],
                header["driver"],
                case["compiler"],
                header["date"],
                header["argv"],
                "TFLOP/s",
                "higher",
                seen.rates["default"],
                bases,
                middle,
                (interval[0], interval[1]),
                (control[0], control[1]),
                len(first),
                {"numerics": case["checks"]["default"]},
                f"torch {header['torch']}; {variant}; one sitting",
            )
        )
    return rows


def main() -> int:
    """Command line."""
    args = st.arguments(__doc__ or "", CASES, ("build", "prepare", "sit", "merge", "variants"))
    args.prepare = args.mode == "prepare"
    names = [name for name in CASES if any(o in name for o in args.only.split(","))]
    if args.mode == "build":
        build_all(names)
        return 0
    if args.mode == "merge":
        merge(args.files, RESULTS, names)
        return 0
    if args.mode == "variants":
        kb.put(RESULTS / "attention_variants.json", [r for p in args.files for r in variants(p)])
        return 0
    return _prepare(args, names) if args.prepare else st.sit(sit, args, names)


if __name__ == "__main__":
    sys.exit(main())
