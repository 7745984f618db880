"""Every element of a result, from its register to its place in the array, as the emitted text says.

The text of a store is run for all 128 threads of a group: stmatrix as the PTX ISA defines it (the
fragments of 9.7.15.5, the transposition of `.trans`), the boxes of TMA stores from their tensor
maps. What arrives must be the accumulator's element of that row and column, whichever orientation
the product has, and every element of the group's part must arrive.
"""

import re
from functools import cache
from itertools import product

import pytest
from tests.lowering import lowered

from warploom.autosched.schedules import Policy, schedule_for
from warploom.codegen.cuda.emit import emit
from warploom.codegen.ir.layout import swizzle
from warploom.codegen.ir.plan import LaunchPlan
from warploom.codegen.passes.lower import lower
from warploom.errors import InputError
from warploom.kernels.gemm.program import GemmConfig, gemm
from warploom.tile import FP16, FP32, array, grid, load, loop, size, span, store, trace, zeros

PANELS = 1 << 17  # where the panels begin
THREADS = 128


@cache
def python(text):
    """A C++ expression as Python code; a register becomes its (block, element)."""
    text = re.sub(r"pack_\w+\(", "pack(", text).replace("/", "//").replace("::", "")
    text = re.sub(r"\bacc\w*\[([^\[\]]*)\]\[", r"register(\1)[", text)
    text = text.replace("&&", " and ").replace("threadIdx.x", "threadIdx")
    return compile(text.strip(), "<emitted>", "eval")


