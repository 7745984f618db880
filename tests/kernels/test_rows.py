"""Row operations as emitted for threads, on the emulated machine, against their interpretation."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from bench import row_plans
from warploom import tile as t
from warploom.codegen.compile.build import build
from warploom.codegen.cuda.simt.emit import emit_simt
from warploom.codegen.ir.plan import LaunchPlan
from warploom.codegen.simt.choose import simt
from warploom.codegen.simt.facts import simt_facts
from warploom.codegen.simt.schedule import SimtSchedule
from warploom.emulate.kernel import Library
from warploom.emulate.report import Fault
from warploom.errors import InputError, Spills
from warploom.kernels.rows import choose
from warploom.kernels.rows.choose import row_kernel, scaled_kernel, sums_kernel
from warploom.kernels.rows.plans import TABLE, RowPlan, plan_of, read_plans
from warploom.kernels.rows.program import OPS, RowConfig, rotary, row_program
from warploom.sass.decode.cubin import parse
from warploom.sass.decode.kernel import decode
from warploom.sass.flow.loops import natural_loops
from warploom.tile import BF16, FP32, INT32, interpret
from warploom.tile.widen import widened

PERSISTENT, AGAIN = LaunchPlan(), frozenset({"again"})
ALL = frozenset({"bias", "residual"})
GRID = LaunchPlan(persistent=False)


def small(
    lanes,
    vector,
    cluster=1,
    stages=1,
    launch=GRID,
    aligned=True,
    threads=64,
    staged=False,
    last=False,
):
    return SimtSchedule(
        "small", threads, lanes, vector, launch, cluster, stages, aligned, staged, last
    )


# name: operation, columns, rows, rows a task, options, schedule (None: the chosen one)
CASES = {
    "columns over a cluster": ("rmsnorm", 520, 5, 2, (), small(32, 8, cluster=2)),
    "several exchanges": ("softmax", 776, 3, 1, ("log",), small(64, 2, cluster=4)),
    "no whole lines": ("layernorm", 101, 5, 1, ALL, small(64, 4, aligned=False)),
    "tasks ahead": ("layernorm", 520, 9, 1, ALL, small(64, 8, 2, 3, PERSISTENT)),
    "tasks ahead in registers": ("softmax", 101, 9, 1, (), small(64, 1, 1, 2, PERSISTENT)),
    "a loop ahead": ("rmsnorm_backward", 264, 7, 1, ALL, small(32, 8, stages=3)),
    "a loop ahead in registers": ("rmsnorm_backward", 263, 7, 2, (), small(32, 1, stages=2)),
    "loaded again": ("layernorm_backward", 264, 7, 1, AGAIN, small(32, 8, 2, 2)),
    "several rows a sum": ("layernorm_backward", 264, 7, 2, AGAIN, small(64, 8, stages=2)),
    "picked": ("cross_entropy", 520, 6, 2, (), small(32, 8, cluster=2)),
    "picked in odd rows": ("cross_entropy", 101, 6, 1, (), None),
    "own class": ("cross_entropy_backward", 520, 6, 1, (), None),
    "gates": ("gated_backward", 72, 5, 1, ("gelu",), None),
    "fp8": ("quantised", 48, 5, 1, (), None),
    "fp8 of a norm": ("layernorm", 264, 5, 1, (*ALL, "fp8"), small(64, 8)),
    "dropout": ("rmsnorm", 264, 5, 2, ("residual", "dropout"), small(32, 8)),
    "dropout backward": (
        "layernorm_backward",
        264,
        7,
        1,
        ("residual", "dropout"),
        small(32, 8, 2, stages=2),
    ),
    "in place": ("cross_entropy_both", 520, 6, 1, (), small(64, 8)),
    "in place over a cluster": ("cross_entropy_both", 520, 6, 1, (), small(32, 8, cluster=2)),
    "one exchange": ("softmax", 1032, 3, 1, (), small(64, 8, cluster=2)),
    "staged": ("softmax", 1032, 3, 1, (), small(64, 8, cluster=2, staged=True)),
    "staged, two of them": ("softmax_backward", 520, 5, 2, (), small(32, 8, staged=True)),
    "staged, unaligned": ("layernorm", 264, 5, 2, ALL, small(32, 4, aligned=False, staged=True)),
    "staged over a cluster": ("rmsnorm", 2088, 5, 1, ALL, small(64, 8, 4, staged=True)),
    "staged and drawn": ("rmsnorm", 264, 5, 1, ("residual", "dropout"), small(64, 8, staged=True)),
    "staged to fp8": ("layernorm", 264, 5, 1, (*ALL, "fp8"), small(64, 8, staged=True)),
    "staged and picked": ("cross_entropy", 1032, 6, 1, (), small(64, 8, cluster=2, staged=True)),
    "staged in place": ("cross_entropy_both", 1032, 6, 1, (), small(64, 8, 2, staged=True)),
    "evicted last": ("rmsnorm", 264, 5, 2, ("residual",), small(32, 8, last=True)),
    "copies evicted last": ("rmsnorm_backward", 264, 7, 1, (), small(32, 8, stages=2, last=True)),
    "staged and evicted last": (
        "softmax_backward",
        520,
        5,
        1,
        (),
        small(64, 8, staged=True, last=True),
    ),
    "no line to evict last": ("softmax", 101, 6, 1, (), small(32, 1, last=True)),
    "staged logarithm": ("softmax", 776, 3, 1, ("log",), small(64, 8, staged=True)),
}


def case(name):
    op, columns, rows, each, options, schedule = CASES[name]
    program = row_program(RowConfig(op, columns, each, options=frozenset(options)))
    return (
        program,
        schedule or simt(program),
        {"m": rows, "n": columns, "parts": 3, "words": 2, "seeds": 2},
    )


def values_of(program, sizes):
    random, found = np.random.default_rng(1), {}
    for one in program.arrays:
        shape = [sizes[dim] for dim in one.dims]
        whole = one.dtype is INT32
        found[one.name] = random.integers(0, 20, shape) if whole else random.normal(size=shape)
        if whole:
            found[one.name][1] = -100
        elif one.name == "x" and program.name == "softmax":
            found[one.name][0, 64 : shape[1] // 2] = -np.inf  # of some warps all
    return found


@pytest.fixture(scope="module")
def library():
    return Library([emit_simt(*case(name)[:2], "sm_90a") for name in CASES])


@pytest.mark.parametrize("number", range(len(CASES)), ids=list(CASES))
def test_the_emitted_code_means_the_program(library, number):
    program, _, sizes = case(list(CASES)[number])
    values = values_of(program, sizes)
    scalars = {var.name: {"eps": 1e-6, "p": 0.3}[var.name] for var in program.scalars}
    want = interpret(program, values, scalars)
    got = library.run(number, program, values, scalars, blocks=4)
    for name, right in want.items():
        assert np.allclose(got[name], right, rtol=2**-6, atol=1e-5), name


LEFT_OUT = {
    "the fence behind the barriers": (
        "fence_barrier_init();\n  }",
        "}",
        "nothing orders its mbarrier",
    ),
    "the arrival of those who read": ("barrier_arrive_at(bar + 8, lane);", ";", "deadlock"),
    "a warp's reads before it": ("__syncwarp();\n    if (lane", "if (lane", "race"),
    "the wait for the other blocks": ("cluster_wait();\n  else", ";\n  else", "nothing orders its"),
}


@pytest.mark.parametrize("what", LEFT_OUT)
def test_an_exchange_of_blocks_without_its_order_is_found(what):
    program, schedule, sizes = case("tasks ahead")
    source = emit_simt(program, schedule, "sm_90a")
    there, instead, message = LEFT_OUT[what]
    assert there in source.text
    broken = replace(source, text=source.text.replace(there, instead))
    values = values_of(program, sizes)
    library = Library([broken])
    with pytest.raises(Fault, match=message):
        for seed in range(8):
            library.run(0, program, values, {"eps": 1e-6}, blocks=4, seed=seed)


def test_weights_are_no_others_in_a_later_pass():
    """The largest value is a warp's in the pass of the sum, and the row's in the next one."""

    def body(x, y):
        (i,) = t.grid(m=t.size("m"))
        at = t.span(i, 1), t.span(0, 520)
        tile = t.load(x, *at).cast(t.FP32)
        weights = t.exp(tile - t.max_along(tile, "n"))
        t.store(y, *at, tile=(weights * (1.0 / t.sum_along(weights, "n"))).cast(BF16))

    arrays = {name: t.array(BF16, "m n") for name in "xy"}
    program = t.trace(body, arrays, name="softmax")
    source = emit_simt(program, small(64, 8, staged=True), "sm_90a")
    assert "Weighted" in source.text
    values = values_of(program, {"m": 3, "n": 520})
    got = Library([source]).run(0, program, values, {}, blocks=4)["y"]
    assert np.allclose(got, interpret(program, values)["y"], rtol=2**-6, atol=1e-5)


def test_rotary_and_sums_on_the_emulated_machine():
    turned, placed = (
        rotary(RowConfig("rotary", 32, 4, options=frozenset({"pairs", "inverse", *more})))
        for more in ((), ("place",))
    )
    sums, schedule = sums_kernel(BF16)
    kernels = ((turned, simt(turned)), (placed, simt(placed)), (sums, schedule))
    made = Library([emit_simt(program, plan, "sm_90a") for program, plan in kernels])
    sizes = {"b": 2, "m": 6, "h": 2, "n": 16, "two": 2, "half": 16, "parts": 70}
    for number, (program, _) in enumerate(kernels):
        values = values_of(program, sizes)
        want = interpret(program, values)
        got = made.run(number, program, values, {}, blocks=4)
        result = "x" if program is placed else "y"
        assert np.allclose(got[result], want[result], rtol=2**-6, atol=1e-3)


@pytest.mark.parametrize("changes", [0, 1])
def test_scaling_in_place_on_the_emulated_machine(changes):
    program, schedule = scaled_kernel(BF16)
    values = values_of(program, {"n": 9000, "one": 1, "parts": 2})
    values["changes"], values["x"] = np.full(2, changes), t.round_to(BF16, values["x"])
    want = interpret(program, values)["x"]
    got = Library([emit_simt(program, schedule, "sm_90a")]).run(0, program, values, {}, blocks=2)
    assert np.array_equal(got["x"], want) and np.array_equal(want, values["x"]) == (not changes)


def test_a_class_is_picked_and_not_compared():
    program, schedule, _ = case("picked")
    facts = simt_facts(program, schedule, "sm_90a")
    ops = {op.id: op.kind for op in program.ops()}
    assert [ops[number] for number in facts.picks] == ["reduce_sum"]
    assert sorted(ops[number] for number in facts.idle) == ["eq", "where"]


def test_a_class_is_picked_of_rows_that_only_this_block_stores_over():
    picked = {}
    for name in ("in place", "in place over a cluster"):
        program, schedule, _ = case(name)
        picked[name] = len(simt_facts(program, schedule, "sm_90a").picks)
    assert list(picked.values()) == [1, 0]


def test_a_class_is_not_picked_where_rows_are_stored_before():
    def body(x, own, y):
        (i,) = t.grid(m=t.size("m"))
        rows, cols = t.span(i, 1), t.span(0, 512)
        tile = t.load(x, rows, cols)
        t.store(x, rows, cols, tile=tile * 2.0)
        named = t.load(own, rows).equals(t.coordinate("n", 512, 0))
        t.store(y, rows, tile=t.sum_along(t.where(named, tile, 0.0), "n"))

    arrays = {"x": t.array(FP32, "m n"), "own": t.array(INT32, "m"), "y": t.array(FP32, "m")}
    assert not simt_facts(t.trace(body, arrays, name="late"), small(64, 4), "sm_90a").picks


def test_a_barrier_is_between_reading_a_class_and_storing_over_it():
    program, _, _ = case("in place")
    text = emit_simt(program, small(32, 8), "sm_90a").text  # a warp a row: no exchange has one
    before, _, behind = text[text.index("extern") :].rpartition("__syncthreads();")
    assert "read_whole(one, x_data" in before and "write_whole<8>" not in before
    assert re.search(r"write_whole<8>\(&\w+\[i\]\[s \* 8\], x_data", behind)


def test_the_next_row_is_loaded_while_this_one_is_worked_on():
    """Where ptxas waits for loads behind the last of them, their time is hidden by nothing."""
    program = row_program(RowConfig("rmsnorm_backward", 5003))
    kernel = decode(parse(build(program, replace(simt(program), aligned=True)).cubin))
    (loop,) = (one for one in natural_loops(kernel) if len(one.blocks) > 4)
    inside = [
        one
        for block in loop.blocks
        for one in kernel.instructions[kernel.blocks[block].start : kernel.blocks[block].end]
    ]
    loads = [at for at, one in enumerate(inside) if one.line.opcode.startswith("LDG.E.U16")]
    boards = {inside[at].control.write_sb for at in loads}
    assert len(loads) == 20
    behind = inside[loads[-1] + 1 :]
    exchanged = next(at for at, one in enumerate(behind) if one.base == "BAR")
    assert not any(one.control.wait >> board & 1 for one in behind[:exchanged] for board in boards)


def test_lines_of_16_bytes_are_what_leaves_l2_last():
    found = {}
    for name in ("evicted last", "copies evicted last", "no line to evict last", "staged"):
        program, schedule, _ = case(name)
        text = emit_simt(program, schedule, "sm_90a").text
        body = text[text.index("extern") :]
        found[name] = [body.count(f"{call}_last") for call in ("read", "copy")]
    assert list(found.values()) == [[3, 0], [0, 4], [0, 0], [0, 0]]


def test_what_is_loaded_again_is_copied_once():
    program, schedule, _ = case("loaded again")
    ahead = simt_facts(program, schedule, "sm_90a").ahead
    assert len(ahead.copies) == 4 and len(ahead.slots) == 6


def test_a_softmax_over_warps_exchanges_once():
    for name, exchanges in (("one exchange", 1), ("picked", 1), ("several exchanges", 1)):
        program, schedule, _ = case(name)
        text = emit_simt(program, schedule, "sm_90a").text
        assert text[text.index("extern") :].count("combine_blocks<") == exchanges, name


def test_a_plan_is_of_the_nearest_row_that_was_measured():
    plans, rows = read_plans()
    fastest = {
        (r.op, tuple(r.options), r.columns): min(r.measured, key=r.measured.get) for r in rows
    }
    for (op, options, columns), name in fastest.items():
        config = RowConfig(op, columns, options=frozenset(options))
        assert plan_of(config) == plans[name] == plan_of(replace(config, columns=columns - 8))
        wide = replace(config, columns=columns // 2, dtype=FP32)
        assert plan_of(wide) == plans[name]
    near = plans[fastest["softmax", (), 131072]]
    assert plan_of(RowConfig("softmax", 131072 + 64)) == near
    assert plan_of(RowConfig("softmax", 262144)) is plan_of(RowConfig("softmax", 101)) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("[plans]", '[plans]\n"mine" = { threads = 64, lanes = 64 }'), "why mine is here"),
        (('measured = { "held', 'measured = { "un'), "a row tells of un-"),
        (('source = "NVIDIA', 'source = ""  # '), "of no source"),
    ],
)
def test_a_table_of_plans_is_what_was_measured(tmp_path, change, message):
    path = tmp_path / "tuned.toml"
    path.write_text(TABLE.read_text().replace(*change, 1))
    with pytest.raises(InputError, match=message):
        read_plans(path)


def test_a_table_keeps_few_plans_each_the_best_of_a_row_or_near_it(tmp_path):
    plans = {
        name: vars(RowPlan(threads, threads))
        for name, threads in zip("abc", (64, 128, 256), strict=True)
    }
    told = {"plans": plans, "device": "H200", "date": "2026-11-28", "case": "softmax"}
    times = {4096: (100.0, 100.5, 120.0), 8192: (130.0, 100.0, 120.0)}

    def recorded(times):
        lines = [
            told | {"columns": n, "us": dict(zip("abc", us, strict=True))}
            for n, us in times.items()
        ]
        (tmp_path / "run").write_text("".join(json.dumps(line) + "\n" for line in lines))
        row_plans.record([tmp_path / "run"], tmp_path / "tuned.toml")
        found, rows = read_plans(tmp_path / "tuned.toml")
        return set(found), {row.columns: dict(row.measured) for row in rows}

    assert recorded(times) == ({"b"}, {4096: {"b": 100.5}, 8192: {"b": 100.0}})
    again = recorded({4096: (100.0, 100.5, 50.0)})
    assert again == ({"b", "c"}, {4096: {"b": 100.5, "c": 50.0}, 8192: {"b": 100.0}})


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("columns", [64, 1000, 5003, 8192, 65536, 131072])
def test_every_length_has_a_schedule_that_fits(op, columns):
    program, schedule, rows = row_kernel(RowConfig(op, columns))
    simt_facts(program, schedule, "sm_90a")
    assert (schedule.rows >= rows or rows % schedule.rows == 0) and schedule.vector in (1, 8, 16)


def test_a_cluster_does_not_move_elements_between_columns():
    program = row_program(RowConfig("softmax", 64))
    with pytest.raises(InputError, match="clusters have code for sm_90, not sm_80"):
        simt_facts(program, small(32, 1, cluster=2), "sm_80")


def weighted(body):
    """The sums of a row program that take one exchange, under a schedule of two warps a row."""
    specs = {name: t.array(t.FP32, dims) for name, dims in (("x", "m n"), ("y", "m n"), ("z", "m"))}

    def whole(x, y, z):
        (i,) = t.grid(m=t.size("m"))
        rows, cols = t.span(i, 1), t.span(0, 512)

        def put(tile):
            t.store(*((y, rows, cols) if len(tile.var.type.axes) == 2 else (z, rows)), tile=tile)

        body(t.load(x, rows, cols), put)

    program = t.trace(whole, specs, name="weighted")
    return simt_facts(program, small(64, 4), "sm_90a").weighted


def both(x, scale=1.0, minus=1.0):
    """The largest value of a row, and exponentials below it."""
    top = t.max_along(x, "n")
    return top, t.exp2(x * scale - top * minus)


def softmax(x, put):
    _, weights = both(x, 2.0, 2.0)
    put(weights * (1.0 / t.sum_along(weights, "n")))


def exponentials_of_e(x, put):
    top = t.max_along(x, "n")
    put(top + t.log(t.sum_along(t.exp(x - top), "n")))


def stored_weights(x, put):
    _, weights = both(x)
    put(weights)
    put(t.sum_along(weights, "n"))


def weights_used_before(x, put):
    _, weights = both(x)
    put(weights * 2.0)
    put(t.sum_along(weights, "n"))


def weights_of_tiles(x, put):
    _, weights = both(x)
    put(t.sum_along(weights, "n"))
    put(weights * x)


def weights_added_to(x, put):
    _, weights = both(x)
    put(weights + t.sum_along(weights, "n"))


def top_read_in_a_loop(x, put):
    top, weights = both(x)
    for _ in t.loop(2):
        put(top)
    put(t.sum_along(weights, "n"))


def another_scale(x, put):
    put(t.sum_along(both(x, 2.0)[1], "n"))


def negative_scale(x, put):
    put(t.sum_along(both(x, -1.0, -1.0)[1], "n"))


def top_read_before(x, put):
    top, weights = both(x)
    put(top)
    put(t.sum_along(weights, "n"))


def top_of_another_tile(x, put):
    top = t.max_along(x + 1.0, "n")
    put(t.sum_along(t.exp2(x - top), "n"))


@pytest.mark.parametrize(("body", "sums", "products"), [(softmax, 1, 1), (exponentials_of_e, 1, 0)])
def test_sums_that_take_one_exchange(body, sums, products):
    found = weighted(body)
    assert (len(found.sums), len(found.tops), len(found.products)) == (sums, sums, products)


@pytest.mark.parametrize(
    "body",
    [
        stored_weights,
        weights_used_before,
        weights_of_tiles,
        weights_added_to,
        top_read_in_a_loop,
        another_scale,
        negative_scale,
        top_read_before,
        top_of_another_tile,
    ],
)
def test_sums_that_need_the_largest_value_of_the_row_first(body):
    assert not weighted(body).sums


def test_a_block_of_one_task_asks_for_its_rows_at_once():
    program, schedule, _ = row_kernel(RowConfig("cross_entropy", 4096))
    text = emit_simt(program, schedule, "sm_90a").text
    code = text[text.index("extern") :]
    assert "for (int task" not in code and " % " not in code[: code.index("read_early")]
    asked = re.findall(r"read_early<(\w+)>\(lines", code)
    assert asked == ["false", "true"]  # the class, then the row, which nobody else reads


@pytest.mark.parametrize(
    ("op", "early", "once"),
    [("cross_entropy", 2, 1), ("softmax", 1, 0), ("rmsnorm", 2, 0), ("rmsnorm_backward", 0, 0)],
)
def test_which_loads_stay_in_place_and_which_pass_by_l1(op, early, once):
    program = row_program(RowConfig(op, 4096))
    facts = simt_facts(program, replace(simt(program), aligned=True), "sm_90a")
    assert (len(facts.early), len(facts.early & facts.once)) == (early, once)


def test_a_kernel_that_spills_gets_more_registers_then_more_threads(monkeypatch):
    tried = []

    def build(program, schedule, arch):
        tried.append((schedule.launch.resident, schedule.threads))
        if len(tried) < enough:
            raise Spills(f"try {len(tried)}")
        return schedule

    monkeypatch.setattr(choose, "build", build)
    monkeypatch.setattr(choose, "plan_of", lambda config: None)
    enough = 4
    assert choose.built_rows(RowConfig("softmax", 16384)).threads == 512
    assert tried == [(3, 256), (2, 256), (1, 256), (1, 512)]
    enough = 9
    with pytest.raises(Spills, match="try 5"):
        choose.built_rows(RowConfig("softmax", 16384))


GRADIENTS = {
    "rmsnorm": (),
    "rmsnorm again": ("bias", "residual"),
    "rmsnorm dropout": ("residual", "dropout"),
    "layernorm": ("bias",),
    "layernorm again": ("residual",),
    "layernorm dropout": ("residual", "dropout"),
    "softmax": (),
    "softmax log": ("log",),
    "cross_entropy": (),
    "gated": (),
    "gated gelu": ("gelu",),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_the_slopes_of_the_forward_pass(name):
    """Central differences of the forward program in float64, along a random direction of every
    operand, beside what the backward program says of it."""
    op, options = name.split()[0], frozenset(GRADIENTS[name])
    random, scalars = np.random.default_rng(5), {"eps": 1e-3, "p": 0.3}
    sizes = {"m": 3, "n": 24, "parts": 2, "words": 1, "seeds": 2}

    def run(which, more, values):
        program = widened(row_program(RowConfig(which, 24, options=frozenset(more))))
        given = {var.name: scalars[var.name] for var in program.scalars}
        shapes = {one.name: [sizes[dim] for dim in one.dims] for one in program.arrays}
        results = {key: np.zeros(shape) for key, shape in shapes.items()}
        return interpret(program, results | {k: values[k] for k in shapes if k in values}, given)

    names = {"gated": ("gate", "up"), "cross_entropy": ("x",), "softmax": ("x",)}
    extra = [("bias", "b"), ("residual", "residual")]
    operands = names.get(op) or ("x", "w", *(what for option, what in extra if option in options))
    values = {key: random.normal(size=24 if key in "wb" else (3, 24)) for key in operands}
    values |= {"seed": np.array([3, 5]), "target": np.array([[4], [-100], [23]])}
    results = [key for key in ("y", "summed", "loss") if key in run(op, options, values)]
    weights = {key: random.normal(size=(3, 24)[: 1 + (key != "loss")]) for key in results}

    def total(values):
        made = run(op, options, values)
        return sum(float((weights[key] * made[key]).sum()) for key in results)

    made = run(op, options, values)
    kept = {key: made[key] for key in ("y", "rstd", "mean", "lse") if key in made}
    given = values | kept | {"dy": weights.get("y"), "dloss": weights.get("loss")}
    if "summed" in made:
        given |= {"x": made["summed"], "dsummed": weights["summed"]}
    more = options | ({"again"} if "again" in name else set())
    found = run(f"{op}_backward", more - {"bias"} if op == "softmax" else more, given)
    gradients = {
        "x": "dx", "w": "dw_parts", "b": "db_parts", "gate": "dgate", "up": "dup",
        "residual": "dresidual" if "dropout" in options else "dx",
    }  # fmt: skip
    for key in operands:
        along, step = random.normal(size=values[key].shape), 1e-5
        ahead, back = (total(values | {key: values[key] + way * along}) for way in (step, -step))
        said = found[gradients[key]]
        said = said.sum(0) if "parts" in gradients[key] else said
        assert np.isclose((said * along).sum(), (ahead - back) / (2 * step), rtol=1e-6), key
