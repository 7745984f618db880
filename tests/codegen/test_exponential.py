"""The polynomial exponential of `LaunchPlan.fma_exp2`: the emitted text itself, compiled as C++."""

import ctypes
import subprocess

import numpy as np
import pytest

from warploom.autosched.named import overlapped
from warploom.codegen.cuda.emit import emit
from warploom.codegen.cuda.prelude import PRELUDE
from warploom.codegen.ir.plan import LaunchPlan
from warploom.codegen.passes.lower import lower
from warploom.errors import InputError
from warploom.kernels.attention.program import AttentionConfig, attention

AROUND = """
#include <cmath>
#include <cstring>
#define DEVICE static
static unsigned __float_as_uint(float x) { unsigned u; memcpy(&u, &x, 4); return u; }
static float __uint_as_float(unsigned u) { float x; memcpy(&x, &u, 4); return x; }
static float max_nan(float x, float y) { return x != x ? x : fmaxf(x, y); }
static float exp2_fast(float x) { return 1e30f; }
"""
ENTRY = """
extern "C" void run(const float* x, float* y, int n) {
  for (int i = 0; i < n; ++i) y[i] = exp2_fma(x[i]);
}
extern "C" int on_lanes(int i) { return exp2_shared<SHARE>(i, 0.0f) < 2.0f; }
"""


def compiled(folder, share=3):
    source, library = folder / f"e{share}.cpp", folder / f"e{share}.so"
    parts = (AROUND, PRELUDE["exp2_fma"], PRELUDE["exp2_shared"], ENTRY)
    source.write_text("\n".join(parts).replace("SHARE", str(share)))
    command = ["g++", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-o"]
    subprocess.run([*command, str(library), str(source)], check=True, timeout=60)
    return ctypes.CDLL(str(library))


def power(library, x):
    x = np.ascontiguousarray(x, np.float32)
    y = np.full_like(x, np.nan)
    pointers = (a.ctypes.data_as(ctypes.POINTER(ctypes.c_float)) for a in (x, y))
    library.run(*pointers, len(x))
    return y


def test_the_polynomial_is_as_close_as_it_says_and_keeps_what_has_no_value(tmp_path):
    library = compiled(tmp_path)
    x = np.random.default_rng(0).uniform(-126, 15, 200_000).astype(np.float32)
    x = np.concatenate([x, np.arange(-126, 16), np.linspace(-1, 0, 5001)]).astype(np.float32)
    ratio = power(library, x) / np.exp2(x.astype(np.float64))
    assert np.abs(ratio - 1).max() < 7.6e-5  # bf16 rounds by up to 3.9e-3, fp16 by 4.9e-4
    gone = power(library, [-np.inf, -1e30, -200.0, -127.0])
    assert (gone == 0).all(), "a masked score must weigh nothing"
    assert np.isnan(power(library, [np.nan])).all()


@pytest.mark.parametrize("share", [1, 3, 8])
def test_so_many_of_every_8_elements_are_on_the_lanes(tmp_path, share):
    library = compiled(tmp_path, share)
    assert sum(library.on_lanes(i) for i in range(8)) == share
    assert [library.on_lanes(i + 8) for i in range(8)] == [library.on_lanes(i) for i in range(8)]


def test_a_plan_says_how_many():
    program = attention(AttentionConfig(head_dim=64))
    plan = LaunchPlan(split="rows", fma_exp2=2)
    text = emit(lower(program, overlapped(program, {"k": 2, "v": 2}, plan))).text
    assert "exp2_shared<2>(i, " in text and "exp2_fma" in text
    plain = plan.with_options(fma_exp2=0)
    text = emit(lower(program, overlapped(program, {"k": 2, "v": 2}, plain))).text
    assert "exp2_fma" not in text
    with pytest.raises(InputError, match="expected 0 to 8"):
        LaunchPlan(fma_exp2=9)
