"""Every op along a vector beside a matmul, for each type, along rows and columns; vectors that go
from rows to columns; arithmetic on a matmul's loaded operand. Run on a CPU, on two machines."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from tests.codegen import emulate
from tests.gpu.cases import distance
from tests.lowering import lowered

from warploom import tile as t
from warploom.autosched.schedules import Policy, fitting_name, schedule_for
from warploom.codegen.compile.build import emitted
from warploom.codegen.cuda.emit import emit
from warploom.codegen.cuda.emit_sm80 import emit_sm80
from warploom.codegen.ir.plan import LaunchPlan
from warploom.codegen.oracle.simulate import simulate

SIZES = {"m": 128, "n": 48, "p": 75}  # p is no axis of a tile
TYPES = {"fp32": t.FP32, "bf16": t.BF16, "int32": t.INT32}
TO_NUMBERS = {
    "sum": t.sum_along,
    "product": t.product_along,
    "max": t.max_along,
    "min": t.min_along,
    "argmax": t.argmax_along,
}
TO_VECTORS = {
    "cumsum": t.cumsum,
    "gather": lambda x, axis: t.gather(x, x.cast(t.INT32) * 0 + 3, axis),
    "twice": lambda x, axis: x + t.max_along(x, axis),
}


def _body(a, b, numbers, **arrays):
    vectors = {axis: t.load(arrays[f"x_{axis}"], t.span(0, SIZES[axis])) for axis in "mnp"}
    acc = t.zeros(m=SIZES["m"], n=SIZES["n"])
    for k in t.loop(t.cdiv(t.size("k"), 16)):
        part = t.span(k * 16, 16)
        acc += t.load(a, t.span(0, SIZES["m"]), part) @ t.load(b, part, t.span(0, SIZES["n"]))
    place = 0
    for axis, x in vectors.items():
        for op in TO_NUMBERS.values():
            t.store(numbers, place, tile=op(x, axis).cast(t.FP32))
            place += 1
        for row, op in enumerate(TO_VECTORS.values()):
            made = op(x, axis).cast(t.FP32)
            t.store(arrays[f"along_{axis}"], row, t.span(0, SIZES[axis]), tile=made)
    # What is along rows goes along columns and back.
    there = vectors["m"].sub("m", 0, 64).rename("m", "n")
    both = there.cast(t.FP32).sub("n", 8, SIZES["n"]) + vectors["n"].cast(t.FP32)
    both += vectors["p"].sub("p", 20, SIZES["n"]).rename("p", "n").cast(t.FP32)
    last = len(TO_VECTORS)
    t.store(arrays["along_n"], last, t.span(0, 48), tile=both + t.max_along(acc, "m"))
    back = there.rename("n", "m").cast(t.FP32) + t.max_along(acc, "n").sub("m", 64, 64)
    back += vectors["p"].sub("p", 3, 64).rename("p", "m").cast(t.FP32)
    t.store(arrays["along_m"], last, t.span(0, 64, "m"), tile=back)
    lanes = t.max_along(acc, "n").rename("m", "p").sub("p", 7, 75)
    lanes += t.cumsum(t.coordinate("p", 75, 5), "p").cast(t.FP32)
    t.store(arrays["along_p"], last, t.span(0, 75), tile=lanes)


def _case(kind):
    rows = len(TO_VECTORS) + 1
    arrays = {
        "a": t.array(t.BF16, "m k"), "b": t.array(t.BF16, "k n"), "numbers": t.array(t.FP32, "ops"),
        **{f"x_{axis}": t.array(kind, axis) for axis in SIZES},
        **{f"along_{axis}": t.array(t.FP32, f"rows {axis}") for axis in SIZES},
    }  # fmt: skip
    program = t.trace(_body, arrays, name="vectors")
    random, sizes = np.random.default_rng(3), SIZES
    values = {
        "a": random.integers(-2, 3, (sizes["m"], 32)), "b": random.integers(-2, 3, (32, 48)),
        # Few are not 1, so that products are exact.
        "numbers": np.full(len(sizes) * len(TO_NUMBERS), np.nan),
    }  # fmt: skip
    for axis, size in sizes.items():
        rare = random.random(size) < 5 / size
        values[f"x_{axis}"] = np.where(rare, random.integers(-2, 3, size), 1)
        values[f"along_{axis}"] = np.full((rows, size), 7.0)
    return program, values


@pytest.fixture(scope="module")
def vectors():
    made = [_case(kind) for kind in TYPES.values()]
    blocks = [
        lowered(p, Policy("inflight", LaunchPlan(store="direct"), groups=1, depth=2))
        for p, _ in made
    ]
    sources = [emit(block) for block in blocks] + [emit_sm80(blocks[1])]
    return made, blocks, sources, emulate.compile_all(sources, None)


@pytest.mark.parametrize("number", range(len(TYPES) + 1), ids=[*TYPES, "sm80"])
def test_every_op_along_a_vector_has_code(vectors, number):
    made, blocks, sources, library = vectors
    case = (0, 1, 2, 1)[number]
    (program, values), block = made[case], blocks[case]
    want = t.interpret(program, values)
    assert np.isfinite(want["numbers"]).all() and len(np.unique(want["along_m"])) > 4
    got = emulate.run(library, number, sources[number], program, values)
    ran = simulate(block, values, seed=number)
    for name in want:
        assert distance(got[name], want[name]) == 0 and distance(ran[name], want[name]) == 0, name


def _beside(where, axis, op, a, b, x, vector, out):
    """A reduction or scan of a vector before, in or after a loop of matmuls."""
    size = {"m": 64, "n": 48, "p": 75}[axis]

    def made(start):
        return op(t.load(x, t.span(start, size, axis)), axis).cast(t.FP32)

    before = made(0) if where == "before" else None
    acc = t.zeros(m=64, n=48)
    total = t.zeros(**({axis: size} if op in TO_VECTORS.values() else {}))
    for k in t.loop(t.cdiv(t.size("k"), 16)):
        part = t.span(k * 16, 16)
        acc += t.load(a, t.span(0, 64, "m"), part) @ t.load(b, part, t.span(0, 48, "n"))
        if where == "in":
            total += made(k * size)
    total = made(0) if where == "after" else total if where == "in" else before
    t.store(vector, t.span(0, size, axis) if total.type.names else 0, tile=total)
    t.store(out, t.span(0, 64, "m"), t.span(0, 48, "n"), tile=acc)


@pytest.mark.parametrize("where", ["before", "in", "after"])
def test_vectors_beside_a_loop_of_matmuls_have_code(where):
    for kind in TYPES.values():
        for axis in SIZES:
            for op in (*TO_NUMBERS.values(), TO_VECTORS["cumsum"], TO_VECTORS["gather"]):
                arrays = {
                    "a": t.array(t.BF16, "m k"), "b": t.array(t.BF16, "k n"),
                    "x": t.array(kind, "long"), "vector": t.array(t.FP32, "some"),
                    "out": t.array(t.FP32, "m n"),
                }  # fmt: skip
                program = t.trace(partial(_beside, where, axis, op), arrays, name="beside")
                assert emitted(program, schedule_for(program, Policy(fitting_name(program)))).text


def _scaled(q, k, out):
    """q k^T with operands as they lie and made of them, and the sums of q's rows."""
    acc, rows = t.zeros(m=128, n=64), t.zeros(m=128, d=32)
    for i in t.loop(t.cdiv(t.size("d"), 32)):
        part = t.span(i * 32, 32)
        queries, keys = t.load(q, t.span(0, 128), part), t.load(k, t.span(0, 64), part)
        acc += queries @ keys
        acc += (queries.cast(t.FP32) * 0.5 + 1.0).cast(t.BF16) @ keys
        rows += queries.cast(t.FP32)
    acc += t.sum_along(rows, "d")
    t.store(out, t.span(0, 128), t.span(0, 64), tile=acc)


