"""Write the tables of docs/architecture.md: the house measured at two revisions, from its files.

    python -m bench.architecture                   60bc3d4 beside the working tree
    python -m bench.architecture BEFORE [AFTER]    two revisions of git

A room is a folder of `src/warploom`, or a module that stands beside the folders. Only Python is
counted. An import counts wherever it stands, in a function too. A concept lives in every module
that has a statement of its rule (`CONCEPTS`).
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tarfile
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from warploom.errors import InputError
from warploom.files import write_text_atomically

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
PACKAGE = "warploom"
BEFORE = "60bc3d4"  # before folders showed the architecture
MARKER = re.compile(r"(<!-- architecture: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
# Not the compiler and tuner proper: derivation, the learned players and the emulated GPU.
BESIDE = ("derive", "diagram", "rl", "search/rl", "emulate")
LONG_LINES, MANY_PARAMETERS = 60, 8
# Functions that take what another library's function of that kind takes, under its names.
MIRRORED = frozenset(
    (
        *("attention", "scaled_dot_product_attention", "scaled_mm"),  # torch
        *("attention_varlen", "attention_with_kvcache", "append_kvcache"),  # flash_attn
        *("flash_attn_func", "flash_attn_varlen_func"),  # flash_attn
        *("flash_attn_qkvpacked_func", "flash_attn_varlen_qkvpacked_func"),  # flash_attn
        *("attention_fp8", "attention_mixed"),  # flash_attn
        "attention_mla",  # FlashMLA
        *("scaled_grouped_mm", "masked_grouped_mm"),  # torch, DeepGEMM
        *("simple_gla", "gated_delta_rule", "kimi_delta_attention"),  # flash-linear-attention
        *("mamba_chunk_scan_combined", "selective_state_update"),  # mamba_ssm
        *("__init__", "forward"),  # vLLM's back ends
        "capture",  # a launch of Triton
    )
)
# How the names of modules end that a user starts or imports: nothing inside has to import them.
ENTRY_POINTS = (
    ".__main__",  # python -m warploom
    ".flows.pack",  # python -m warploom.flows.pack
    ".integrations.flash_linear_attention",
    ".integrations.torch_attention_fp8",
    ".integrations.torch_attention_packed",
    ".integrations.torch_cache",
    ".integrations.torch_decode",
    ".integrations.torch_experts",
    ".integrations.torch_gemm",
    ".integrations.torch_hedgehog",
    ".integrations.torch_loss",
    ".integrations.torch_mixed",
    ".integrations.torch_mla",
    ".integrations.torch_op",
    ".integrations.torch_convolution",
    ".integrations.torch_recurrent",
    ".integrations.torch_recurrent_step",
    ".integrations.torch_rows",
    ".integrations.torch_signatures",
    ".integrations.torch_weight_only",
    ".integrations.triton",
    ".integrations.vllm",  # vLLM, by the entry point
    ".integrations.vllm_backend",  # by its name
    ".balance",  # what several levels of memory ask for, for the gallery of derivations
    ".simulate",  # the oracle of block programs, for a kernel's author and the tests
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class House:
    """The modules of one revision, by dotted name, and the layers of its import contract."""

    sources: Mapping[str, str]
    layers: tuple[tuple[str, ...], ...] = ()
    packages: frozenset[str] = frozenset()

    @cached_property
    def trees(self) -> dict[str, ast.Module]:
        """Every module parsed."""
        return {name: ast.parse(text) for name, text in self.sources.items()}

    @cached_property
    def statements(self) -> dict[str, list[str]]:
        """The statements at the top of every module, without docstrings and comments."""
        return {
            name: [_code(one) for one in ast.parse(text).body]
            for name, text in self.sources.items()
        }

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """What every module imports of the package, itself left out."""
        return {
            name: {self._module(target) for target in _names_imported(tree)} - {"", name}
            for name, tree in self.trees.items()
        }

    def _module(self, name: str) -> str:
        """The module that a dotted name is or lies in; "" for a name of another package."""
        while name and name not in self.sources:
            name = name.rpartition(".")[0]
        return name

    def room(self, module: str) -> str:
        """The folder of a module, from the package on; of one beside the folders, its name."""
        parts = module.split(".")[1:]
        if module not in self.packages and len(parts) > 1:
            parts = parts[:-1]
        return "/".join(parts)

    def lines(self, room: str) -> int:
        """Lines of Python in a room and its sub-rooms."""
        return sum(self.sources[name].count("\n") for name in self.within(room))

    def within(self, room: str) -> list[str]:
        """The modules of a room and its sub-rooms."""
        return [
            m for m in self.sources if f"{self.room(m)}/".startswith(f"{room}/" if room else "")
        ]

    @cached_property
    def rooms(self) -> list[str]:
        """All rooms and sub-rooms that are folders."""
        found = {self.room(module) for module in self.packages} - {""}
        return sorted(found)

    def circles(self, room_of: Callable[[str], str]) -> list[set[str]]:
        """Sets of rooms of which each imports, through the others, all; what the package itself
        offers is loaded when first used, so that it is no way from one room to another."""
        edges: dict[str, set[str]] = defaultdict(set)
        for module, targets in self.imports.items():
            if module != PACKAGE:
                edges[room_of(module)] |= {room_of(target) for target in targets}
        reach = {room: _reached(room, edges) for room in list(edges)}
        found: list[set[str]] = []
        for room in sorted(reach):
            circle = {other for other in reach[room] if room in reach.get(other, set())} - {""}
            if room and len(circle) > 1 and circle not in found:
                found.append(circle)
        return found

    def upward(self) -> list[str]:
        """Imports of a module of an upper layer by one of a lower."""
        level = {room: at for at, layer in enumerate(self.layers) for room in layer}

        def floor(module: str) -> int | None:
            return level.get(".".join(module.split(".")[:2]))

        return sorted(
            f"{module} -> {target}"
            for module, targets in self.imports.items()
            for target in targets
            if (here := floor(module)) is not None
            and (there := floor(target)) is not None
            and there < here
        )

    def without_importer(self) -> list[str]:
        """Modules that no other imports; packages, commands and `ENTRY_POINTS` are left out."""
        wanted = set().union(*self.imports.values())
        for tree in self.trees.values():  # imported by name: `import_module("warploom.x")`
            wanted |= {
                node.value
                for node in ast.walk(tree)
                if isinstance(node, ast.Constant) and isinstance(node.value, str)
            }
        alone = set(self.sources) - wanted - self.packages
        commands = f"{PACKAGE}.cli."
        return sorted(
            x for x in alone if not x.startswith(commands) and not x.endswith(ENTRY_POINTS)
        )

    def named_functions(self) -> Iterator[tuple[str, Function]]:
        """Every function and method with the module that it stands in."""
        for name, tree in self.trees.items():
            yield from ((name, node) for node in ast.walk(tree) if isinstance(node, Function))

    def functions(self) -> Iterator[Function]:
        """Every function and method."""
        return (function for _, function in self.named_functions())

    def dataclasses(self) -> int:
        """How many classes are dataclasses."""
        return sum(
            isinstance(node, ast.ClassDef)
            and any("dataclass" in ast.unparse(item) for item in node.decorator_list)
            for tree in self.trees.values()
            for node in ast.walk(tree)
        )


def _names_imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (item.name for item in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{item.name}" for item in node.names)


def _reached(start: str, edges: Mapping[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    left = [start]
    while left:
        for room in edges.get(left.pop(), set()) - seen:
            seen.add(room)
            left.append(room)
    return seen


def _parameters(function: Function) -> int:
    given = function.args
    names = [item.arg for item in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def house_of(files: Iterable[tuple[str, str]]) -> House:
    """The house of files given as (path from the root of the repository, text)."""
    sources: dict[str, str] = {}
    packages: set[str] = set()
    layers: tuple[tuple[str, ...], ...] = ()
    for path, text in files:
        if path == "pyproject.toml":
            contracts = tomllib.loads(text)["tool"]["importlinter"]["contracts"]
            (lines,) = (one["layers"] for one in contracts if "layers" in one)
            layers = tuple(tuple(re.findall(r"[\w.]+", line)) for line in lines)
            continue
        parts = Path(path).with_suffix("").parts[1:]
        if parts[-1] == "__init__":
            packages.add(".".join(parts[:-1]))
        sources[".".join(parts if parts[-1] != "__init__" else parts[:-1])] = text
    return House(sources, layers, frozenset(packages))


def working_tree() -> House:
    """The house as its files are now."""
    paths = [ROOT / "pyproject.toml", *sorted((ROOT / "src" / PACKAGE).rglob("*.py"))]
    return house_of((path.relative_to(ROOT).as_posix(), path.read_text()) for path in paths)


def revision(name: str) -> House:
    """The house at a revision of git."""
    done = subprocess.run(
        ["git", "archive", name, f"src/{PACKAGE}", "pyproject.toml"],
        cwd=ROOT, capture_output=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise InputError(f"revision {name!r}: {done.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        members = [
            m for m in archive if m.name.endswith((".py", ".toml")) and "/data/" not in m.name
        ]
        return house_of((m.name, archive.extractfile(m).read().decode()) for m in members)  # type: ignore[union-attr]


def top(house: House) -> Callable[[str], str]:
    """The outermost room of a module."""
    return lambda module: house.room(module).split("/")[0]


MEASURES: dict[str, Callable[[House], int]] = {
    "lines of Python": lambda house: house.lines(""),
    "lines of the compiler and tuner proper": lambda house: (
        house.lines("") - sum(house.lines(room) for room in BESIDE if room in house.rooms)
    ),
    "files": lambda house: len(house.sources),
    "rooms, with sub-rooms": lambda house: len(house.rooms),
    "import circles between rooms": lambda house: len(house.circles(top(house))),
    "import circles between sub-rooms": lambda house: len(house.circles(house.room)),
    "upward imports, by the import contract": lambda house: len(house.upward()),
    "modules without importer": lambda house: len(house.without_importer()),
    f"functions over {LONG_LINES} lines": lambda house: sum(
        (function.end_lineno or 0) - function.lineno + 1 > LONG_LINES
        for function in house.functions()
    ),
    f"functions with {MANY_PARAMETERS} or more parameters": lambda house: sum(
        _parameters(function) >= MANY_PARAMETERS for function in house.functions()
    ),
    "of them neither a command's options nor another library's arguments": lambda house: sum(
        _parameters(function) >= MANY_PARAMETERS and function.name not in MIRRORED
        for name, function in house.named_functions()
        if not name.startswith(f"{PACKAGE}.cli.")
    ),
    "dataclasses": House.dataclasses,
}


# What the package does that it did not when its size was first aimed at, and the modules that are
# only there for it: patterns of their dotted names. A module counts with the first that it fits.
# What other modules have for these, code generation above all, is not in their lines.
FEATURES: dict[str, str] = {
    "gradients of attention, packed sequences, others' signatures": (
        r"kernels\.attention\.(backward|gradients)|torch_(attention(_packed)?|signatures)$"
    ),
    "decode over a cache, latent attention, mixed batches, vLLM": (
        r"kernels\.attention\.(decode(_plan)?|append|combine|tasks)$|torch_(decode|cache|mla|mixed)$|vllm"
    ),
    "8-bit attention": r"kernels\.attention\.values$|torch_attention_fp8$",
    "grouped, scaled and weight-only products": (
        r"kernels\.gemm\.(grouped|experts|weight_only)|torch_(gemm|experts|weight_only)$"
    ),
    "recurrent attention and its gradients": (
        r"kernels\.recurrent|torch_(recurrent|segments|hedgehog)|flash_linear"
    ),
    "row operations and losses": r"kernels\.rows|torch_(rows|loss)$|row_signatures",
    "long convolution": r"kernels\.convolution|torch_convolution$",
    "search for the fastest kernel of a user's program": (
        r"\.engine\b|\.rewrites\b|kernels\.(tuned|own|select)\b|autosched\.(plans|points)$"
        r"|flows\.(choose|record|optimize_facts)$|perf\.(launch_(tasks|time)|l2|frame)$"
    ),
    "what the bits of results depend on": r"codegen\.invariance",
    "verdicts on others' kernels": r"\.judge\b",
    "kernels to ship": r"\.exports\b|flows\.(pack|export)$|cli\.(export|check)$",
    "commands as functions, kernels as a decorator": (
        r"torch_(kernel|direct)$|flows\.notebook$|runtime\.bound$"
    ),
    "scripts whose Triton kernels are tuned": r"triton_(record|pretend)$|tune_script$",
    "a second proof of schedules": r"schedule\.refute\b",
    "traces of steps, predicted and measured": (
        r"perf\.(trace|timeline)$|flows\.traced$|compile\.stamps$"
    ),
}


def features(house: House) -> dict[str, int]:
    """Lines of the compiler and tuner proper that are only there for each of `FEATURES`, and last
    the others."""
    beside = {module for room in BESIDE if room in house.rooms for module in house.within(room)}
    counts = dict.fromkeys((*FEATURES, "everything else"), 0)
    for module, text in house.sources.items():
        if module not in beside:
            fits = (name for name, pattern in FEATURES.items() if re.search(pattern, module))
            counts[next(fits, "everything else")] += text.count("\n")
    return counts


# Concept -> what a statement at the top of a module has in it, and patterns that find that: all of
# them match the statement as `ast.unparse` writes it, without docstrings and comments.
CONSTANT = r"\A(?!@|async |def |class |from |import |__all__)"
CONCEPTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "chooser of a kernel's schedule": (
        "a public function that returns a `KernelSchedule`",
        (r"\Adef [a-z][^\n]*\) -> [^\n]*KernelSchedule",),
    ),
    "ring grouping": (
        "loads of a program collected by their readers",
        (r"(?<!\.)\breaders\b(?!: int| under)", r"\.setdefault\(", r"\bprogram\b"),
    ),
    "shared layout": ("an offset for each of a block's rings", (r"\.depth \* \w+\.slot_bytes",)),
    "walker of machine code": (
        "times kept for each scoreboard",
        (r"\bboards: list\[(float|list)", r"SCOREBOARDS"),
    ),
    "road to the GPU: launch": ("`cuLaunchKernel`", (r"cuLaunchKernel",)),
    "road to the GPU: tensor maps": ("`cuTensorMapEncodeTiled`", (r"cuTensorMapEncodeTiled",)),
    "road to the GPU: NVRTC": ("`nvrtcCompileProgram`", (r"nvrtcCompileProgram",)),
    "road to the GPU: timing": ("CUDA events", (r"cuEventElapsedTime|elapsed_time\(|event_pair",)),
    "road to the GPU: watchdog": ("a process killed", (r"\.kill\(\)|\.killpg\(|\.terminate\(\)",)),
    "table of element types": (
        "a constant that names bf16, fp16, fp32 and e4m3",
        (CONSTANT, *(rf"(?i)\b{kind}\b" for kind in ("bf16", "fp16", "fp32", "e4m3"))),
    ),
    "graph of a loop": ("a `Graph` made of nodes", (r"(?<![\w.])Graph\(", r"\bnodes\b")),
    "loading a user's file": ("a module executed", (r"exec_module\(|runpy\.",)),
}


def places(house: House, patterns: tuple[str, ...]) -> list[str]:
    """The modules with a statement at the top that all patterns match."""
    found = [re.compile(pattern) for pattern in patterns]
    return sorted(
        name
        for name, statements in house.statements.items()
        if any(all(one.search(text) for one in found) for text in statements)
    )


def _code(statement: ast.stmt) -> str:
    """A statement without docstrings and comments; its tree loses its docstrings."""
    for node in ast.walk(statement):
        if isinstance(node, Function | ast.ClassDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(statement)


def tables(before: House, after: House, names: tuple[str, str]) -> str:
    """The tables: measures of the whole, places of each concept, lines and files of every room."""
    head = f"| {{}} | {names[0]} | {names[1]} |\n|---|---:|---:|"
    rows = [head.format("of the whole")]
    rows += [f"| {name} | {of(before):,} | {of(after):,} |" for name, of in MEASURES.items()]
    rows += [
        "",
        f"| places where a concept lives | modules with | {names[0]} | {names[1]} |",
        "|---|---|---:|---:|",
    ]
    for concept, (rule, patterns) in CONCEPTS.items():
        counts = [len(places(house, patterns)) for house in (before, after)]
        rows.append(f"| {concept} | {rule} | {counts[0]} | {counts[1]} |")
    rows += ["", head.format("lines of the compiler and tuner proper that are there for")]
    for name, count in features(after).items():
        rows.append(f"| {name} | {features(before)[name]:,} | {count:,} |")
    rows += ["", head.format("lines (files) of")]
    for room in sorted({*before.rooms, *after.rooms}):
        indent = "&nbsp;&nbsp;" * room.count("/")
        cells = [_size(house, room) for house in (before, after)]
        rows.append(f"| {indent}`{room}` | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def _size(house: House, room: str) -> str:
    found = len(house.within(room)) if room in house.rooms else 0
    return f"{house.lines(room):,} ({found})" if found else ""


def main() -> int:
    """Write the page anew; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", nargs="?", default=BEFORE)
    parser.add_argument("after", nargs="?", help="default: the working tree")
    given = parser.parse_args()
    try:
        before = revision(given.before)
        after = revision(given.after) if given.after else working_tree()
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    made = tables(before, after, (given.before, given.after or "now"))
    page = PAGE.read_text()
    write_text_atomically(
        PAGE,
        MARKER.sub(lambda match: f"<!-- architecture: {given.before} -->\n{made}{match[4]}", page),
    )
    print(made)
    circles = [" <-> ".join(sorted(circle)) for circle in after.circles(after.room)]
    for concept, (_, patterns) in CONCEPTS.items():
        print(f"{concept}: {', '.join(places(after, patterns))}")
    for line in (*after.upward(), *after.without_importer(), *circles):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