@cache
def position(thread):
    """What a thread knows of its place."""
    own = {"threadIdx": thread, "lane": thread % 32, "thread_col": thread % 4 * 2}
    return own | {"thread_row": thread // 32 * 16 + thread % 32 // 4}


class Registers:
    """`register(t)[i]` is the name of an accumulator."""

    def __init__(self, block):
        self.block = block

    def __getitem__(self, number):
        return self.block, number


def place(thread, name):
    """(register row, column) of an accumulator of a thread (PTX ISA, fragment of wgmma's D)."""
    block, number = name
    lane, warp = thread % 32, thread // 32
    return (
        64 * block + 16 * warp + lane // 4 + 8 * (number >> 1 & 1),
        8 * (number >> 2) + 2 * (lane % 4) + (number & 1),
    )


class Group:
    """One compute group's shared memory and what its stores leave in global memory."""

    def __init__(self, source, part, position):
        self.maps = {p["name"]: p for p in source.parameters if p["kind"] == "map"}
        self.names = {"part": part, "panels": PANELS, "register": Registers, "min": min}
        self.names |= position | {"pack": lambda low, high: (low, high)}
        self.shared, self.array = {}, {}
        self.flying, self.read, self.safe = [[]], 0, 0  # stores by commit; of them read, known

    def value(self, text, thread=0, **more):
        return eval(python(text), self.names, position(thread) | more)

    def run(self, lines, state):
        """Statements for all threads at once; branches and loops are the same in all of them."""
        while lines:
            line = lines.pop(0).strip()
            if line in ("", "}") or line.startswith(("#", "//", "fence")) or self.order(line):
                continue
            if header := re.match(r"for \(int (\w+) = (.*?); \w+ < (.*?); (.*?)\)( {)?$", line):
                self.loop(lines, state, header)
            elif branch := re.match(r"if \((.*)\) {$", line):
                body = take(lines)
                taken = "threadIdx" in branch.group(1) or self.value(branch.group(1))
                if taken:
                    self.run(body, state)
            elif inside := re.match(r"if \((.*?)\) (tma_store.*)$", line):
                if self.value(inside.group(1)):
                    self.run([inside.group(2)], state)
            elif line == "{":
                self.run(take(lines), state)
            else:
                self.statement(line, state)

    def order(self, line):
        """What waits, meetings and commits say about the panels that stores still read."""
        if wait := re.search(r"store_wait_read<(\d+)>", line):
            assert line.startswith("if (threadIdx.x % 128 == 0)")
            self.read = max(self.read, len(self.flying) - 1 - int(wait.group(1)))
        elif "named_sync" in line:
            self.safe = self.read
        elif line == "store_commit();":
            self.flying.append([])
        else:
            return False
        return True

    def free(self, at):
        """A chunk of 16 bytes may be written: no store that may still run reads it."""
        for start, end in (panel for group in self.flying[self.safe :] for panel in group):
            assert not start <= at < end, "a store still reads this panel"

    def loop(self, lines, state, header):
        name, first, last, step, braces = header.groups()
        by = int(step.split("+=")[1]) if "+=" in step else 1
        body = take(lines) if braces else one(lines)
        for value in range(int(first), int(last), by):
            self.run(list(body), [{**own, name: value} for own in state])

    def statement(self, line, state):
        if made := re.match(r"const unsigned (\w+) = (.*);$", line):
            for thread, own in enumerate(state):
                own[made.group(1)] = self.value(made.group(2), thread, **own)
            return
        call, text = re.match(r"(\w+)\((.*)\);$", line).groups()
        args = split(text)
        if call.startswith("tma_store"):
            self.store(args, state)
            return
        values = [[self.value(a, t, **own) for a in args] for t, own in enumerate(state)]
        if call == "store_shared_pair":
            for thread, (at, low, high) in enumerate(values):
                self.free(at)
                self.shared[at], self.shared[at + 4] = place(thread, low), place(thread, high)
            return
        assert call in ("stmatrix", "stmatrix_transposed")
        count = len(args) - 1
        assert count == 4 or (count == 2 and call == "stmatrix_transposed")
        for warp, matrix, row in product(range(4), range(count), range(8)):
            at = values[32 * warp + 8 * matrix + row][0]
            assert at % 16 == 0
            self.free(at)
            for col in range(8):
                down, along = (col, row) if call.endswith("transposed") else (row, col)
                thread = 32 * warp + 4 * down + along // 2
                name = values[thread][1 + matrix][along % 2]
                self.shared[at + 2 * col] = place(thread, name)

    def store(self, args, state):
        tensor = self.maps[args[0].lstrip("&")]
        at, col, row = (self.value(text, 0, **state[0]) for text in args[1:4])
        wide, high = tensor["box"]
        element = {"bf16": 2, "fp16": 2, "fp32": 4}[tensor["dtype"]]
        assert at % 1024 == 0 and wide * element == tensor["swizzle"]
        self.flying[-1].append((at, at + high * tensor["swizzle"]))
        for r, c in product(range(high), range(wide)):
            own = swizzle(r * tensor["swizzle"] + c * element, tensor["swizzle"])
            key = (row + r, col + c)
            found = self.shared[at + own]
            assert self.array.setdefault(key, found) == found, "two panels disagree"


def split(text):
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def take(lines):
    """The lines up to the brace that closes the block."""
    depth, body = 1, []
    while depth:
        line = lines.pop(0)
        depth += line.count("{") - line.count("}")
        body.append(line)
    return body[:-1]


def one(lines):
    """The next statement: of a loop without braces that is a loop again."""
    body = [lines.pop(0)]
    while body[-1].strip().startswith("#"):
        body.append(lines.pop(0))
    last = body[-1].strip()
    if last.endswith("{"):
        body += [*take(lines), "}"]
    elif last.startswith("for "):
        body += one(lines)
    return body


def arrived(program, schedule, part, text=None):
    """What the stores of one group leave: (row, column) of the array -> accumulator's place."""
    source = emit(lower(program, schedule))
    op = next(op for op in program.ops() if op.kind == "store")
    body = text or source.text[source.text.index('extern "C"') :]
    start = body.index(f"// Run {op.label} ")
    lines = body[start:].splitlines()
    depth, end = 0, len(lines)
    for number, line in enumerate(lines):
        depth += line.count("{") - line.count("}")
        if depth < 0:
            end = number
            break
    dims = dict.fromkeys(("m", "n", "k"), 1 << 20)
    group = Group(source, part, dims | {"m_tile": 3, "n_tile": 5})
    group.run(lines[:end], [{} for _ in range(THREADS)])
    return group.array


def expected(config, part, parts):
    bm, bn, _ = config.tile
    rows, cols = (bn, bm) if config.swap_ab else (bm, bn)
    own = rows // parts
    result = {}
    for row, col in product(range(own), range(cols)):
        m, n = (col, part * own + row) if config.swap_ab else (part * own + row, col)
        result[3 * bm + m, 5 * bn + n] = (row, col)
    return result


def plan(config, panels=2, high=0):
    split_ = "n" if config.swap_ab else "m"
    return LaunchPlan(split=split_, store_panels=panels, store_rows=high)


# name -> configuration, groups, panels on their way, rows of a panel
CASES = {
    "128x256": (GemmConfig(tile=(128, 256, 16)), 2, 2, 0),
    "at-once": (GemmConfig(tile=(128, 128, 16)), 2, 2, 0),
    "two-blocks": (GemmConfig(tile=(256, 64, 16)), 2, 1, 0),
    "fp32": (GemmConfig(out=FP32, tile=(64, 96, 16)), 1, 2, 0),
    "312-columns": (GemmConfig(tile=(128, 312, 16)), 2, 2, 0),
    "200-columns-at-once": (GemmConfig(tile=(64, 200, 16)), 1, 4, 0),
    "fp32-72-columns": (GemmConfig(out=FP32, tile=(64, 72, 16)), 1, 2, 0),
    "swap-ab": (GemmConfig(swap_ab=True, tile=(152, 256, 16)), 2, 2, 40),
    "swap-ab-odd-panels": (GemmConfig(swap_ab=True, tile=(152, 64, 16)), 1, 3, 24),
    "three-slots": (GemmConfig(tile=(64, 256, 16)), 1, 3, 0),
    "swap-ab-at-once": (GemmConfig(swap_ab=True, tile=(88, 128, 16)), 1, 2, 0),
    "swap-ab-three-groups": (GemmConfig(swap_ab=True, tile=(200, 192, 16)), 3, 1, 64),
    "across-fp16": (GemmConfig(FP16, FP16, swap_ab=True, tile=(64, 128, 16)), 2, 1, 8),
}


@pytest.mark.parametrize("name", CASES)
def test_every_element_goes_to_its_place(name):
    config, parts, panels, high = CASES[name]
    schedule = schedule_for(
        gemm(config), Policy("inflight", plan(config, panels, high), groups=parts, depth=2)
    )
    for part in {0, parts - 1}:
        assert arrived(gemm(config), schedule, part) == expected(config, part, parts)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("lane / 8 % 2", "lane / 16 % 2"),
        ("lane / 16 * 8", "lane / 8 * 8"),
        ("stmatrix_transposed(panel", "stmatrix(panel"),
        ("& 0x70", "& 0x30"),
        ("store_wait_read<1>", "store_wait_read<2>"),
    ],
)
@pytest.mark.parametrize("slots", [2, 3])
def test_a_wrong_address_is_noticed(old, new, slots):
    """Planted faults in the text of a transposed store."""
    config = GemmConfig(swap_ab=True, tile=(104, 64, 16))
    schedule = schedule_for(
        gemm(config), Policy("inflight", plan(config, slots, 24), groups=1, depth=2)
    )
    source = emit(lower(gemm(config), schedule)).text
    text = source[source.index('extern "C"') :].replace(old, new)
    assert old in source
    try:
        wrong = arrived(gemm(config), schedule, 0, text)
    except (KeyError, AssertionError):  # a place that nothing wrote; panels that disagree
        return
    assert wrong != expected(config, 0, 1)


def test_what_cannot_be_stored_in_panels_is_refused():
    config = GemmConfig(tile=(128, 100, 16))
    with pytest.raises(InputError, match="rows of 200 B"):
        emit(lowered(gemm(config), Policy("inflight", plan(config), groups=2, depth=2)))
    with pytest.raises(InputError, match="store_rows=12"):
        LaunchPlan(store_rows=12)
    adding = _adding(200)
    with pytest.raises(InputError, match="would add some twice"):
        emit(lowered(adding, Policy("inflight", LaunchPlan(), groups=1, depth=2)))
    emit(lowered(_adding(192), Policy("inflight", LaunchPlan(), groups=1, depth=2)))


def _adding(columns):
    def body(a, b, c):
        (n,) = grid(n=size("n") // columns)
        acc = zeros(m=64, n=columns)
        for i in loop(size("k") // 64):
            depth = span(i * 64, 64)
            acc += load(a, span(0, 64), depth) @ load(b, depth, span(n * columns, columns))
        store(c, span(0, 64), span(n * columns, columns), tile=acc, add=True)

    arrays = {"a": array(FP16, "m k"), "b": array(FP16, "k n"), "c": array(FP32, "m n")}
    return trace(body, arrays, name="adding")
