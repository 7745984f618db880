"""Claim `attention-backward`: the gradients of attention, in sittings beside libraries.

    python -m bench.attention_backward build            here, no GPU: cubins, out/bench/backward
    python -m bench.attention_backward sit --dry        here: would every case run
    python -m bench.attention_backward sit --name one   on the GPU machine, three times at least
    python -m bench.attention_backward merge FILE...    sittings into bench/results

`bench/sitting.py` says what a sitting is. A call is all that a backward pass does, from o, lse and
dO to dq, dk and dv: ours are three kernels one after another. Deterministic cases are of sums that
have one order, beside libraries that promise the same. Operations: 10 * batch * heads * head_dim *
pairs of a query and a key it sees (half when causal); 14 for a step of training, which makes the
forward pass, too, beside pairs of one library.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench import attention_backward_packed as packed
from bench import attention_cases as cases
from bench import attention_step as step
from bench import kernel_bench as kb
from bench import sitting as st
from bench.attention_baselines import usable
from bench.evidence import Evidence
from warploom.autosched.schedules import compiled
from warploom.codegen.compile.build import Built
from warploom.errors import InputError
from warploom.kernels.attention.backward_config import (
    PLAIN,
    BackwardConfig,
    Style,
    fitted,
    packed_for,
)
from warploom.kernels.attention.gradients import kernel, parts
from warploom.kernels.attention.shares import lists_of_tasks

CLAIM = "attention-backward"
ORDER = ("q", "k", "v", "do")
FOLDER = kb.ROOT / "out" / "bench" / "backward"
TOKENS, WIDTH = 16384, 2048  # batch * rows and heads * head size
CHUNK = 4096  # rows of a head whose gradients are worked out in float64 at a time
WRONG = 0.01  # relative error of a gradient that fails
REPEATS = 10_000  # runs of the shortest cases, on part of their heads, whose bits are compared
PART = (1, 4)  # batch and heads of that
CUDNN, FA4 = "cuDNN", cases.FA4
MASKS = ("full", "causal")
CASES = (
    *(f"{d} {m} {n}" for d in (128, 64) for m in MASKS for n in cases.LENGTHS),
    *(f"{d} {m} {n}" for d in (96, 256) for m in MASKS for n in (1024, 4096, 16384)),
    *(f"{d} {m} {n} deterministic" for d in (128, 64) for m in MASKS for n in (1024, 4096, 16384)),
    *(f"128 {m} {n} grouped" for m in MASKS for n in (1024, 4096, 16384)),
    *(f"{d} causal {n} window" for d in (128, 64) for n in (4096, 16384)),
    *(f"{d} causal {lengths} packed" for d in (128, 64) for lengths in cases.PACKED),
    *(f"{d} {m} {n} step" for d in (128, 64) for m in MASKS for n in (1024, 4096, 16384)),
)
GROUP = 4  # query heads of a key head in the grouped cases
WINDOW = 1024  # keys that a row sees in the cases with a window
DEFAULT, SAME, STEP = "default", "deterministic", "with forward"
# How the loop may be written, by padded head size: every one is timed, and has a row where it is
# what users get.
STYLES = {
    64: (
        Style(turns=True, behind=True),
        Style(turns=True, behind=True, wide=True),
    ),
    96: (PLAIN, Style(turns=True, behind=True, kept=True)),
    128: (
        Style(taken=True),
        Style(turns=True, behind=True, held=True),
        Style(turns=True, behind=True, first=True),
        Style(turns=True, behind=True, held=True, first=True),
    ),
}
Call = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """A head size, a mask, a length or the name of lengths of packed sequences, and what else is
    special about it."""

    name: str

    @property
    def config(self) -> BackwardConfig:
        """The kernels' configuration."""
        depth, mask, _, *kind = self.name.split()
        return BackwardConfig(
            head_dim=int(depth),
            causal=mask == "causal",
            group=GROUP if "grouped" in kind else 1,
            packed="packed" in kind,
            window=WINDOW if "window" in kind else None,
            deterministic=SAME in kind,
        )

    @property
    def step(self) -> bool:
        """Whether a call makes the forward pass, too."""
        return self.name.endswith(" step")

    @property
    def lengths(self) -> list[int]:
        """The lengths of its sequences."""
        word = self.name.split()[2]
        return cases.PACKED[word] if self.config.packed else [int(word)] * self.shape[0]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Batch, heads, rows and head size; packed sequences are one."""
        depth, _, rows, *_ = self.name.split()
        heads = WIDTH // int(depth)
        if self.config.packed:
            return 1, heads, sum(cases.PACKED[rows]), int(depth)
        return max(1, TOKENS // int(rows)), heads, int(rows), int(depth)

    @property
    def work(self) -> float:
        """Operations of a call."""
        _, heads, _, depth = self.shape
        pairs = sum(n * n for n in self.lengths) * (0.5 if self.config.causal else 1.0)
        if window := self.config.window:
            pairs = sum(n * window - window * window / 2 for n in self.lengths)
        return (14.0 if self.step else 10.0) * heads * depth * pairs


def folder(config: BackwardConfig, part: str) -> Path:
    """Where a kernel's cubin is."""
    mask = "causal" if config.causal else "full"
    band = 0 if config.listed else config.band  # kernels of listed tasks are the same for all
    kind = f"{config.deterministic} {config.listed} {band} {config.packed}"
    style = "".join(str(int(x)) for x in config.written)  # tiles and layouts of all parts follow it
    name = f"d{config.head_dim} {mask} {config.group} {config.window} {kind} {style} {part}"
    return FOLDER / kb.slug(name)


