"""Tasks that meet: every register goes to the block that finishes it, and comes in order."""

import re

import pytest
from tests.codegen.test_store_panels import THREADS, Group, split, take
from tests.lowering import lowered

from warploom.autosched.schedules import Policy, compiled
from warploom.codegen.analysis.cluster_reduce import shares
from warploom.codegen.cuda.emit import emit
from warploom.codegen.ir.plan import LaunchPlan
from warploom.kernels.gemm.program import GemmConfig, gemm

WINDOW = 1 << 24  # bytes between the shared memories of a cluster's blocks
PLAYED = range(0, THREADS, 7)  # of the threads, which all do the same
ROOM, FULL = 1 << 12, 1 << 10


class Reduction(Group):
    """One group of one block in a cluster reduction; `cluster`: all pushed values, by address."""

    def __init__(self, source, part, rank, cluster):
        super().__init__(source, part, {"reduce_room": ROOM, "reduce_full": FULL, "rank": rank})
        self.rank, self.cluster, self.sums = rank, cluster, {}
        self.bytes = 0
        self.names["in_peer"] = lambda at, block: at + block * WINDOW

    def order(self, line):
        if expected := re.search(r"barrier_expect\(full, (\d+)\)", line):
            self.bytes += int(expected.group(1))
        return "barrier_" in line or line.startswith(("__syncwarp", "reduce_parity"))

    def statement(self, line, state):
        if made := re.match(r"const unsigned (\w+ = .*, \w+ = .*);$", line):
            for one in split(made.group(1)):
                super().statement(f"const unsigned {one};", state)
            return
        if line.startswith("const"):
            super().statement(line, state)
            return
        call, text = re.match(r"(\w+)\((.*)\);$", line).groups()
        for thread in PLAYED:
            own = state[thread]
            args = [self.value(a.lstrip("&"), thread, **own) for a in split(text)]
            if call == "push_quad":
                to, (block, first), bar = args
                assert to % 16 == 0 and bar == to // WINDOW * WINDOW + FULL + 8 * own_part(self)
                assert to not in self.cluster, "two pushes to one place"
                self.cluster[to] = (self.rank, thread, block, first)
                continue
            assert call in ("read_quad", "add_quad")
            (block, first), at = args
            found = self.cluster[at + self.rank * WINDOW]
            known = self.sums.setdefault((thread, block, first), [])
            assert bool(known) == (call == "add_quad")
            known.append(found)


def own_part(group):
    return group.names["part"]


def played(config, groups):
    """(reduction of every block and group, their pushes): pushes of all blocks, then all reads."""
    program = gemm(config)
    split_ = "n" if config.swap_ab else "m"
    launch = LaunchPlan(split=split_, cluster=("slices_tile", config.slices))
    source = emit(
        lowered(program, Policy("inflight", launch, groups=groups, depth=2, registers=(40, 216))),
        False,
    )
    op = next(op for op in program.ops() if op.kind == "reduce_scatter")
    text = source.text[source.text.index('extern "C"') :]
    lines = text[text.index(f"// Run {op.label} ") :].splitlines()[2:]
    body = of_readers(take(lines))
    reads = next(i for i, line in enumerate(body) if "barrier_wait(full" in line)
    head = [line for line in body[:reads] if line.strip().startswith("const")]
    cluster: dict[int, tuple[int, ...]] = {}
    found = []
    for rank in range(config.slices):
        expects = rank < shares(op)
        pushes = [line for line in body[:reads] if expects or "barrier_expect" not in line]
        for part in range(groups):
            reduction = Reduction(source, part, rank, cluster)
            reduction.run(list(pushes), [{} for _ in range(THREADS)])
            found.append(reduction)
    for reduction in found:
        if reduction.rank < shares(op):
            reduction.run([*head, *body[reads:]], [{} for _ in range(THREADS)])
    return found, cluster


def of_readers(lines):
    """The lines that the blocks with a part run, without the tests for being one."""
    bare = [re.sub(r"if \(rank < \d+\) (?=if)", "", line) for line in lines]
    opening = [i for i, line in enumerate(bare) if re.match(r"\s*if \(rank < \d+\) {", line)]
    if not opening:
        return bare
    before, rest = bare[: opening[0]], bare[opening[0] + 1 :]
    both = take(rest)
    other = next(i for i, line in enumerate(both) if line.strip() == "} else {")
    return [*before, *both[:other], *rest]


CASES = {
    "128x64": (GemmConfig(slices=4, in_cluster=True, tile=(128, 64, 64)), 2),
    "two-blocks-of-rows": (GemmConfig(slices=2, in_cluster=True, tile=(128, 64, 64)), 1),
    "two-blocks-without-a-part": (GemmConfig(slices=6, in_cluster=True, tile=(64, 64, 64)), 1),
    "swap_ab": (GemmConfig(slices=4, in_cluster=True, swap_ab=True, tile=(96, 128, 64)), 2),
}


@pytest.mark.parametrize("name", CASES)
def test_every_register_is_summed_by_one_block_in_order(name):
    config, groups = CASES[name]
    reductions, cluster = played(config, groups)
    columns = config.tile[0 if config.swap_ab else 1]
    width = config.share // 2  # registers of a part of a row block
    some = columns // config.share
    for reduction in reductions:
        if reduction.rank >= some:
            assert not reduction.sums and not reduction.bytes
            continue
        blocks = {block for _, block, _ in reduction.sums}
        assert len(reduction.sums) == len(PLAYED) * len(blocks) * width // 4
        for (thread, block, first), names in reduction.sums.items():
            own = reduction.rank * width + first
            assert names == [(s, thread, block, own) for s in range(config.slices)]
    rows = config.tile[1 if config.swap_ab else 0]
    whole = 4 * rows * columns * config.slices
    assert sum(reduction.bytes for reduction in reductions) == whole
    assert 16 * len(cluster) * THREADS == whole * len(PLAYED)


def test_a_part_pushed_to_the_wrong_block_is_noticed(monkeypatch):
    """A planted fault: all parts to the first block."""
    init = Reduction.__init__

    def wrong(self, *args):
        init(self, *args)
        self.names["in_peer"] = lambda at, block: at

    monkeypatch.setattr(Reduction, "__init__", wrong)
    with pytest.raises((AssertionError, KeyError)):
        test_every_register_is_summed_by_one_block_in_order("128x64")


def test_a_cluster_reduction_compiles_for_hopper():
    config = GemmConfig(slices=8, in_cluster=True, tile=(128, 128, 64))
    launch = LaunchPlan(split="m", cluster=("slices_tile", 8), store_panels=1)
    built = compiled(gemm(config), Policy("inflight", launch, groups=2, depth=4))
    assert built.resources.spill_bytes == 0 and "st.async" in built.source.text