@pytest.mark.parametrize("groups", [1, 2])
def test_arithmetic_reads_a_matmuls_operand_in_its_slot(groups):
    arrays = {"q": t.array(t.BF16, "m d"), "k": t.array(t.BF16, "n d")}
    program = t.trace(_scaled, arrays | {"out": t.array(t.FP32, "m n")}, name="scaled")
    random = np.random.default_rng(6)
    values = {name: random.integers(-2, 3, (rows, 72)) for name, rows in (("q", 120), ("k", 60))}
    values["out"] = np.full((120, 60), np.nan)
    plan = LaunchPlan(split="m" if groups > 1 else "", store="direct")
    block = lowered(program, Policy("inflight", plan, groups=groups, depth=2))
    want = t.interpret(program, values)["out"]
    sources = [emit(block), emit_sm80(block)]
    # Planted fault: a slot goes back before all lanes have read it.
    early = replace(sources[0], text=sources[0].text.replace("__syncwarp();  // every", "// every"))
    library = emulate.compile_all([*sources, early], None)
    with pytest.raises(emulate.Fault):
        for seed in range(8):
            emulate.run(library, 2, early, program, values, seed=seed)
    for number, source in enumerate(sources):
        for seed in range(2):
            got = emulate.run(library, number, source, program, values, seed=seed)
            assert distance(got["out"], want) == 0
    assert distance(simulate(block, values, seed=1)["out"], want) == 0