def own_config(case: Case, style: Style | None = None) -> BackwardConfig:
    """The configuration of the kernels that a user gets, or of those in another style."""
    config, (_, heads, rows, _) = replace(case.config, style=style), case.shape
    if config.packed:
        return packed_for(config, rows, heads // config.group, config.sms, max(case.lengths))
    batch = case.shape[0]
    return fitted(config, rows, rows, batch * heads // config.group)


def configs(case: Case) -> dict[str, BackwardConfig]:
    """Our candidates."""
    own = own_config(case)
    if own.long:
        return {DEFAULT: own}
    # What a user gets replaces the one of its style: its sums may have one order unasked.
    found = {named(style): own_config(case, style) for style in STYLES[own.depth]}
    return found | {named(own.written): own}


def named(style: Style) -> str:
    """What a style is called."""
    return " ".join(name for name, on in style._asdict().items() if on) or "plain"


def default(case: Case) -> str:
    """The candidate that a user gets."""
    written = own_config(case).written
    return next(name for name, config in configs(case).items() if config.written == written)


def build_all() -> None:
    """Compile what the cases need."""
    needed = {
        folder(config, part): (config, part)
        for case in map(Case, CASES)
        for config in configs(case).values()
        for part in parts(config)
    }
    for into, (config, part) in needed.items():
        program, policy, allow = kernel(config, part)
        compiled(program, policy, allow=allow).write(into)
        print(into.name, flush=True)
    for case in map(Case, CASES):
        if case.config.packed:
            packed.build_lists(FOLDER, own_config(case), len(case.lengths))
        if case.step:
            batch, heads, rows, _ = case.shape
            step.forward(case.config, rows, batch * heads).write(FOLDER / kb.slug(case.name))
            print(kb.slug(case.name), flush=True)


def own_call(
    torch: Any, config: BackwardConfig, data: Mapping[str, Any], case: Case | None = None
) -> Call:
    """All kernels of one backward pass on one set of operands; of a `case` that makes the forward
    pass, this too."""
    if case is not None and case.step:
        given = step.results(torch, data)
        built = Built.read(FOLDER / kb.slug(case.name))
        return step.own_call(torch, built, given, own_call(torch, config, given))
    built = {part: Built.read(folder(config, part)) for part in parts(config)}
    loaded = {part: one.kernel() for part, one in built.items()}
    if config.packed:
        return packed.own_call(torch, FOLDER, config, data, loaded)
    rows, device = data["lse"].shape[-1], data["q"].device
    vectors = torch.empty((2, *config.vectors_shape(data["lse"].shape)), device=device)
    if not config.sums:
        vectors = vectors[..., :rows]
    arrays = {**data, "base": vectors[0], "delta": vectors[1]}
    if config.sums:
        room = config.sums_shape(data["lse"].shape)
        arrays["dq_sum"] = torch.empty(room, dtype=torch.float32, device=device)
    if config.deterministic and config.sums:
        turns = config.turns_shape(data["lse"].shape)
        arrays["turns"] = torch.empty(turns, dtype=torch.int32, device=device)
    if config.listed:
        tables = lists_of_tasks(config, *data["k"].shape[:2], rows, data["k"].shape[2])
        arrays |= {name: torch.from_numpy(table).to(device) for name, table in tables.items()}
    if config.cut:
        batch, heads, keys = data["k"].shape[:3]
        arrays["piece_sums"] = torch.empty(config.pieces_shape(batch * heads, keys), device=device)
    arrays |= {f"d{name}": torch.full_like(data[name], math.nan) for name in "qkv"}
    given = {
        part: {spec.name: arrays[spec.name] for spec in one.source.arrays}
        for part, one in built.items()
    }

    def call() -> Any:
        stream = torch.cuda.current_stream().cuda_stream
        if config.cut:
            arrays["piece_sums"].zero_()
        for part, one in loaded.items():
            one(given[part], stream=stream)
        return tuple(arrays[f"d{name}"] for name in "qkv")

    return call


def library_calls(torch: Any, case: Case, data: Mapping[str, Any]) -> dict[str, Call]:
    """cuDNN through torch, and FlashAttention-4, on the same output and lse. Torch gives cuDNN as
    many key heads as query heads, no window and no order of sums: such cases are without it."""
    config = case.config
    if case.step:
        pair = step.flash_attention(config, data)
        return {FA4: pair, CUDNN: step.cudnn(torch, config, data)}
    q, k, v, do = (data[name] for name in ORDER)
    if config.packed:
        return {FA4: packed.flash_attention(config, data)}
    if config.group > 1 or config.window or config.deterministic:
        return {FA4: _flash_attention(config, data)}
    forward = torch.ops.aten._scaled_dot_product_cudnn_attention
    back = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    out, lse, cum_q, cum_k, most_q, most_k, seed, offset, _ = forward(
        q, k, v, None, True, 0.0, config.causal, False
    )

    def cudnn() -> Any:
        return back(
            do, q, k, v, out, lse, seed, offset, None, cum_q, cum_k, most_q, most_k, 0.0,
            config.causal,
        )  # fmt: skip

    return {FA4: _flash_attention(config, data), CUDNN: cudnn}


def _flash_attention(config: BackwardConfig, data: Mapping[str, Any]) -> Call:
    names = ("q", "k", "v", "o", "do")
    swapped = [data[name].transpose(1, 2).contiguous() for name in names]

    def four() -> Any:
        function = importlib.import_module("flash_attn.cute.interface")._flash_attn_bwd
        options = {"causal": config.causal, "deterministic": config.deterministic}
        if config.window:
            options |= {"causal": False, "window_size_left": config.window - 1}
            options |= {"window_size_right": 0}
        found = function(*swapped, data["lse"], config.factor, **options)
        return tuple(x.transpose(1, 2) for x in found[:3])

    return four


def operands(torch: Any, case: Case, dry: bool) -> dict[str, Any]:
    """Random q, k, v and dO, with o and lse as the forward pass gives them."""
    batch, heads, rows, depth = (1, 1, 64, case.shape[3]) if dry else case.shape
    torch.manual_seed(0)
    device = "cpu" if dry else "cuda"
    shape, group = (batch, heads, rows, depth), 1 if dry else case.config.group
    own = (batch, heads // group, rows, depth)
    shapes = {"q": shape, "k": own, "v": own, "do": shape}
    data = {x: torch.randn(of, device=device).bfloat16() for x, of in shapes.items()}
    if case.config.packed and not dry:
        return packed.operands(torch, data, case.lengths)
    if dry:
        lse = torch.zeros(shape[:3])
        return {**data, "o": torch.zeros_like(data["q"]), "lse": lse}
    if case.config.window:
        return data | _windowed(torch, case.config, data)
    wide = [data[name].repeat_interleave(group, 1) for name in ("k", "v")]
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        data["q"], *wide, None, True, 0.0, case.config.causal, False
    )
    return {**data, "o": out, "lse": lse.reshape(shape[:3]).float().contiguous()}


def _windowed(torch: Any, config: BackwardConfig, data: Mapping[str, Any]) -> dict[str, Any]:
    """o and lse of rows that see a window, in fp32, as many rows at a time as it has keys."""
    (q, k, v), width = (data[x].float() for x in "qkv"), config.window or 1
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3], device=q.device)
    for first in range(0, q.shape[2], width):
        low, high = max(0, first - width), first + width
        scores = config.factor * q[:, :, first:high] @ k[:, :, low:high].mT
        hidden = _hidden(torch, config, scores.shape[-2:], first - low, q.device)
        scores = scores.masked_fill(hidden, -math.inf)
        lse[:, :, first:high] = torch.logsumexp(scores, -1)
        out[:, :, first:high] = torch.softmax(scores, -1) @ v[:, :, low:high]
    return {"o": out.to(data["q"].dtype), "lse": lse}


