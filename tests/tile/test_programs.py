"""Programs as a whole: golden prints, the verifier with planted faults, the sequential meaning."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.codegen.simt_programs import make as simt_program

from warploom import tile as t
from warploom.errors import InputError
from warploom.kernels.attention.program import AttentionConfig, attention
from warploom.kernels.gemm.program import GemmConfig, gemm
from warploom.tile.index import Index, const, symbol

GOLDEN = Path(__file__).parent / "golden"
PROGRAMS = {
    "gemm": lambda: gemm(GemmConfig(bias=True, activation="gelu")),
    "attention": lambda: attention(AttentionConfig(causal=True, lse=True)),
    "online": lambda: simt_program("online")[0],
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_printed_programs_are_the_golden_ones(name):
    text = str(PROGRAMS[name]())
    path = GOLDEN / f"{name}.txt"
    assert text == path.read_text(), f"printed program changed; if meant, write it to {path}"


def test_a_program_prints_on_one_screen():
    assert len(str(gemm()).splitlines()) <= 24


def _edit(program, number, **changes):
    def visit(body):
        return tuple(
            replace(item, body=visit(item.body))
            if isinstance(item, t.Loop)
            else replace(item, **changes)
            if item.id == number
            else item
            for item in body
        )

    return replace(program, body=visit(program.body))


def _op(program, kind):
    return next(op for op in program.ops() if op.kind == kind)


def test_the_verifier_accepts_every_kernel():
    for make in PROGRAMS.values():
        t.verify(make())


def test_the_verifier_finds_planted_faults():
    program = gemm()
    mma, load, store = (_op(program, kind) for kind in ("mma", "load", "store"))
    wrong = t.Var(mma.dst.name, mma.dst.type.with_dtype(t.BF16))
    faults = {
        "writes": _edit(program, mma.id, dst=wrong),
        "before anything wrote it": _edit(
            program, mma.id, srcs=(t.Var("ghost", mma.srcs[0].type), *mma.srcs[1:])
        ),
        "not an op": _edit(program, mma.id, kind="matmul"),
        "has no destination": _edit(program, load.id, dst=None),
        "fill has no value": _edit(program, _op(program, "fill").id, value=None),
        "no value there": _edit(
            program, load.id, spans=(t.Span(symbol("nowhere"), 128, "m"), load.spans[1])
        ),
        "2 dimensions, 1 ranges": _edit(program, store.id, spans=store.spans[:1]),
        "op ids": replace(program, body=program.body[1:]),
        f"{store.kind}.*reads {load.dst.name} before": _edit(program, store.id, srcs=(load.dst,)),
    }
    for message, broken in faults.items():
        with pytest.raises(InputError, match=message):
            t.verify(broken)


def test_an_accumulator_has_the_products_type():
    program = gemm()
    mma = _op(program, "mma")
    sums = mma.srcs[2]
    half = t.Var(sums.name, sums.type.with_dtype(t.BF16))
    zeros = next(op for op in program.ops() if op.dst == sums)
    broken = _edit(_edit(program, mma.id, srcs=(*mma.srcs[:2], half)), zeros.id, dst=half)
    with pytest.raises(InputError, match=r"adds a product .*fp32.* to .*bf16"):
        t.verify(broken)


def _picked(x, places, y):
    (i,) = t.grid(m=t.cdiv(t.size("m"), 8))
    at = t.read(places, i)
    t.store(y, t.span(i * 8, 8), tile=t.load(x, t.span(at, 8, "m")))


@pytest.mark.parametrize("place", ["", "grid", "read", "loop", "load", "store", "stop", "tile"])
def test_an_index_has_a_value_wherever_it_stands(place):
    def extra(here):
        return symbol("ghost") if here == place else 0

    def body(x, places, y):
        (i,) = t.grid(m=t.cdiv(t.size("m"), 8) + extra("grid"))
        at = t.read(places, i + extra("read"))
        tile = t.coordinate("m", 8, at + extra("tile")).cast(t.FP32)
        for j in t.loop(t.size("blocks") + extra("loop")):
            tile += t.load(x, t.span(j * 8 + extra("load"), 8, "m"))
        stop = t.size("m") + extra("stop")
        t.store(y, t.span(i * 8 + extra("store"), 8, stop=stop), tile=tile)

    arrays = {
        "x": t.array(t.FP32, "m"),
        "places": t.array(t.INT32, "blocks"),
        "y": t.array(t.FP32, "m"),
    }
    if not place:
        t.verify(t.trace(body, arrays))
        return
    with pytest.raises(InputError, match="uses ghost, which has no value there"):
        t.verify(t.trace(body, arrays))


def test_a_number_is_read_once_under_its_name():
    arrays = {
        "x": t.array(t.FP32, "m"),
        "places": t.array(t.INT32, "blocks"),
        "y": t.array(t.FP32, "m"),
    }
    program = t.trace(_picked, arrays)
    t.verify(program)
    (read,) = program.reads
    for reads in ((read, read), (replace(read, name=program.grid[0][0]),)):
        with pytest.raises(InputError, match="is read twice or hides another index"):
            t.verify(replace(program, reads=reads))


def test_a_number_is_read_from_an_int32_parameter_as_it_was_declared():
    arrays = {
        "x": t.array(t.FP32, "m"),
        "places": t.array(t.INT32, "blocks"),
        "y": t.array(t.FP32, "m"),
    }
    program = t.trace(_picked, arrays)
    (read,) = program.reads
    renamed = replace(read, array=replace(read.array, dims=("others",)))
    floats = replace(program.array("places"), dtype=t.FP32)
    declared = tuple(floats if one.name == "places" else one for one in program.arrays)
    for broken in (
        replace(program, reads=(renamed,)),
        replace(program, arrays=declared, reads=(replace(read, array=floats),)),
    ):
        with pytest.raises(InputError, match="which is no int32 parameter"):
            t.verify(broken)


def _cut(x, y):
    p, q = t.grid(p=4, q=2)
    tile = t.load(x, t.span(p * 8, 8, "m"))
    shares = t.reduce_scatter(tile, p, 4, "m"), t.reduce_scatter(tile, p, 4, "m")
    t.store(y, t.span(q * 2, 2, "m"), tile=shares[0] + shares[1])


def test_all_tasks_reduce_over_one_axis_of_the_extent_they_say():
    program = t.trace(_cut, {"x": t.array(t.FP32, "m"), "y": t.array(t.FP32, "n")})
    t.verify(program)
    first, second = [op for op in program.ops() if op.kind == "reduce_scatter"]
    (p, _), (q, _) = program.grid
    square = replace(program, grid=((p, const(4)), (q, const(4))))
    t.verify(square)
    for broken in (
        _edit(square, second.id, start=symbol(q)),  # along another axis of the same extent
        _edit(program, first.id, value=2.0),
        _edit(program, first.id, value=None),
        replace(program, grid=((p, const(2)), (q, const(2)))),
        replace(program, grid=((q, const(2)),)),
    ):
        with pytest.raises(InputError):
            t.verify(broken)


def test_a_part_of_the_rows_ends_at_what_its_loop_knows():
    def body(x, y):
        (i,) = t.grid(m=t.cdiv(t.size("m"), 8))
        total = t.zeros(m=8)
        for j in t.loop(4):
            total += t.load(x, t.span(j * 8, 8, "m"))
        t.store(y, t.span(i * 8, 8, "m"), tile=total)

    program = t.trace(body, {"x": t.array(t.FP32, "m"), "y": t.array(t.FP32, "m")})
    (loop,) = program.loops()

    def ending(until):
        items = (replace(loop, until=until) if item is loop else item for item in program.body)
        return replace(program, body=tuple(items))

    for right in (symbol("m") - 1, symbol("m_tile"), symbol("m.end"), symbol("m.begin")):
        t.verify(ending(right))
    for wrong in (symbol("ghost"), symbol(loop.index), symbol("m.end") + symbol("k")):
        with pytest.raises(InputError, match="has no value there"):
            t.verify(ending(wrong))


def _many(x, k, y):
    (i,) = t.grid(m=t.cdiv(t.size("m"), 8))
    rows, cols = t.span(i * 8, 8), t.span(0, 16)
    a = t.load(x, rows, cols)
    b = t.gather(t.cumsum(a, "n"), t.load(k, rows, cols), "n")
    c = t.where(b > t.sum_along(a, "n"), b, a.sub("n", 0, 16))
    t.store(y, rows, cols, tile=c * t.argmax_along(a, "n").cast(t.FP32))


def test_the_verifier_finds_planted_faults_of_every_group():
    arrays = {"x": t.array(t.FP32, "m n"), "k": t.array(t.INT32, "m n"),
              "y": t.array(t.FP32, "m n")}  # fmt: skip
    program = t.trace(_many, arrays)
    t.verify(program)
    ops = {op.kind: op for op in program.ops()}
    compare = ops["gt"]
    flat = t.Var(compare.dst.name, compare.dst.type.with_dtype(t.FP32))
    gather, where = ops["gather"], ops["where"]
    faults = {
        "no axis 'q'": _edit(program, ops["cumsum"].id, axis="q"),
        r"has no axis 'q'.*\['m', 'n'\]": _edit(program, ops["reduce_sum"].id, axis="q"),
        "leaves": _edit(program, ops["slice"].id, value=3),
        "needs an int32 index": _edit(program, gather.id, srcs=(gather.srcs[0], gather.srcs[0])),
        "takes": _edit(program, where.id, srcs=where.srcs[:2]),
        "writes": _edit(program, compare.id, dst=flat),
        "no range|dimensions": _edit(program, ops["load"].id, spans=()),
        "which is no parameter": _edit(
            program, ops["store"].id, array=replace(ops["store"].array, dtype=t.BF16)
        ),
        "stores .* to a range": _edit(program, ops["store"].id, srcs=(ops["load"].dst,)),
        "uses ghost": replace(program, grid=((program.grid[0][0], symbol("ghost")),)),
    }
    for message, broken in faults.items():
        with pytest.raises(InputError, match=message):
            t.verify(broken)


@given(st.integers(0, 200), st.integers(1, 40), st.integers(0, 50))
def test_index_expressions_evaluate_as_python_does_and_survive_json(m, d, c):
    x = symbol("m")
    made = t.minimum_index((x * 3 + c) // d, x % d) - t.maximum_index(t.cdiv(x, d), c)
    want = min((m * 3 + c) // d, m % d) - max(-(-m // d), c)
    assert made.evaluate({"m": m}) == want
    assert Index.from_json(made.to_json()) == made


def test_index_rules():
    assert t.cdiv(const(7), 2) == const(4)
    with pytest.raises(InputError, match="divides by zero"):
        const(1) // 0
    with pytest.raises(InputError, match="cannot decide an if"):
        bool(symbol("m"))
    with pytest.raises(InputError, match="expected"):
        Index.from_json(["**", 1, 2])


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 5), st.integers(0, 5))
def test_loops_run_from_start_to_stop_and_carry_mutated_tiles(start, stop):
    def body(x, z):
        total = t.zeros(m=4)
        for i in t.loop(start, stop):
            total += t.load(x, t.span(i, 4))
            total *= 2.0
        t.store(z, t.span(0, 4, "m"), tile=total)

    arrays = {"x": t.array(t.FP32, "m"), "z": t.array(t.FP32, "r")}
    x, want = np.arange(9.0), np.zeros(4)
    for i in range(start, stop):
        want = (want + x[i : i + 4]) * 2
    got = t.interpret(t.trace(body, arrays), {"x": x, "z": np.zeros(4)})["z"]
    assert np.array_equal(got, want)


def test_the_interpreter_refuses_arrays_that_do_not_agree():
    with pytest.raises(InputError, match="dimension 'k' is 3 in one array and 4 in b"):
        t.interpret(gemm(), {"a": np.ones((2, 3)), "b": np.ones((4, 2)), "c": np.ones((2, 2))})
    with pytest.raises(InputError, match="needs an array"):
        t.interpret(gemm(), {"a": np.ones((2, 3))})
