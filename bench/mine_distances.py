"""The distances `sass` takes from compiler output: build the kernels, count, cross-validate.

    python -m bench.mine_distances build FOLDER            # the kernels to read, compiled
    python -m bench.mine_distances mine  FOLDER... --sm 90 --out TABLE.json [--with OLD.json]
    python -m bench.mine_distances check FOLDER... --sm 90 [--unseen FOLDER] [--before OLD.json]

`build` compiles what warploom generates: every GEMM and attention variant of the benchmarks, the
launches of the GPU tests, the library under every named schedule and solved, for sm_90a and sm_80.
`mine` reads cubins of one architecture (add build/corpus for other compilers' kernels). `check`
leaves out one family of kernels after another, and one part in five, mines the rest, and counts
how often its minima convict what was left out (which a compiler made: every conviction is false),
and how many planted faults they find there: every dependent pair put one cycle closer than any
pair of its kind was ever seen, and every such pair put a single cycle apart.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.mined_distances import Mined, find_minima
from warploom.autosched.schedules import NAMES, Policy, schedule_for
from warploom.codegen.compile.build import Built, build
from warploom.codegen.ir.plan import LaunchPlan
from warploom.errors import WarploomError
from warploom.files import write_bytes_atomically, write_text_atomically
from warploom.kernels.library import configure, entry
from warploom.sass.decode.cubin import load
from warploom.sass.decode.kernel import decode_all
from warploom.sass.flow.latency import LONGEST, table_for
from warploom.sass.flow.minima import least, minimum_keys

PARTS = 5
LIBRARY: dict[str, tuple[dict[str, str], ...]] = {
    "gemm": ({}, {"dtype": "fp16", "out": "fp16"}, {"a": "km", "b": "nk"}, {"bias": "true"}),
    "attention": ({}, {"head_dim": "64"}, {"causal": "true"}, {"head_dim": "256", "lse": "true"}),
}


# --- the kernels ------------------------------------------------------------------------------


def jobs() -> Iterator[tuple[str, Callable[[], Built]]]:
    """(name, how to build it) of every kernel."""
    # What they import is needed to build and by nothing else here.
    from tests.gpu.cases import CASES, OPERATORS  # noqa: PLC0415

    from bench.attention_cases import VARIANTS as ATTENTION  # noqa: PLC0415
    from bench.gemm_cases import VARIANTS as GEMM  # noqa: PLC0415
    from warploom.kernels.attention.program import attention  # noqa: PLC0415

    for name, (config, schedule, program) in GEMM.items():
        yield f"gemm-{name}", lambda c=config, s=schedule, p=program: build(p(c), s(c))
    for name, (config, schedule, allow) in ATTENTION.items():
        yield (
            f"attention-{name}",
            lambda c=config, s=schedule, a=allow: build(attention(c), s(c), allow=a),
        )
    for name, case in {**CASES, **OPERATORS}.items():
        yield f"other-case-{name}", lambda make=case: make().built()
    for name, settings in LIBRARY.items():
        for number, each in enumerate(settings):
            for schedule in NAMES:
                for arch in ("sm_90a", "sm_80"):
                    yield (
                        f"{name}-{schedule}-{number}-{arch}",
                        lambda n=name, e=each, s=schedule, a=arch: _named(n, e, s, a),
                    )


def _named(name: str, settings: dict[str, str], schedule: str, arch: str) -> Built:
    tile = {"gemm": "128,128,32", "attention": "128,64"}[name] if arch == "sm_80" else None
    given = settings if tile is None else {"tile": tile, **settings}
    config, _ = configure(name, given)
    found = entry(name)
    program = found.program(config)
    launch = found.policy(config).launch if arch == "sm_90a" else LaunchPlan()
    made = schedule_for(program, Policy(schedule, launch), arch=arch)
    return build(program, made, arch, allow=("spills", "stack", "serialized"))


def build_all(folder: Path) -> None:
    """Compile every kernel into a folder, each once; what does not compile is told."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in jobs():
        path = folder / f"{name.replace(' ', '_').replace('/', '_')}.cubin"
        if path.exists():
            continue
        try:
            write_bytes_atomically(path, make().cubin)
            print(path.name, flush=True)
        except WarploomError as error:
            print(f"{name}: not built: {str(error)[:100]}", flush=True)


# --- counting ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Read:
    """One kernel: what was counted in it, and the family it belongs to."""

    family: str
    compiler: str
    mined: Mined


def read(folders: Sequence[str], sm: int) -> list[Read]:
    """Every different kernel of an architecture in some folders."""
    found: list[Read] = []
    known: set[str] = set()
    for path in sorted(path for folder in folders for path in Path(folder).rglob("*.cubin")):
        cubin = load(path)
        if cubin.sm != sm or cubin.digest in known:
            continue
        known.add(cubin.digest)
        for name, kernel in decode_all(cubin).items():
            mined = Mined()
            mined.add(kernel)
            start = path.name.split("-")[0].split("_")[0]
            family = start if start in ("triton", "cuda", "prebuilt") else f"own {name}"
            found.append(Read(family, cubin.compiler, mined))
    return found


def together(rows: Sequence[Read]) -> Mined:
    """Several kernels counted as one."""
    whole = Mined()
    for row in rows:
        whole.take(row.mined)
    return whole


