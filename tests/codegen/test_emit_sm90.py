"""Kernels for Hopper, whole: the emitted text, run on a CPU with TMA, wgmma and clusters as they
are, every copy, matmul and store at a random time of its own (hopper_on_cpu.h)."""

import re
from dataclasses import replace
from itertools import pairwise

import pytest
from tests.codegen import emulate
from tests.codegen.programs import attention_case, gemm_case
from tests.codegen.state_program import state_case
from tests.gpu.cases import distance

from warploom import tile as t
from warploom.autosched.schedules import Policy, schedule_for
from warploom.codegen.cuda.emit import emit
from warploom.codegen.ir.plan import LaunchPlan
from warploom.codegen.passes.lower import lower


def planned(case, **changes):
    """The case under another launch plan."""
    program, schedule, arrays = case
    return program, replace(schedule, launch=schedule.launch.with_options(**changes)), arrays


def slices(count):
    """A product whose slices meet in a cluster."""
    case = gemm_case(120, 70, 100, slices=count, in_cluster=True, tile=(128, 64, 16))
    return planned(case, cluster=("slices_tile", count))


def staged():
    """A state that matmuls read from shared memory, to where the threads copy it."""
    program, arrays = state_case(200, 64)
    schedule = schedule_for(program, Policy("multistage", LaunchPlan(store="direct")))
    return program, schedule, arrays


CASES = {
    "staged": staged,
    "gemm": lambda: gemm_case(150, 72, 40),
    "gemm-cluster": lambda: planned(
        gemm_case(150, 72, 100, cluster=2), tile_scheduler="serpentine"
    ),
    "gemm-transposed": lambda: gemm_case(150, 72, 100, a="km", b="nk", depth=2),
    "gemm-swap-ab": lambda: gemm_case(101, 136, 40, swap_ab=True, tile=(72, 128, 16), bias=True),
    "gemm-bias": lambda: gemm_case(270, 200, 40, tile=(128, 192, 16), bias=True, activation="gelu"),
    "gemm-fp8": lambda: gemm_case(150, 72, 100, dtype=t.E4M3, b="nk", tile=(128, 64, 64)),
    "gemm-direct": lambda: planned(gemm_case(150, 72, 40, out=t.FP32), store="direct"),
    "gemm-no-trips": lambda: planned(gemm_case(130, 72, 0), tile_scheduler="dynamic"),
    "gemm-slices": lambda: slices(2),
    "gemm-panels": lambda: planned(gemm_case(300, 320, 20), store_panels=1),
    "gemm-panels-at-once": lambda: gemm_case(600, 120, 20, tile=(128, 128, 16)),
    "attention": lambda: planned(
        attention_case(200, 170, causal=True, lse=True),
        tile_scheduler="dynamic",
        reverse=("rows_tile",),
    ),
    "attention-multistage": lambda: attention_case(130, 70, kind="multistage", window=40),
}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """Every case emitted and compiled as one library."""
    made = {name: make() for name, make in CASES.items()}
    sources = [emit(lower(case[0], case[1])) for case in made.values()]
    return emulate.compile_all(sources, tmp_path_factory.mktemp("sm90")), made, sources


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("number", range(len(CASES)), ids=list(CASES))
def test_the_emitted_code_means_what_the_program_means(kernels, number, seed):
    library, made, sources = kernels
    program, _, arrays = list(made.values())[number]
    got = emulate.run(library, number, sources[number], program, arrays, blocks=4, seed=seed)
    for name, want in t.interpret(program, arrays).items():
        assert distance(got[name], want) < 1e-4, name


def test_what_a_matmul_has_in_registers_is_pinned_before_its_fence(kernels):
    """Or the compiler may write its registers behind the fence, which no emulation sees."""
    seen = set()
    for source in kernels[2]:
        body = source.text[source.text.index('extern "C"') :].split("wgmma_fence();")
        for before, after in pairwise(body):
            started = after.partition("wgmma_commit();")[0]
            pinned = set(re.findall(r"pin\((\w+)\);", before.rpartition("}")[2]))
            used = set(re.findall(r"wgmma_\w+\((?:some<\d+>\()?(\w+)\[", started))
            operands = set(re.findall(r"&(\w+)\[\d+\]\[\d+\]", started))
            assert used and used | operands <= pinned, (used, operands, before[-200:])
            seen.add(bool(operands))
    assert seen == {False, True}


FAULTS = {
    "no-wait-for-copies": ("gemm", r"barrier_wait\(a_b_full[^;]*;"),
    "no-wait-for-a-slot": ("gemm-transposed", r"barrier_wait\(a_b_empty[^;]*;"),
    "no-wait-for-matmuls": ("attention", r"wgmma_wait<\d>\(\);"),
    "no-fence-before-stores": ("gemm", r"fence_async\(\);"),
    "no-fence-before-matmuls": ("staged", r"fence_async\(\);"),
    "no-fence-of-barriers": ("gemm", r"fence_barrier_init\(\);"),
    "no-fence-of-registers": ("attention", r"wgmma_fence\(\);"),
    "no-wait-for-stores": ("gemm", r"store_wait_read<\d>\(\);"),
    # A block's next task writes the panels again; the wait at its end stays.
    "no-wait-for-panels": ("gemm-panels", r"if \(threadIdx.x % 128 == 0\) store_wait_read<0>\(\);"),
    "no-wait-for-all-panels": (
        "gemm-panels-at-once",
        r"if \(threadIdx.x % 128 == 0\) store_wait_read<0>\(\);",
    ),
    "no-turn-of-a-cluster": ("gemm-cluster", r"cluster_sync\(\);"),
    "no-wait-for-parts": ("gemm-slices", r"barrier_wait\(full, reduce_parity\);"),
    "no-wait-for-a-task": ("attention", r"barrier_wait\(task_full[^;]*;"),
    "registers-of-nobody": ("gemm", r"registers_up<240>", "registers_up<248>"),
    "registers-kept": ("gemm", r"registers_down<24>\(\);"),
}


@pytest.fixture(scope="module")
def broken(kernels, tmp_path_factory):
    """The sources with a fault each."""
    _, made, sources = kernels
    found = []
    for case, pattern, *instead in FAULTS.values():
        whole = sources[list(made).index(case)]
        body = whole.text.index('extern "C"')
        text = whole.text[:body] + re.sub(pattern, *instead or ";", whole.text[body:])
        assert text != whole.text
        found.append(replace(whole, text=text))
    return emulate.compile_all(found, tmp_path_factory.mktemp("broken")), found


@pytest.mark.parametrize("number", range(len(FAULTS)), ids=list(FAULTS))
def test_what_is_left_out_is_noticed(kernels, broken, number):
    library, sources = broken
    program, _, arrays = kernels[1][list(FAULTS.values())[number][0]]
    want = t.interpret(program, arrays)
    for seed in range(12):
        try:
            got = emulate.run(library, number, sources[number], program, arrays, None, 4, seed)
        except emulate.Fault:
            return
        if any(distance(got[name], want[name]) > 1e-3 for name in want):
            return
    raise AssertionError("12 interleavings did not notice")
