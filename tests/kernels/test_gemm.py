"""GEMM on the interpreter against float64: storage orders, epilogues, ragged sizes, specials."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.codegen import emulate
from tests.gpu.cases import distance
from tests.lowering import lowered

from warploom import tile as t
from warploom.autosched.plans import ADDING
from warploom.autosched.schedules import Policy, schedule_for
from warploom.codegen.cuda.emit import emit
from warploom.codegen.cuda.simt.emit import emit_simt
from warploom.codegen.ir.plan import LaunchPlan
from warploom.codegen.ir.steps import Join, Release, Run
from warploom.codegen.oracle.barriers import PhaseBarrier
from warploom.codegen.oracle.simulate import simulate
from warploom.codegen.passes.lower import lower
from warploom.errors import CheckFailed, InputError
from warploom.kernels.gemm.program import ACTIVATIONS, GemmConfig, combine, default_policy, gemm
from warploom.kernels.gemm.reference import reference
from warploom.tile.interpret import bind


def error_of(config, m, n, k, seed=0):
    rng = np.random.default_rng(seed)
    lead = (2,) if config.batched else ()
    shapes = {"m": m, "n": n, "k": k, "batch": 2, "one": 1, "slices": config.slices}
    specs = {**config.arrays, **config.epilogue}
    arrays = {
        name: rng.normal(size=tuple(shapes[d] for d in spec.dims)) for name, spec in specs.items()
    }
    arrays["c"] = np.full((*lead, m, n), np.nan)
    program = gemm(config)
    bound = bind(program, arrays)
    got = t.interpret(program, arrays)
    if config.workspace:
        second = combine(config)
        bound |= bind(second, {**arrays, "parts": got["parts"]})
        got = t.interpret(second, {**arrays, "parts": got["parts"]})
    got, want = got["c"], reference(config, bound)
    assert got.shape == want.shape and not np.isnan(got).any()
    return np.linalg.norm(got - want) / (np.linalg.norm(want) or 1.0)


@settings(max_examples=40, deadline=None)
@given(
    m=st.integers(1, 70), n=st.integers(1, 70), k=st.integers(0, 70),
    a=st.sampled_from(["mk", "km"]), b=st.sampled_from(["kn", "nk"]),
    dtype=st.sampled_from([t.BF16, t.FP16, t.E4M3]), bias=st.booleans(),
    activation=st.sampled_from(sorted(ACTIVATIONS)), residual=st.booleans(), batched=st.booleans(),
    scale=st.sampled_from([1.0, 0.25]), scales=st.sampled_from(["", "one", "rows"]),
    gate=st.booleans(),
    dual=st.booleans(), promote=st.booleans(), slices=st.sampled_from([1, 1, 3]),
    flying=st.integers(1, 3), swap_ab=st.booleans(), in_cluster=st.booleans(),
)  # fmt: skip
def test_gemm_is_close_to_float64_at_any_size(
    m, n, k, a, b, dtype, activation, bias, residual, batched, scale, scales, gate, dual, promote,
    slices, flying, swap_ab, in_cluster,
):  # fmt: skip
    plain = slices == 1
    config = GemmConfig(
        dtype=dtype, a=a, b=b, activation=activation, bias=bias, residual=residual,
        batched=batched and plain and scales != "rows", scale=scale, scales=scales == "one",
        row_scales=scales == "rows", gate=gate, dual=dual and plain,
        promote=promote, slices=slices, tile=(32, 32, 16) if plain else (24, 24, 16),
        swap_ab=swap_ab, in_cluster=in_cluster and not plain,
        products_in_flight=flying if promote and not (dual and plain) else 1,
    )  # fmt: skip
    assert error_of(config, m, n, k) < 4e-3


def test_nan_and_inf_go_where_the_reference_puts_them():
    config = GemmConfig(tile=(32, 32, 16))
    a, b = np.ones((40, 20)), np.ones((20, 36))
    a[3, 4], b[2, 5] = np.nan, np.inf
    program = gemm(config)
    arrays = {"a": a, "b": b, "c": np.zeros((40, 36))}
    got = t.interpret(program, arrays)["c"]
    assert np.array_equal(np.isnan(got), np.isnan(reference(config, arrays)))
    assert np.array_equal(np.isinf(got), np.isinf(reference(config, arrays)))


PAIRS = GemmConfig(promote=True, products_in_flight=2, tile=(128, 64, 16))


@pytest.mark.parametrize("k", [8, 16, 56, 100])
def test_products_started_in_pairs_have_rings_of_their_own(k):
    launch = LaunchPlan(split="m", cluster=("m_tile", 2), supergroup=8, store_panels=1)
    block = lowered(gemm(PAIRS), Policy("lcsf", launch, groups=2, depth=3))
    assert [ring.name for ring in block.rings] == ["a_b", "a_b_2"]
    rng = np.random.default_rng(k)
    arrays = {"a": rng.normal(size=(264, k)), "b": rng.normal(size=(k, 136))}
    arrays["c"] = np.full((264, 136), np.nan)
    got = simulate(block, arrays, seed=k)["c"]
    assert got.tobytes() == t.interpret(gemm(PAIRS), arrays)["c"].tobytes()


@pytest.mark.parametrize(
    "config",
    [
        PAIRS,
        replace(PAIRS, products_in_flight=1),
        replace(PAIRS, products_in_flight=3),
        GemmConfig(tile=(128, 64, 16)),
    ],
)
def test_slots_given_back_before_the_additions_give_the_sequential_result(config):
    """Every slot, as soon as the group waited for its product."""
    launch = LaunchPlan(split="m", cluster=("m_tile", 2), store_panels=1)
    schedule = schedule_for(gemm(config), Policy("lcsf-early", launch, groups=2, depth=2))
    block = lower(gemm(config), schedule)
    kinds = [type(step) for step in block.roles[1].sections[1].steady]
    assert kinds.count(Release) == config.products_in_flight
    for at, kind in enumerate(kinds):
        if kind is Release:
            assert kinds[at - 1] is Join
            assert kinds[at + 1 : at + 2] == ([Run] if config.promote else [])
    rng = np.random.default_rng(3)
    arrays = {"a": rng.normal(size=(264, 100)), "b": rng.normal(size=(100, 136))}
    arrays["c"] = np.full((264, 136), np.nan)
    got = simulate(block, arrays, seed=7)["c"]
    assert got.tobytes() == t.interpret(gemm(config), arrays)["c"].tobytes()


@pytest.mark.parametrize(
    "config",
    [
        GemmConfig(swap_ab=True, tile=(88, 128, 16), bias=True, gate=True, activation="silu"),
        GemmConfig(swap_ab=True, tile=(72, 128, 16), a="km", b="nk", residual=True, batched=True),
        GemmConfig(swap_ab=True, tile=(40, 128, 16), slices=2),
        GemmConfig(swap_ab=True, tile=(24, 128, 16), dual=True, out=t.FP32),
        GemmConfig(tile=(128, 72, 16), bias=True),
    ],
)
@pytest.mark.parametrize("axis", ["m_tile", "n_tile"])
def test_a_transposed_product_gives_the_sequential_result(config, axis):
    """Bit for bit, also where a cluster's blocks copy unequal parts of a tile."""
    program = gemm(config)
    launch = LaunchPlan(split="n" if config.swap_ab else "m", cluster=(axis, 2), store_rows=8)
    block = lowered(program, Policy("inflight", launch, groups=2, depth=2, registers=(40, 232)))
    emit(block)
    m, n, k = 2 * config.tile[0] + 5, config.tile[1] + 24, 40
    shapes = {"m": m, "n": n, "k": k, "batch": 2, "one": 1, "slices": config.slices}
    rng = np.random.default_rng(1)
    specs = config.arrays
    arrays = {
        name: rng.normal(size=tuple(shapes[d] for d in spec.dims)) for name, spec in specs.items()
    }
    into = "parts" if config.workspace else "c"
    arrays[into].fill(np.nan)
    got = simulate(block, arrays, seed=2)[into]
    assert got.tobytes() == t.interpret(program, arrays)[into].tobytes()
    plain = t.interpret(gemm(replace(config, swap_ab=False)), arrays)[into]
    assert np.array_equal(got, plain)


