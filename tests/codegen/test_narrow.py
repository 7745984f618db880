"""Narrow element types and wide angles beside a matmul: the emitted text run on a CPU, compiled."""

import ctypes
import subprocess

import numpy as np
import pytest
from tests.codegen import emulate
from tests.codegen.narrow_program import FLAT, TILES, added_case, narrow_case
from tests.gpu.cases import distance

from warploom import tile as t
from warploom.autosched.schedules import Policy, compiled
from warploom.codegen.compile.build import build
from warploom.codegen.cuda.emit_sm80 import emit_sm80
from warploom.codegen.cuda.prelude import PRELUDE
from warploom.codegen.ir.plan import LaunchPlan
from warploom.codegen.passes.lower import lower
from warploom.errors import InputError


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    program, schedule, values = narrow_case()
    source = emit_sm80(lower(program, schedule), "sm_90")
    library = emulate.compile_all([source], tmp_path_factory.mktemp("narrow"))
    got = emulate.run(library, 0, source, program, values)
    return got, t.interpret(program, values)


@pytest.mark.parametrize("name", [*TILES, *FLAT])
def test_every_type_rounds_where_the_program_says(ran, name):
    got, want = ran
    exact = name != "turned"  # exponentials and angles are those of the special functions
    assert distance(got[name], want[name]) <= (0.0 if exact else 1e-4)
    assert want[name].any()


def test_it_compiles_for_hopper_through_tma_and_without():
    program, schedule, _ = narrow_case()
    for store in ("tma", "direct"):
        plan = schedule.launch.with_options(store=store)
        built = build(program, type(schedule)(schedule.name, schedule.loops, plan))
        assert built.resources.spill_bytes == 0


def test_a_target_without_fp8_says_so_at_the_line():
    program, schedule, _ = narrow_case()
    with pytest.raises(InputError, match=r"narrow_program\.py.*fp8 conversions need sm_89"):
        emit_sm80(lower(program, schedule), "sm_80")


def test_what_the_gpu_cannot_add_is_refused():
    def body(a, b, c):
        at = t.load(a, t.span(0, 64), t.span(0, 16)) @ t.load(b, t.span(0, 16), t.span(0, 32))
        for _ in t.loop(1):
            at += t.load(a, t.span(0, 64), t.span(0, 16)) @ t.load(b, t.span(0, 16), t.span(0, 32))
        t.store(c, t.span(0, 64), t.span(0, 32), tile=at.cast(t.E4M3), add=True)

    arrays = {"a": t.array(t.BF16, "m k"), "b": t.array(t.BF16, "k n"), "c": t.array(t.E4M3, "m n")}
    program = t.trace(body, arrays)
    with pytest.raises(InputError, match="the GPU adds fp32, fp16, bf16 and int32"):
        compiled(program, Policy("inflight", LaunchPlan(split=""), groups=1, depth=2))


AROUND = """
#include <cmath>
#include <cstring>
#define DEVICE static
#define __device__
static unsigned __float_as_uint(float x) { unsigned u; memcpy(&u, &x, 4); return u; }
"""
ENTRY = """
extern "C" void run(const float* x, float* s, float* c, int n) {
  for (int i = 0; i < n; ++i) { s[i] = sin_of(x[i]); c[i] = cos_of(x[i]); }
}
"""


def _angles(folder, texts):
    folder.mkdir()
    (folder / "a.cpp").write_text("\n".join((AROUND, *texts, ENTRY)))
    command = ["g++", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-o", str(folder / "a.so")]
    subprocess.run([*command, str(folder / "a.cpp")], check=True, timeout=60)
    random = np.random.default_rng(0)
    wide = np.exp(random.uniform(-80, 88.7, 100_000)) * random.choice([-1, 1], 100_000)
    near = random.uniform(-1.01e5, 1.01e5, 100_000)
    x = np.concatenate([random.normal(size=100_000) * 5, near, wide]).astype(np.float32)
    sin, cos = np.empty_like(x), np.empty_like(x)
    pointers = [v.ctypes.data_as(ctypes.POINTER(ctypes.c_float)) for v in (x, sin, cos)]
    ctypes.CDLL(str(folder / "a.so")).run(*pointers, len(x))
    exact = x.astype(np.longdouble)
    return max(float(np.abs(sin - np.sin(exact)).max()), float(np.abs(cos - np.cos(exact)).max()))


def test_angles_of_any_size_are_reduced(tmp_path):
    texts = [PRELUDE[name] for name in ("quarters", "sine", "sin_of", "cos_of")]
    assert _angles(tmp_path / "right", texts) < 1.1e-7
    # Planted fault: one bit of 2 / pi.
    broken = [text.replace("0x7f09d5f4u", "0x7f09d5f0u") for text in texts]
    assert _angles(tmp_path / "broken", broken) > 1e-3


def test_slices_of_a_sum_meet_in_memory(tmp_path):
    program, schedule, values = added_case("direct")
    source = emit_sm80(lower(program, schedule), "sm_90")
    got = emulate.run(emulate.compile_all([source], tmp_path), 0, source, program, values)
    for name, want in t.interpret(program, values).items():
        assert distance(got[name], want) == 0, name
    program, schedule, _ = added_case()
    text = build(program, schedule).source.text
    assert text.count("tma_store_add_2d(&") >= 3 and "atomicAdd" not in text
