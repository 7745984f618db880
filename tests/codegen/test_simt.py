"""SIMT kernels: the emitted text, run on a CPU with threads in random order, gives the meaning."""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from tests.codegen import emulate
from tests.codegen.simt_programs import PROGRAMS, make
from tests.gpu.cases import distance

from warploom import tile as t
from warploom.codegen.compile.build import build
from warploom.codegen.cuda.simt.emit import emit_simt
from warploom.codegen.simt.choose import simt
from warploom.codegen.simt.schedule import SimtSchedule
from warploom.errors import InputError

SHAPES = {"chosen": None, "warp": (32, 4), "wide": (128, 128), "tall": (64, 1), "square": (128, 8),
          "cluster": (64, 32)}  # fmt: skip
EACH = 3  # shapes of a program: the chosen one, the cluster, and others in turn


def schedule(program, shape):
    if SHAPES[shape] is None:
        return simt(program)
    threads, lanes = SHAPES[shape]
    vector = {"warp": 2, "tall": 4, "cluster": 2}.get(shape, 1)
    ahead = {"cluster": 2 if shape == "cluster" else 1, "stages": 1 if shape == "wide" else 3}
    return SimtSchedule(shape, threads, lanes, vector, **ahead)


def fits(program, shape):
    try:
        return emit_simt(program, schedule(program, shape), "sm_90a")
    except InputError as error:
        assert re.search("registers of each|exchanges columns", str(error))
        return None


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """Every program under some of the schedules that it fits, compiled as one library."""
    cases, others = [], ["warp", "wide", "tall", "square"]
    for turn, name in enumerate(PROGRAMS):
        program = make(name)[0]
        order = ("chosen", "cluster", *others[turn % 4 :], *others[: turn % 4])
        fitting = [(name, shape, fits(program, shape)) for shape in order]
        cases += [case for case in fitting if case[2] is not None][:EACH]
    library = emulate.compile_all([case[2] for case in cases], tmp_path_factory.mktemp("simt"))
    return library, {(name, shape): (number, source) for number, (name, shape, source)
                     in enumerate(cases)}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_emitted_code_means_what_the_program_means(kernels, name):
    library, known = kernels
    program, arrays, scalars, bound = make(name)
    want = t.interpret(program, arrays, scalars)
    ran = 0
    for shape in SHAPES:
        if (name, shape) not in known:
            continue
        number, source = known[name, shape]
        got = emulate.run(library, number, source, program, arrays, scalars)
        for key, value in want.items():
            assert distance(got[key], value) <= bound, (shape, key)
        ran += 1
    assert ran >= EACH - 1


def test_a_barrier_left_out_is_found(tmp_path):
    program, arrays, scalars, _ = make("transposed")
    source = emit_simt(program, SimtSchedule("square", 128, 8, 1), "sm_90a")
    broken = replace(source, text=source.text.replace("__syncthreads();", ""))
    library = emulate.compile_all([broken], tmp_path)
    with pytest.raises(emulate.Fault, match=r"(unwritten|race): .*a plain access"):
        emulate.run(library, 0, broken, program, arrays, scalars)


@pytest.mark.parametrize(("name", "arch"), [("scans", "sm_80"), ("casts", "sm_90a")])
def test_it_compiles_without_spills(name, arch):
    program = make(name)[0]
    built = build(program, simt(program), arch)
    assert built.resources.spill_bytes == 0 and built.arch == arch


def _program(body, dims="m n", kind=t.FP32):
    return t.trace(body, {"x": t.array(kind, dims), "y": t.array(kind, dims)})


def _matmul(x, y):
    a = t.load(x, t.span(0, 16, "r"), t.span(0, 16))
    t.store(y, t.span(0, 16, "r"), t.span(0, 16, "q"),
            tile=(a @ t.load(y, t.span(0, 16, "q"), t.span(0, 16))).cast(t.BF16))  # fmt: skip


def _copy(x, y, *spans):
    t.store(y, *spans, tile=t.load(x, *spans))


def _added(x, y):
    t.store(y, t.span(0, 8), t.span(0, 8), tile=t.load(x, t.span(0, 8), t.span(0, 8)), add=True)


def _turned(x, y):
    a = t.load(x, t.span(0, 192), t.span(0, 192))
    t.store(y, t.span(0, 192), t.span(0, 192), tile=(a.T * 2.0).T)


