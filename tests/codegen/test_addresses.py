"""The addresses in the emitted text, worked out as the hardware does, for every block of a cluster.

Copies are played from the `tma_load` lines of the kernel, matmuls from its `descriptor(...)`
arguments and the text of the device functions themselves. In a cluster the shared memory of block r
begins at r << 24 (what `cvta` and `SR_CgaCtaId` give on sm_90), which no simulator of waits sees.
"""

import re
from collections import ChainMap
from functools import cache

import numpy as np
import pytest
from tests.codegen.hardware import hardware_address

from warploom.autosched.schedules import Policy, schedule_for
from warploom.codegen.analysis.multicast import is_multicast
from warploom.codegen.cuda.emit import emit
from warploom.codegen.cuda.prelude import PRELUDE
from warploom.codegen.ir.layout import INSTRUCTION_K_BYTES, swizzle
from warploom.codegen.ir.place import contracted
from warploom.codegen.ir.plan import LaunchPlan
from warploom.codegen.passes.lower import lower
from warploom.errors import InputError
from warploom.kernels.attention.program import AttentionConfig, attention
from warploom.kernels.gemm.program import GemmConfig, gemm
from warploom.tile import E4M3

WINDOW = 1 << 24  # bytes of the shared::cluster window between blocks
BASE = 1024  # dynamic shared memory after 1024 B of the block's own
SLOT = 1


@cache
def python(text):
    """A C++ expression of unsigned arithmetic as Python's code."""
    text = re.sub(r"\w+_cursor\.slot", str(SLOT), text)
    text = re.sub(r"static_cast<[^>]*>", "", text).replace("::", "")
    text = re.sub(r"\b(0x[0-9a-fA-F]+|\d+)u\b", r"\1", text).replace("/", "//")
    return compile(text, "emitted", "eval")


def function(name, text):
    """A one-expression device function of the prelude as a Python function."""
    found = re.search(rf"{name}\(([^)]*)\) {{\s*return (.*?);\s*}}", text, re.DOTALL)
    names = [part.split()[-1] for part in found.group(1).split(",")]
    body = python(found.group(2))
    return lambda *args: eval(body, {}, dict(zip(names, args, strict=True)))


def split(text):
    """Top-level arguments of a call."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


class Block:
    """One block of the cluster: names of the kernel by value, bytes of its shared memory."""

    def __init__(self, text, rank, descriptor, sizes):
        self.rank, self.memory = rank, {}
        self.names = {
            "rank": rank,
            "shared": rank * WINDOW + BASE,
            "part": 0,
            "min": min,
            "max": max,
        }
        self.names |= sizes | {
            "descriptor": function("descriptor", descriptor),
            "in_block": function("in_block", PRELUDE["in_block"]),
        }
        for name, value in re.findall(r"const unsigned (\w+_base) = (.*?);", text):
            self.names[name] = self.value(value)
        for name, value in re.findall(r"const unsigned (\w+_at) = (.*?);", text):
            self.names[name] = self.value(value)

    def value(self, text, **more):
        return eval(python(text), {"__builtins__": {}}, ChainMap(more, self.names))


def play(text, source, ranks, descriptor, position):
    """Every copy of the kernel's producer; gives the blocks with elements in their memory."""
    sizes = dict.fromkeys(re.findall(r"^    int (\w+)[,)]", text, re.MULTILINE), 1 << 20)
    blocks = [Block(text, rank, descriptor, sizes | position(rank)) for rank in range(ranks)]
    maps = {p["name"]: p for p in source.parameters if p["kind"] == "map"}
    for block in blocks:
        for call in re.findall(r"tma_load_\dd(?:_multicast)?\((.*)\);", text):
            if "Cursor" in call or "unsigned to" in call:
                continue
            args = split(call)
            choice = re.match(r"\(rank < (\d+) \? &(\w+) : &(\w+)\)", args[1])
            name = args[1].lstrip("&")
            if choice:  # the last block of a cluster copies fewer rows
                name = choice.group(2 if block.rank < int(choice.group(1)) else 3)
            to, tensor = block.value(args[0]), maps[name]
            rank = len(tensor["box"])
            start = [block.value(a) for a in args[3 : 3 + rank]]
            mask = int(args[3 + rank]) if len(args) > 3 + rank else 1 << block.rank
            put(blocks, mask, to % WINDOW, tensor, start)
    return blocks


