"""The printer of CUDA decides nothing: its text follows from the block program and the facts."""

import ast
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.codegen.programs import attention_case, gemm_case
from tests.codegen.state_program import state_case
from tests.lowering import lowered

import warploom
from warploom.autosched.schedules import Policy
from warploom.codegen.analysis.kernel_facts import kernel_facts
from warploom.codegen.analysis.role_code import Guarded, LoopCode
from warploom.codegen.cuda.emit import Printer, emit
from warploom.codegen.cuda.emit_sm80 import emit_sm80
from warploom.codegen.ir.plan import LaunchPlan
from warploom.codegen.ir.text import block_text, parse_block
from warploom.codegen.passes.lower import lower

SOURCE = Path(warploom.__file__).parent
PRINTER = "codegen/cuda"
CALLERS = (PRINTER, "codegen/compile")  # what may import it
# Prints a pickled block program: another process with other hashes, so another order of sets.
PRINT = """
import pickle, sys
from warploom.codegen.cuda.emit import emit
from warploom.codegen.cuda.emit_sm80 import emit_sm80

from tests.lowering import lowered
block, older = pickle.load(sys.stdin.buffer)
source = (emit_sm80 if older else emit)(block)
sys.stdout.buffer.write(pickle.dumps((source.text, source.parameters, source.shared_bytes)))
"""


def planned(case, **changes):
    """A block program of a case under another launch plan."""
    program, schedule, _ = case
    launch = schedule.launch.with_options(**changes)
    return lower(program, replace(schedule, launch=launch))


def staged():
    """A state that matmuls read from shared memory."""
    program, _ = state_case()
    return lowered(program, Policy("multistage", LaunchPlan(store="direct")))


SKIPS = {"skip_unit": True, "skip_voted": True}
BLOCKS = {
    "gemm": lambda: planned(gemm_case(300, 320, 100, cluster=2)),
    "gemm-dynamic": lambda: planned(gemm_case(300, 320, 100), tile_scheduler="dynamic"),
    "gemm-in-cluster": lambda: planned(
        gemm_case(120, 70, 100, slices=4, in_cluster=True), cluster=("slices_tile", 4)
    ),
    "attention": lambda: planned(attention_case(200, 200, causal=True), **SKIPS),
    "attention-one-ahead": lambda: planned(
        attention_case(200, 200, 2, False, optimistic_threshold=12.0), **SKIPS
    ),
    "staged": staged,
}
OLDER = {"older": lambda: planned(gemm_case(300, 320, 100), store="direct"), "older-staged": staged}


def printed(source):
    return source.text, source.parameters, source.shared_bytes


@pytest.mark.parametrize("name", [*BLOCKS, *OLDER])
def test_a_block_program_prints_the_same_after_a_way_through_its_text(name):
    block = (BLOCKS | OLDER)[name]()
    again = parse_block(block_text(block), block.placement.program)
    write = emit_sm80 if name in OLDER else emit
    assert again is not block and printed(write(again)) == printed(write(block))


@pytest.mark.parametrize("name", [*BLOCKS, *OLDER])
def test_a_block_program_that_was_written_and_read_back_prints_the_same(name):
    block = (BLOCKS | OLDER)[name]()
    before = pickle.dumps(block)
    here = printed(emit_sm80(block) if name in OLDER else emit(block))
    assert pickle.dumps(block) == before, "printing changed the block program"
    done = subprocess.run(
        [sys.executable, "-c", PRINT],
        input=pickle.dumps((pickle.loads(before), name in OLDER)),
        capture_output=True,
        check=True,
        env={"PYTHONPATH": str(SOURCE.parent), "PYTHONHASHSEED": "7"},
    )
    assert pickle.loads(done.stdout) == here


def unguarded(codes):
    """The steps without the conditions under which they are left out."""
    found = []
    for code in codes:
        found += unguarded(code.body) if isinstance(code, Guarded) else [code]
    return tuple(found)


def without_guards(code):
    """A role's code in which nothing is left out."""
    sections = []
    for section in code.sections:
        if not isinstance(section, LoopCode):
            sections.append(unguarded(section))
            continue
        names = ("steady", "plain")
        flat = {name: unguarded(getattr(section, name)) for name in names}
        flat |= {
            name: tuple(map(unguarded, getattr(section, name))) for name in ("prologue", "epilogue")
        }
        sections.append(replace(section, **flat))
    return replace(code, sections=tuple(sections))


def test_the_printer_leaves_out_what_the_facts_say_and_nothing_else():
    block = BLOCKS["attention-one-ahead"]()
    facts = kernel_facts(block)
    assert "__all_sync" in emit(block).text and "// not needed here" in emit(block).text
    bare = replace(facts, codes=tuple(map(without_guards, facts.codes)))
    text = Printer(block, bare).source().text
    assert "__all_sync" not in text and "// not needed here" not in text


def test_the_printer_zeroes_what_the_facts_say():
    block = BLOCKS["gemm"]()
    facts = kernel_facts(block)
    (name,) = facts.overwritten
    assert f"{name}_live" in emit(block).text
    eager = replace(
        facts,
        overwritten=frozenset(),
        codes=tuple(
            replace(
                code,
                sections=tuple(
                    replace(s, zeroed=()) if isinstance(s, LoopCode) else s for s in code.sections
                ),
            )
            for code in facts.codes
        ),
    )
    assert f"{name}_live" not in Printer(block, eager).source().text


def test_the_printer_takes_offsets_and_sizes_from_the_layout():
    block = BLOCKS["gemm"]()
    facts = kernel_facts(block)
    layout = facts.layout
    ring = block.rings[0].name
    moved = replace(
        layout, rings={**layout.rings, ring: 77_824}, full={**layout.full, ring: 88}, total=99_999
    )
    source = Printer(block, replace(facts, layout=moved)).source()
    assert source.shared_bytes == 99_999
    assert f"const unsigned {ring}_base = shared + 77824;" in source.text
    assert f"const unsigned {ring}_full = shared + 88;" in source.text


def test_the_printer_stores_by_the_path_of_the_facts():
    block = BLOCKS["gemm"]()
    facts = kernel_facts(block)
    assert "tma_store" in emit(block).text and "store_16_bytes" not in emit(block).text
    ways = {number: replace(path, panels=None) for number, path in facts.stores.items()}
    text = Printer(block, replace(facts, stores=ways)).source().text
    assert "store_16_bytes" in text and "store_wait_read" not in text
    plain = {number: replace(path, panels=None, wide=False) for number, path in ways.items()}
    text = Printer(block, replace(facts, stores=plain)).source().text
    assert "store_16_bytes" not in text


def test_the_printer_declares_the_threads_of_the_facts():
    block = BLOCKS["gemm"]()
    facts = replace(kernel_facts(block), declared=256)
    source = Printer(block, facts).source()
    assert "__launch_bounds__(256, 1)" in source.text
    assert (source.threads, source.declared_threads) == (384, 256)


def imported(file):
    """Every module of the package that a file imports, inside of functions too."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


def test_only_the_compiler_knows_the_printers():
    seen = 0
    for file in SOURCE.rglob("*.py"):
        where = file.relative_to(SOURCE).as_posix()
        if where.startswith(CALLERS):
            continue
        seen += 1
        for module in imported(file):
            assert not module.startswith("warploom.codegen.cuda"), where
    assert seen > 300