REFUSED = {
    "a matmul; SIMT schedules": (_matmul, "m n", t.BF16, "sm_90a", None),
    "has 3 axes": (
        lambda x, y: _copy(x, y, *[t.span(0, 4)] * 3), "a b c", t.FP32, "sm_90a", None,
    ),
    "fp8 conversions need sm_89, the target is sm_80": (
        lambda x, y: _copy(x, y, t.span(0, 8), t.span(0, 8)), "m n", t.E4M3, "sm_80", None,
    ),
    "store add=True of bf16 needs sm_90": (_added, "m n", t.BF16, "sm_80", None),
    "the GPU adds fp32, fp16, bf16 and int32": (_added, "m n", t.E4M3, "sm_90a", None),
    r"takes 512 registers of each of 32 threads, .*; use more threads or a smaller tile": (
        lambda x, y: _copy(x, y, t.span(0, 64), t.span(0, 256)), "m n", t.FP32, "sm_90a", (32, 32),
    ),
    r"needs 148,224 B of shared memory .* sm_86 has 101,376": (
        _turned, "m n", t.FP32, "sm_86", (256, 32),
    ),
    r"takes 64 registers of each of 1024 threads, which have 64 .* sm_80; use a smaller tile": (
        lambda x, y: _copy(x, y, t.span(0, 256), t.span(0, 256)), "m n", t.FP32, "sm_80",
        (1024, 256),
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_emitted_is_refused_with_numbers(message):
    body, dims, kind, arch, threads = REFUSED[message]
    program = _program(body, dims, kind)
    with pytest.raises(InputError, match=message):
        chosen = SimtSchedule("given", *threads, 1) if threads else simt(program)
        emit_simt(program, chosen, arch)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [((96, 32, 1), "power of two"), ((2048, 32, 1), "32 to 1024"), ((64, 128, 1), "no more lanes")],
)
def test_schedules_that_no_block_can_have(numbers, message):
    with pytest.raises(InputError, match=message):
        SimtSchedule("x", *numbers)


def test_a_schedule_survives_json():
    made = simt(make("softmax")[0])
    assert SimtSchedule.from_json(json.loads(json.dumps(made.to_json()))) == made
    with pytest.raises(InputError, match="incomplete"):
        SimtSchedule.from_json({"schema": "warploom.simt-schedule", "version": 2})


def test_names_of_a_program_do_not_meet_the_emitters():
    def body(x, scan):
        total, carry = t.load(x, t.span(0, 8)), t.scalar("best")
        t.store(scan, t.span(0, 8), tile=t.cumsum(total, "shared") * carry)

    arrays = {"x": t.array(t.FP32, "shared"), "scan": t.array(t.FP32, "shared")}
    program = t.trace(body, arrays, name="combine_all")
    build(program, simt(program))


def _renamed(x, y, o):
    rows, cols = t.span(0, 32), t.span(0, 32)
    sums = t.cumsum(t.load(y, rows), "m").rename("m", "n")
    again = t.load(x, t.span(0, 32, "q"), cols).rename("q", "m")
    t.store(o, rows, cols, tile=(t.load(x, rows, cols) + sums) * again)


def test_a_renamed_axis_meets_tiles_under_its_new_name(tmp_path):
    dims = {"x": "m n", "y": "m", "o": "m n"}
    program = t.trace(_renamed, {name: t.array(t.FP32, d) for name, d in dims.items()})
    random = np.random.default_rng(0)
    values = {"x": random.integers(-3, 4, (32, 32)), "y": random.integers(-3, 4, 32)}
    values["o"] = np.zeros((32, 32))
    source = emit_simt(program, simt(program), "sm_90")
    got = emulate.run(emulate.compile_all([source], tmp_path), 0, source, program, values)
    want = (values["x"] + np.cumsum(values["y"])) * values["x"]
    assert (got["o"] == want).all() and (t.interpret(program, values)["o"] == want).all()


def test_gelu_is_as_near_as_its_comment_says(tmp_path):
    """The text of `gelu_fast` and `gelu_tanh_fast` for 20,000 numbers, beside float64."""

    def body(x, exact, fast):
        (i,) = t.grid(m=t.cdiv(t.size("m"), 256))
        at = t.span(i * 256, 256)
        a = t.load(x, at)
        t.store(exact, at, tile=t.gelu(a))
        t.store(fast, at, tile=t.gelu_tanh(a))

    kind = t.array(t.FP32, "m")
    program = t.trace(body, {"x": kind, "exact": kind, "fast": kind}, name="gelus")
    source = emit_simt(program, simt(program), "sm_90a")
    x = np.linspace(-9, 9, 20_000).astype(np.float32)
    x[:3] = np.inf, np.nan, -1e30
    arrays = {"x": x, "exact": np.zeros_like(x), "fast": np.zeros_like(x)}
    library = emulate.compile_all([source], tmp_path)
    found = emulate.run(library, 0, source, program, arrays)
    wide = x.astype(np.float64)
    erf = np.array([math.erf(one * math.sqrt(0.5)) for one in wide])
    wanted = wide * 0.5 * (1.0 + erf)
    assert found["exact"][0] == np.inf and np.isnan(found["exact"][1])
    error = np.abs(found["exact"] - wanted)[2:]
    assert np.all(error < 3e-7 + 2.0**-24 * np.abs(wanted[2:]))
    tail = (x[2:] > -6) & (x[2:] < -0.1)
    assert np.all(error[tail] < 1e-3 * np.abs(wanted[2:][tail]))
    inner = np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)
    assert np.abs(found["fast"] - wide * 0.5 * (1.0 + np.tanh(inner)))[3:].max() < 1e-3
