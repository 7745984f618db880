"""Kernels for GPUs without TMA: the emitted text, run on a CPU with copies that land late."""

import re

import numpy as np
import pytest
from tests.codegen import emulate
from tests.codegen.programs import attention_case, gemm_case
from tests.gpu.cases import distance
from tests.lowering import lowered

from warploom import tile as t
from warploom.autosched.schedules import Policy, schedule_for
from warploom.codegen.compile.build import build
from warploom.codegen.cuda.emit_sm80 import emit_sm80
from warploom.codegen.ir.plan import LaunchPlan
from warploom.codegen.passes.lower import lower
from warploom.errors import InputError
from warploom.kernels.gemm.program import GemmConfig, gemm
from warploom.tile.index import const, multiple_of, symbol


def direct(case):
    """The case with stores from registers."""
    program, schedule, arrays = case
    plan = schedule.launch.with_options(store="direct")
    return program, type(schedule)(schedule.name, schedule.loops, plan, schedule.pingpong), arrays


CASES = {
    "gemm": lambda: direct(gemm_case(150, 72, 40)),
    "gemm-transposed": lambda: direct(gemm_case(104, 64, 40, a="km", b="nk")),
    "gemm-left-transposed": lambda: direct(gemm_case(104, 72, 24, a="km", depth=1, flying=0)),
    "gemm-right-transposed": lambda: direct(gemm_case(100, 64, 56, b="nk", depth=2, flying=0)),
    "gemm-fp16-epilogue": lambda: direct(
        gemm_case(
            140,
            72,
            24,
            dtype=t.FP16,
            out=t.FP16,
            bias=True,
            residual=True,
            activation="relu",
            scale=0.5,
        )
    ),
    "gemm-swap-ab": lambda: direct(
        gemm_case(
            101,
            136,
            40,
            swap_ab=True,
            tile=(72, 128, 16),
            bias=True,
            residual=True,
            activation="relu",
        )
    ),
    "gemm-swap-ab-fp32": lambda: direct(
        gemm_case(88, 72, 24, swap_ab=True, a="km", b="nk", tile=(72, 128, 16), out=t.FP32)
    ),
    "gemm-any-columns": lambda: direct(gemm_case(90, 152, 24, tile=(128, 72, 16))),
    "gemm-no-trips": lambda: direct(gemm_case(130, 72, 0)),
    "attention": lambda: direct(
        attention_case(100, 70, kind="multistage", depth=2, causal=True, lse=True)
    ),
    "attention-overlapped": lambda: direct(attention_case(60, 130, groups=1, pingpong=False)),
}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """Every case emitted and compiled as one library."""
    made = {name: make() for name, make in CASES.items()}
    sources = [emit_sm80(lower(case[0], case[1])) for case in made.values()]
    library = emulate.compile_all(sources, tmp_path_factory.mktemp("sm80"))
    return library, made, sources


@pytest.mark.parametrize("number", range(len(CASES)), ids=list(CASES))
def test_the_emitted_code_means_what_the_program_means(kernels, number):
    library, made, sources = kernels
    program, _, arrays = list(made.values())[number]
    got = emulate.run(library, number, sources[number], program, arrays)
    for name, want in t.interpret(program, arrays).items():
        assert distance(got[name], want) < 4e-3, name


def test_a_wait_left_out_and_words_of_another_lane_are_found(kernels, tmp_path):
    from dataclasses import replace  # noqa: PLC0415

    _, made, sources = kernels
    program, _, arrays = made["gemm"]
    faults = (
        re.sub(r"barrier_wait\(a_b_full[^;]*;", "", sources[0].text),
        sources[0].text.replace("quad_exchange(w, lane % 4);", ""),
    )
    broken = [replace(sources[0], text=text) for text in faults]
    assert all(source.text != sources[0].text for source in broken)
    library = emulate.compile_all(broken, tmp_path)
    with pytest.raises(emulate.Fault, match=r"unwritten: ldmatrix|race: the read by ldmatrix"):
        emulate.run(library, 0, broken[0], program, arrays)
    got = emulate.run(library, 1, broken[1], program, arrays)
    assert distance(got["c"], t.interpret(program, arrays)["c"]) > 1e-2