def _hidden(
    torch: Any, config: BackwardConfig, shape: tuple[int, int], first: int, device: Any
) -> Any:
    """Which keys rows do not see, the first of which is at position `first`."""
    everything = torch.ones(shape, dtype=torch.bool, device=device)
    hidden = everything.triu(first + 1)
    return hidden | everything.tril(first - config.window) if config.window else hidden


def expected(torch: Any, config: BackwardConfig, data: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """dq, dk and dv of the first key head of the first sequence in float64; of a group, all its
    query heads. Some rows at a time: float64 scores of 16384 by 16384 are 2 GB."""
    q, k, v, do = (data[x][:1, : config.group if x in ("q", "do") else 1].double() for x in ORDER)
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for first in range(0, q.shape[2], CHUNK):
        rows = slice(first, first + CHUNK)
        scores = config.factor * q[:, :, rows] @ k.transpose(-1, -2)
        if config.causal:
            hidden = _hidden(torch, config, scores.shape[-2:], first, q.device)
            scores = scores.masked_fill(hidden, -math.inf)
        weights = torch.softmax(scores, -1)
        delta = (do[:, :, rows] * (weights @ v)).sum(-1, keepdim=True)
        change = weights * (do[:, :, rows] @ v.transpose(-1, -2) - delta)
        dq[:, :, rows] = change @ k
        dk += (change.transpose(-1, -2) @ q[:, :, rows]).sum(1, keepdim=True)
        dv += (weights.transpose(-1, -2) @ do[:, :, rows]).sum(1, keepdim=True)
    return config.factor * dq, config.factor * dk, dv


def errors(found: tuple[Any, ...], want: tuple[Any, ...]) -> list[float]:
    """Relative errors of the gradients."""
    pairs = zip(found, want, strict=True)
    return [float((a[:1, : b.shape[1]].double() - b).norm() / b.norm()) for a, b in pairs]


def equal_runs(torch: Any, config: BackwardConfig, data: Mapping[str, Any]) -> int:
    """How many of `REPEATS` runs, with none before that differs, give the first run's bits."""
    part = {
        n: x[: PART[0], : PART[1] // (config.group if n in "kv" else 1)] for n, x in data.items()
    }
    call = own_call(torch, config, {n: x.clone() for n, x in part.items()})
    first = [x.clone() for x in call()]
    same = torch.ones((), dtype=torch.bool, device=first[0].device)
    equal = torch.zeros((), dtype=torch.int64, device=first[0].device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for x, y in zip(call(), first, strict=True):
            same &= (x.view(torch.int16) == y.view(torch.int16)).all()
        equal += same
    for _ in range(REPEATS):
        graph.replay()
    return int(equal)


def sit(name: str, rounds: int, options: argparse.Namespace) -> dict[str, Any]:
    """One case of a sitting."""
    torch = kb.load_torch()
    gc.collect()
    case = Case(name)
    data = operands(torch, case, options.dry)
    part = packed.first_sequence(data) if case.config.packed and not options.dry else data
    want = expected(torch, case.config, part)
    candidates = configs(case)
    own = candidates[default(case)]
    built = Built.read(folder(own, parts(own)[1]))
    refused: dict[str, str] = {}
    runs = 0
    off: dict[str, list[float]] = {}
    if options.dry:
        ours: dict[str, Call] = dict.fromkeys(candidates, lambda: None)
        bases: dict[str, Call] = {n: (lambda: None) for n in (FA4, CUDNN)}
        checks = dict.fromkeys(ours, "pass")
        timer: st.Timer = st.Dry({**bases, **ours})
    else:
        ours = {name: own_call(torch, one, data, case) for name, one in candidates.items()}
        bases, refused = usable(torch, library_calls(torch, case, data))
        off = {n: errors(call(), want) for n, call in {**bases, **ours}.items()}
        bases = {n: call for n, call in bases.items() if max(off[n]) < WRONG}
        checks = {n: "pass" if max(off[n]) < WRONG else f"fail {off[n]}" for n in ours}
        if case.config.deterministic and case.shape[2] == min(cases.LENGTHS):
            runs = equal_runs(torch, own, data)
            checks |= {DEFAULT: f"fail: run {runs} differs"} if runs < REPEATS else {}
        timer = st.Gpu(torch, {**bases, **ours})
    ran = [b for b in bases if b in timer.names]
    if not ran:
        raise InputError(f"{name}: no baseline ran: {refused | timer.refused}")
    timer.again(ran[0])
    return {
        "shape": case.name,
        "dtype": case.config.dtype.name,
        "candidate": default(case),
        "default": "a pass each" if case.config.long else "{}x{}".format(*own.tile),
        "compiler": built.resources.compiler,
        "work": case.work,
        "baselines": ran,
        "refused": refused | timer.refused,
        "checks": checks,
        "errors": off,
        "equal runs": runs,
        "same image": False,
        **st.measure(timer, rounds, False, seed=options.seed),
    }


def with_errors(row: Evidence, case: Mapping[str, Any]) -> Evidence:
    """A row with relative errors of dq, dk and dv beside the libraries', and how many runs gave
    the same bits where that was counted; its kernel is called what it is to a user."""
    name = row.kernel.removeprefix(f"{CLAIM} ")
    named = {"ours": name, **{b: b for b in case["baselines"]}}
    found = {key: [round(x, 6) for x in case["errors"][n]] for key, n in named.items()}
    runs = {"equal runs": case["equal runs"]} if case["equal runs"] else {}
    kind = SAME if SAME in case["name"] else STEP if Case(case["name"]).step else DEFAULT
    checks = {**row.checks, "errors of dq, dk, dv": found, **runs}
    notes = row.notes if name == DEFAULT else f"{row.notes}; {name}"
    return replace(row, kernel=f"{CLAIM} {kind}", checks=checks, notes=notes)


def merge(paths: list[Path], results: Path) -> None:
    """The rows of sittings, in place of those of their shapes; what is no default has none."""
    rows, short = st.rows_of(paths, CLAIM, st.seen_in_bursts)
    seen = {case["name"]: case for path in paths for case in st.read_sitting(path)[1]}
    # Sittings of one candidate alone, as earlier ones of some cases were, call it the default.
    rows = [
        row
        for row in rows
        if row.kernel.removeprefix(f"{CLAIM} ") in (DEFAULT, default(Case(row.shape)))
    ]
    note = f"bursts of {1e3 * st.BURST:.0f} ms after {1e3 * st.REST:.0f} ms of rest"
    rows = st.with_note([with_errors(row, seen[row.shape]) for row in rows], note)
    print(f"{len(rows)} rows from {len(paths)} sittings")
    kb.put(results / "attention_backward.json", rows)
    for line in short:
        print(f"left out: {line}")


def main() -> int:
    """Command line."""
    args = st.arguments(__doc__ or "", CASES, ("build", "sit", "merge"))
    asked = args.only.split(",")
    exact = set(asked) <= set(CASES)  # a name may be part of another
    names = [n for n in CASES if (n in asked if exact else any(one in n for one in asked))]
    if args.mode == "build":
        build_all()
        return 0
    if args.mode == "merge":
        merge(args.files, kb.ROOT / "bench" / "results")
        return 0
    return st.sit(sit, args, names)


if __name__ == "__main__":
    sys.exit(main())