def put(blocks, mask, to, tensor, start):
    """One box into the blocks of the mask, at the same place in each."""
    width, box = tensor["swizzle"], tensor["box"]
    element = {"bf16": 2, "e4m3": 1}[tensor["dtype"]]
    assert to % (8 * width) == 0 and box[0] * element == width
    rows = max(box[1:])
    along = box.index(rows, 1) if rows > 1 else 1
    columns, at = np.arange(box[0]), list(start)
    for row in range(rows):
        addresses = swizzle(to + row * width + columns * element, width).tolist()
        at[along] = start[along] + row
        rest = tuple(at[1:])
        keys = [(tensor["array"], at[0] + col, *rest) for col in range(box[0])]
        for block in blocks:
            if mask >> block.rank & 1:
                for address, key in zip(addresses, keys, strict=True):
                    assert block.memory.setdefault(address, key) == key, "two boxes overlap"


def run_of(sums, whole):
    """(block of 64 rows, first column, columns) of the sums one instruction adds to."""
    t = int(re.search(r"\[(\d+)\]", sums).group(1))
    some = re.match(r"some<(\d+)>\(.* \+ (\d+)\)", sums)
    return (t, 2 * int(some.group(2)), 2 * int(some.group(1))) if some else (t, 0, whole)


def operands(block, kernel, source, op):
    """(array key read, array key wanted) of every element the first group's matmuls read."""
    text = source.text
    body = text[text.index('extern "C"') :]
    start = body.index(f"// Issue {op.label} ")
    lines = body[start : body.index("wgmma_commit", start)]
    placement = kernel.placement
    calls = [
        split(c[c.index("(") + 1 : c.rindex(")")]) for c in lines.splitlines() if "wgmma_m" in c
    ]
    steps = placement.operand(op, 1).steps
    whole = op.srcs[1].type.size(next(n for n in op.srcs[1].type.names if n != contracted(op)))
    runs = [run_of(call[0], whole) for call in calls]
    assert len(calls) == steps * len(set(runs))
    assert sum(columns for t, _, columns in set(runs) if t == 0) == whole
    for which in (0, 1):
        var = op.srcs[which]
        if not placement.is_shared(var):
            continue
        operand = placement.operand(op, which)
        element = operand.tile.element
        depth = INSTRUCTION_K_BYTES // element
        load = placement.shared[var.name][0]
        symbols = {name.rstrip("_"): value for name, value in block.names.items()}
        inner = [span.start.evaluate(symbols) for span in load.spans]
        spanned = [d for d, span in enumerate(load.spans) if span.size is not None]
        for number, call in enumerate(calls):
            step = number * steps // len(calls)
            t, column, columns = runs[number]
            first, extent = (column, columns) if which else (t * 64, 64)
            word = block.value(call[1 + which])
            low, high = word & 0xFFFFFFFF, word >> 32
            for mn in range(0, extent, 8):
                for k in range(0, depth, 5):
                    at = hardware_address(low, high, operand.k_major, mn, k, element)
                    want = list(inner)
                    row, col = first + mn, step * depth + k
                    row, col = (row, col) if operand.k_major else (col, row)
                    want[spanned[0]] += row
                    want[spanned[1]] += col
                    yield block.memory.get(at), (load.array.name, *reversed(want))


def check(program, schedule, position, descriptor=PRELUDE["descriptor"]):
    kernel = lower(program, schedule)
    source = emit(kernel)
    body = source.text[source.text.index('extern "C"') :]
    blocks = play(body, source, schedule.launch.cluster[1], descriptor, position)
    count = 0
    for block in blocks:
        for op in program.ops():
            if op.kind == "mma":
                for got, want in operands(block, kernel, source, op):
                    count += 1
                    assert got == want, f"block {block.rank}: {op.label} reads {got}, not {want}"
    assert count > 60