@pytest.mark.parametrize("arch", ["sm_80", "sm_89"])
def test_it_compiles_without_spills(arch):
    program, schedule, _ = CASES["attention"]()
    built = build(program, schedule, arch)
    assert built.resources.spill_bytes == 0 and built.arch == arch
    assert "cp.async" in built.source.text and "wgmma" not in built.source.text


REFUSED = {
    "store 'tma'": lambda: gemm_case(64, 64, 64),
    "cluster 2": lambda: gemm_case(64, 64, 64, cluster=2),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_the_target_does_not_have_is_refused(message):
    program, schedule, _ = REFUSED[message]()
    with pytest.raises(InputError, match=message):
        emit_sm80(lower(program, schedule))


def test_shared_memory_and_types_are_refused_with_numbers():
    program, schedule, _ = direct(gemm_case(64, 64, 64, depth=30))
    with pytest.raises(InputError, match=r"needs 1\d\d,\d{3} B .*sm_89 has 101,376"):
        emit_sm80(lower(program, schedule), "sm_89")
    program = gemm(GemmConfig(dtype=t.E4M3, b="nk", tile=(128, 64, 64)))
    schedule = schedule_for(
        program, Policy("inflight", LaunchPlan(split="m", store="direct"), groups=2, depth=3)
    )
    with pytest.raises(InputError, match="multiplies bf16 and fp16"):
        emit_sm80(lower(program, schedule))


def test_multiples_of_index_expressions():
    i, j = symbol("i"), symbol("j")
    assert multiple_of(i * 64 + 16) == 16
    assert multiple_of(t.minimum_index(i * 24, j * 40)) == 8
    assert multiple_of(const(0)) == 0 and multiple_of(i // 8) == 1


def test_a_pitch_that_copies_cannot_take_is_refused_before_the_launch(monkeypatch):
    from tests.codegen.test_launch import Driver, Tensor  # noqa: PLC0415

    from warploom.runtime import driver  # noqa: PLC0415

    made = Driver(capability=80, shared=166912)
    monkeypatch.setattr(driver, "import_binding", lambda name: made)
    program, schedule, _ = CASES["gemm"]()
    kernel = build(program, schedule, "sm_80").kernel()
    given = {"a": Tensor(150, 40), "b": Tensor(40, 72, pitch=75), "c": Tensor(150, 72)}
    with pytest.raises(InputError, match="must be multiples of 16 B for copies of 16 B"):
        kernel(given)
    kernel({**given, "b": Tensor(40, 72)})
    assert made.last("cuLaunchKernel")[4] == 384


def test_what_all_groups_hold_is_added_once(tmp_path):
    """Two groups share the rows; a vector along the columns is the same in both."""

    def body(a, b, d, c, e):
        (i,) = t.grid(m=t.cdiv(t.size("m"), 128))
        rows, cols = t.span(i * 128, 128), t.span(0, 32)
        acc = t.zeros(m=128, n=32)
        for k in t.loop(t.cdiv(t.size("k"), 16)):
            part = t.span(k * 16, 16)
            acc += t.load(a, rows, part) @ t.load(b, part, cols)
        t.store(c, rows, cols, tile=acc)
        t.store(e, cols, tile=t.load(d, cols) * 2.0, add=True)

    dims = {"a": (t.BF16, "m k"), "b": (t.BF16, "k n"), "d": (t.FP32, "n")}
    dims |= {"c": (t.FP32, "m n"), "e": (t.FP32, "n")}
    program = t.trace(body, {name: t.array(*kind) for name, kind in dims.items()}, name="added")
    plan = LaunchPlan(split="m", store="direct")
    source = emit_sm80(lowered(program, Policy("multistage", plan, groups=2)))
    shapes = {"a": (128, 32), "b": (32, 32), "d": (32,), "c": (128, 32), "e": (32,)}
    arrays = {name: np.ones(shape) for name, shape in shapes.items()}
    library = emulate.compile_all([source], tmp_path)
    got = emulate.run(library, 0, source, program, arrays)
    assert np.array_equal(got["e"], t.interpret(program, arrays)["e"])
    assert np.array_equal(got["e"], np.full(32, 3.0))