def test_the_second_kernel_of_slices_means_what_its_program_means(tmp_path):
    """Its text, run on a CPU; it begins before the sums are there, and waits for them."""
    config = GemmConfig(slices=3, bias=True, activation="gelu", residual=True)
    program, schedule = combine(config), ADDING
    text = emit_simt(program, schedule, "sm_90a").text
    body = text[text.index("{\n  extern") :]
    assert body.index("start_next_grid();") < body.index("wait_previous_grid();")
    assert body.index("wait_previous_grid();") < body.index("_data")  # it reads nothing before
    with pytest.raises(InputError, match="dependent launch has code for sm_90, not sm_80"):
        emit_simt(program, schedule, "sm_80")
    launch = schedule.launch.with_options(dependent=False)
    source = emit_simt(program, replace(schedule, launch=launch), "sm_90a")
    library = emulate.compile_all([source], tmp_path)
    rng = np.random.default_rng(4)
    m, n = 6, 137
    arrays = {
        "parts": rng.normal(size=(3, m, n)), "bias": rng.normal(size=n),
        "residual": rng.normal(size=(m, n)), "c": np.full((m, n), np.nan),
    }  # fmt: skip
    got = emulate.run(library, 0, source, program, arrays, {})["c"]
    assert distance(got, t.interpret(program, arrays)["c"]) <= 1e-2


TOGETHER = [
    (GemmConfig(slices=4, in_cluster=True, tile=(128, 64, 16), bias=True), 2),
    (GemmConfig(slices=2, in_cluster=True, swap_ab=True, tile=(48, 128, 16), residual=True), 2),
    (GemmConfig(slices=8, in_cluster=True, tile=(64, 128, 16)), 1),
    (GemmConfig(slices=6, in_cluster=True, tile=(64, 64, 16), bias=True), 1),
    (GemmConfig(slices=5, in_cluster=True, swap_ab=True, tile=(24, 128, 16)), 2),
]


