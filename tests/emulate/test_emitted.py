"""Emitted kernels whose stores wait for others: clean as they are, and not with a wait too few."""

from dataclasses import replace

import pytest

from bench.emulate import of_emitted
from bench.emulated.kinds import case, gemm_case, planted
from warploom.codegen.ir.plan import LaunchPlan
from warploom.emulate.kernel import Library
from warploom.kernels.gemm.program import GemmConfig

OVER = "stores over queries"


def three_panels():
    """A store of four panels through three slots: a meeting says that the next one is free."""
    plan = LaunchPlan(split="m", store_panels=3)
    return gemm_case(300, 256, 40, plan, GemmConfig(tile=(128, 256, 16)))


@pytest.fixture(scope="module")
def kernels():
    """(case, number in the library) by name, and the library."""
    panels, over = three_panels(), case(OVER)
    late = panels.source.text.replace("store_wait_read<1>", "store_wait_read<2>")
    assert late != panels.source.text
    sources = {
        "three panels": (panels, panels.source),
        "a store too few": (panels, replace(panels.source, text=late)),
        OVER: (over, over.source),
        "a slot given back": (over, planted(OVER, "bulk stores not waited for")),
        "unfenced": (over, planted(OVER, "no proxy fence after generic writes")),
    }
    return sources, Library([source for _, source in sources.values()])


def run(kernels, name, seed):
    """The fault of one run."""
    sources, library = kernels
    return of_emitted(library, list(sources).index(name), sources[name][0])(seed)


@pytest.mark.parametrize("name", ["three panels", OVER])
def test_kernels_that_wait_for_their_stores_run_clean(kernels, name):
    assert [run(kernels, name, seed) for seed in (1, 2)] == [None, None]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a store too few", "race"), ("a slot given back", "race"), ("unfenced", "proxy")],
)
def test_a_store_that_still_reads_is_found_in_the_first_order(kernels, name, kind):
    fault = run(kernels, name, 1)
    assert fault is not None and fault.kind == kind