def mine(arguments: argparse.Namespace) -> None:
    """Write a table."""
    rows = read(arguments.folders, arguments.sm)
    old = json.loads(Path(arguments.old).read_text()) if arguments.old else None
    whole = together(rows)
    families = Counter(row.family.split()[0] for row in rows)
    kinds = ", ".join(f"{count} {name}" for name, count in sorted(families.items()))
    said = (
        f"{whole.read} kernels ({kinds}), {whole.instructions} instructions, compiled by "
        f"{', '.join(sorted({row.compiler for row in rows}))} at -O3"
    )
    before = (old.get("sources") or [old["provenance"].partition("over ")[2]]) if old else []
    table = whole.table([*before, said], old)
    write_text_atomically(Path(arguments.out), json.dumps(table, indent=0) + "\n")
    print(said)
    print({name: len(table[name]) for name in ("gaps", "stalls", "spacings", "minima")})


# --- cross-validation -------------------------------------------------------------------------


def raw(mined: Mined) -> Iterator[tuple[str, int, int]]:
    """(key, distance, pairs) of reads after writes."""
    for key, seen in mined.gaps.items():
        if minimum_keys(key):
            yield from ((key, gap, count) for gap, count in seen.items())


def judged(
    tested: Sequence[Read], need: Callable[[str], int], closest: dict[str, int]
) -> dict[str, float]:
    """Convictions of compiler output, and the share of planted faults found."""
    pairs = faults = tight = gross = convicted = 0
    kernels: set[int] = set()
    keys: set[str] = set()
    for number, row in enumerate(tested):
        for key, gap, count in raw(row.mined):
            pairs += count
            if gap < need(key):
                convicted += count
                kernels.add(number)
                keys.add(key)
            if closest[key] > 1:
                faults += count
                tight += count * (closest[key] - 1 < need(key))
                gross += count * (need(key) > 1)
    return {
        "kernels": len(tested),
        "pairs": pairs,
        "convicted": convicted,
        "kernels convicted": len(kernels),
        "keys": len(keys),
        "found, one cycle too close": tight / max(1, faults),
        "found, one cycle apart": gross / max(1, faults),
    }


def before(path: Path | None) -> Callable[[str], int]:
    """The rule there was before there were minima: the least distance of an arithmetic unit's
    results, over all consumers, of an older table."""
    if path is None:
        return lambda _: 0
    lowest: dict[str, int] = {}
    for key, gap in json.loads(path.read_text())["gaps"].items():
        producer, arrow, _ = key.partition(" > ")
        if arrow:
            lowest[producer] = min(gap, lowest.get(producer, LONGEST))
    units = ("alu.", "imad.", "fma.", "F2FP.", "IMAD.", "CS2R.", "P2R.", "VOTE.", "R2P.")
    return lambda key: lowest.get(key.partition(" > ")[0], 0) if key.startswith(units) else 0


def check(arguments: argparse.Namespace) -> None:
    """Print a row for every part that is left out."""
    rows = read(arguments.folders, arguments.sm)
    families = sorted({row.family for row in rows})
    splits = [(f"all but {name}", lambda row, n=name: row.family == n) for name in families]
    order = list(range(len(rows)))
    random.Random(1).shuffle(order)
    part_of = {id(rows[index]): place % PARTS for place, index in enumerate(order)}
    splits += [(f"part {part}", lambda row, p=part: part_of[id(row)] == p) for part in range(PARTS)]
    unseen = read([arguments.unseen], arguments.sm) if arguments.unseen else []
    closest = {
        key: min(seen) for key, seen in together([*rows, *unseen]).gaps.items() if minimum_keys(key)
    }
    older = before(Path(arguments.before) if arguments.before else None)
    report: list[dict[str, Any]] = []

    def say(name: str, tested: Sequence[Read], need: Callable[[str], int]) -> None:
        report.append({"minima from": name, **judged(tested, need, closest)})
        print(json.dumps(report[-1]), flush=True)

    for name, out in splits:
        tested = [row for row in rows if out(row)]
        minima = find_minima(together([row for row in rows if not out(row)]).gaps, {}, {})
        say(name, tested, lambda key, w=minima: least(w, key))
    if arguments.before:
        say("the older rule", [*rows, *unseen], older)
    shipped = table_for(arguments.sm).minima
    say("the shipped table", unseen or rows, lambda key: least(shipped, key))
    if arguments.json:
        write_text_atomically(Path(arguments.json), json.dumps(report, indent=1) + "\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    made = commands.add_parser("build")
    made.add_argument("folder", type=Path)
    for name in ("mine", "check"):
        command = commands.add_parser(name)
        command.add_argument("folders", nargs="+")
        command.add_argument("--sm", type=int, required=True)
        if name == "mine":
            command.add_argument("--out", required=True)
            command.add_argument("--with", dest="old")
        else:
            command.add_argument("--unseen")
            command.add_argument("--before")
            command.add_argument("--json")
    arguments = parser.parse_args()
    if arguments.command == "build":
        build_all(arguments.folder)
    elif arguments.command == "mine":
        mine(arguments)
    else:
        check(arguments)


if __name__ == "__main__":
    main()