@pytest.mark.parametrize(("config", "groups"), TOGETHER)
def test_slices_reduced_in_a_cluster_give_the_sequential_result(config, groups):
    """Several tasks a block, some without an iteration; the sums are those of all slices."""
    program = gemm(config)
    launch = LaunchPlan(
        split="n" if config.swap_ab else "m", cluster=("slices_tile", config.slices)
    )
    block = lowered(
        program, Policy("inflight", launch, groups=groups, depth=2, registers=(40, 216))
    )
    assert "multicast" not in emit(block).text
    m, n, k = config.tile[0] + 9, config.tile[1] + 8, 16 * (config.slices + 1)
    shapes = {"m": m, "n": n, "k": k}
    rng = np.random.default_rng(2)
    arrays = {
        name: rng.normal(size=tuple(shapes[d] for d in spec.dims))
        for name, spec in config.arrays.items()
    }
    arrays["c"].fill(np.nan)
    got = simulate(block, arrays, seed=5)["c"]
    assert got.tobytes() == t.interpret(program, arrays)["c"].tobytes()
    whole = t.interpret(gemm(replace(config, slices=1, in_cluster=False)), arrays)["c"]
    assert np.allclose(got, whole, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("fault", ["full", "free"])
def test_a_cluster_reduction_that_does_not_wait_is_found(fault, monkeypatch):
    """Planted faults: parts read before they are there, and pushed over ones not read."""
    config, groups = TOGETHER[0]
    program = gemm(config)
    launch = LaunchPlan(split="m", cluster=("slices_tile", 4))
    block = lowered(program, Policy("inflight", launch, groups=groups, depth=2))
    arrays = {"a": np.ones((300, 64)), "b": np.ones((64, 80)), "bias": np.ones(80)}
    arrays["c"] = np.zeros((300, 80))
    passed = PhaseBarrier.passed

    def hasty(self, parity):
        meets = " group " in self.name and self.name.endswith(fault)
        return meets or passed(self, parity)

    monkeypatch.setattr(PhaseBarrier, "passed", hasty)
    with pytest.raises(CheckFailed, match=r"race|left in phase|more bytes"):
        for seed in range(20):
            simulate(block, arrays, seed=seed)


def _narrow(a, b, c):
    part, m = t.grid(slices=4, m=t.cdiv(t.size("m"), 128))
    rows, acc = t.span(m * 128, 128), t.zeros(m=128, n=16)
    for i in t.loop(t.cdiv(t.size("k"), 16)):
        acc += t.load(a, rows, t.span(i * 16, 16)) @ t.load(b, t.span(i * 16, 16), t.span(0, 16))
    share = t.reduce_scatter(acc, part, 4, "n", 4)
    t.store(c, rows, t.span(part * 4, 4), tile=share.cast(t.BF16))


def test_cluster_reductions_that_cannot_be_are_refused():
    config, groups = TOGETHER[0]
    program = gemm(config)
    for launch in (LaunchPlan(split="m"), LaunchPlan(split="m", cluster=("slices_tile", 2))):
        with pytest.raises(InputError, match="so they must be a cluster"):
            emit(lowered(program, Policy("inflight", launch, groups=groups, depth=2)))
    narrow = t.trace(_narrow, GemmConfig().arrays, name="narrow")
    launch = LaunchPlan(split="m", store="direct", cluster=("slices_tile", 4))
    with pytest.raises(InputError, match="parts of a multiple of 8"):
        emit(lowered(narrow, Policy("inflight", launch, groups=groups, depth=2)))
    with pytest.raises(InputError, match="expected a width that 42 is a multiple of"):
        gemm(replace(config, tile=(128, 42, 16)))
    with pytest.raises(InputError, match="expected at least 2"):
        GemmConfig(in_cluster=True)


def test_bad_configs_are_refused():
    with pytest.raises(InputError, match="1 unless promoted"):
        GemmConfig(products_in_flight=2)
    with pytest.raises(InputError, match=r"expected mk|km"):
        GemmConfig(a="nm")
    with pytest.raises(InputError, match="expected one of"):
        GemmConfig(activation="swish")


@pytest.mark.parametrize(
    "config",
    [
        GemmConfig(),
        GemmConfig(swap_ab=True, tile=(152, 256, 64)),
        GemmConfig(slices=8, in_cluster=True, tile=(128, 64, 64)),
        GemmConfig(slices=4, tile=(128, 128, 64)),
    ],
)
def test_every_form_of_the_program_has_a_schedule_of_its_own(config):
    """What `warploom build gemm --set ...` takes when no variant is named."""
    assert emit(lowered(gemm(config), default_policy(config))).shared_bytes <= 232448


@pytest.mark.parametrize("order", ["inflight", "lcsf-behind"])
def test_an_order_that_would_hang_is_refused(order):
    """With a matmul in flight its slot is given back behind the next one, which needs another."""
    program, one = gemm(GemmConfig()), {"a": 1, "b": 1}
    assert schedule_for(program, Policy(order, depth=2))
    with pytest.raises(InputError, match="it would hang, as this order waits for a_b before it"):
        schedule_for(program, Policy(order, slots=one, depth=2))
    assert schedule_for(program, Policy("multistage", slots=one))