GEMMS = {
    "nn": GemmConfig(),
    "nt": GemmConfig(b="nk"),
    "tn": GemmConfig(a="km"),
    "tt": GemmConfig(a="km", b="nk"),
    "256x128": GemmConfig(tile=(256, 128, 64)),
    "128x128": GemmConfig(tile=(128, 128, 64)),
    "128x192": GemmConfig(tile=(128, 192, 64)),
    "128x320": GemmConfig(tile=(128, 320, 64)),
    "128x384-nt": GemmConfig(b="nk", tile=(128, 384, 64)),
    "128x312": GemmConfig(tile=(128, 312, 64)),
    "128x200-nt": GemmConfig(b="nk", tile=(128, 200, 64)),
    "152x256-swap-ab": GemmConfig(swap_ab=True, tile=(152, 256, 64)),
    "184x128-swap-ab-tn": GemmConfig(swap_ab=True, a="km", tile=(184, 128, 64)),
    "288x128-swap-ab-nt": GemmConfig(swap_ab=True, b="nk", tile=(288, 128, 64)),
    "368x128-swap-ab-tt": GemmConfig(swap_ab=True, a="km", b="nk", tile=(368, 128, 64)),
    "72x128-swap-ab-shallow": GemmConfig(swap_ab=True, tile=(72, 128, 16)),
    "fp8-swap-ab": GemmConfig(dtype=E4M3, b="nk", swap_ab=True, tile=(168, 128, 128)),
    "fp8": GemmConfig(dtype=E4M3, b="nk", tile=(128, 256, 128)),
    "fp8-wide": GemmConfig(dtype=E4M3, b="nk", tile=(128, 320, 128)),
}


def gemm_schedule(config, axis="m_tile", blocks=2):
    along = (axis, blocks) if blocks > 1 else ("", 1)
    plan = LaunchPlan(split="n" if config.swap_ab else "m", cluster=along, store_panels=1)
    return schedule_for(
        gemm(config),
        Policy(
            "inflight", plan.with_options(store_rows=8 if config.swap_ab else 0), groups=2, depth=2
        ),
    )


def at_tiles(axis, blocks):
    """Grid position and loop counter: block `rank` of the cluster at an arbitrary place."""

    def position(rank):
        return {"m_tile": 6, "n_tile": 4, "i": 3, "i_": 3} | {axis: 2 * blocks + rank}

    return position


@pytest.mark.parametrize("blocks", [1, 2, 4])
@pytest.mark.parametrize("axis", ["m_tile", "n_tile"])
@pytest.mark.parametrize("name", GEMMS)
def test_every_block_of_a_cluster_multiplies_what_was_copied_for_it(name, axis, blocks):
    config = GEMMS[name]
    try:
        schedule = gemm_schedule(config, axis, blocks)
        emit(lower(gemm(config), schedule))
    except InputError as error:  # a tile that cannot be cut in so many slices
        pytest.skip(str(error))
    check(gemm(config), schedule, at_tiles(axis, blocks))


def test_attention_reads_what_was_copied():
    program = attention(AttentionConfig(tile=(128, 176)))
    launch = LaunchPlan(split="rows", store_panels=1)
    schedule = schedule_for(program, Policy("pingpong", launch, groups=2, depth=2))
    grid = {"batch_tile": 1, "heads_tile": 2, "rows_tile": 3}
    check(program, schedule, lambda rank: grid | {"i": 5, "i_": 5, "i_1": 5})


def test_only_what_all_blocks_of_a_cluster_want_is_multicast():
    """Neither a tile of a position of its own nor one of a loop that others leave earlier."""

    def loads(program, plan):
        return [is_multicast(program, plan, op) for op in program.ops() if op.kind == "load"]

    plain, sliced = gemm(), gemm(GemmConfig(slices=2))
    assert loads(plain, LaunchPlan(cluster=("m_tile", 2))) == [False, True]
    assert loads(plain, LaunchPlan(cluster=("n_tile", 2))) == [True, False]
    assert loads(sliced, LaunchPlan(cluster=("slices_tile", 2))) == [False, False]
    assert loads(sliced, LaunchPlan(cluster=("m_tile", 2))) == [False, True]
    own, shared = (attention(AttentionConfig(causal=causal)) for causal in (True, False))
    pair = LaunchPlan(cluster=("rows_tile", 2))
    assert loads(own, pair) == [False] * 3
    assert loads(shared, pair) == [False, True, True]


def test_an_address_with_the_block_in_it_is_noticed(monkeypatch):
    """The fault of the first GPU run: block 1's number ran into the stride field."""
    monkeypatch.setitem(
        PRELUDE, "in_block", "DEVICE unsigned in_block(unsigned address) { return address; }"
    )
    config = GEMMS["nn"]
    with pytest.raises(AssertionError, match="block 1: mma"):
        check(gemm(config), gemm_schedule(config), at_tiles("m_tile", 2))


def test_a_wrong_descriptor_is_noticed():
    broken = PRELUDE["descriptor"].replace(">> 4", ">> 5")
    with pytest.raises(AssertionError, match="reads"):
        check(gemm(), gemm_schedule(GEMMS["nt"]), at_tiles("m_tile", 2), broken)
