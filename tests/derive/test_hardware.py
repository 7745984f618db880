"""Numbers of 2412.03317 on hardware, computed from kernels and machine data."""

from __future__ import annotations

import pytest
from tests.derive.cases import loops

from warploom.derive.cost import balance as h
from warploom.derive.cost.gpu import gpu
from warploom.derive.cost.hardware import (
    Recipe,
    ceiling,
    clock_table,
    compute_seconds,
    configure,
    interval,
    stream_seconds,
    utilisation,
    warps_by_registers,
)
from warploom.derive.formula.library import formula
from warploom.derive.kernel.kernel import Kernel
from warploom.derive.kernel.legal import make_kernel
from warploom.derive.lemmas.cascade import Refusal
from warploom.errors import InputError

H100 = gpu("h100")
MIXED = Recipe("q", dtypes=(("Q", "fp8"), ("K", "fp8"), ("V", "fp16")))


def attention(rows: int = 384, keys: int = 64) -> Kernel:
    """A toy Hopper kernel."""
    made = make_kernel(formula("attention"), loops("g_q s_x"))
    assert not isinstance(made, Refusal)
    return made.tiled({"g_q": rows, "s_x": keys})


def test_section_5_balance() -> None:
    r = h.balance(H100.dram_rate, H100.flops("fp16"), "fp16")
    assert H100.flops("fp16") == pytest.approx(989.4e12, rel=1e-3)
    assert H100.dram_rate / 2 == pytest.approx(1.675e12)
    assert h.least_memory(r) * 2 / 1024 == pytest.approx(681.5, abs=0.1)
    assert h.least_depth(r) == pytest.approx(295.3, abs=0.1)
    shared = h.balance(12e12, H100.flops("fp16"), "fp16")
    assert h.least_depth(shared) == pytest.approx(82.5, abs=0.1)
    assert h.least_depth(shared, H100.values("fp16", "store")) == pytest.approx(151.4, abs=0.1)
    with pytest.raises(InputError, match="long enough"):
        h.least_depth(r, 100)


@pytest.mark.parametrize(
    ("name", "flops", "rows", "exp"),
    [
        ("a100", 2048, 153, 4.06),
        ("h100", 4096, 295, 4.06),
        ("h200", 4096, 206, 4.06),
        ("b200", 8192, 281, 4.06),
    ],
)
def test_section_5_gpu_table(name: str, flops: int, rows: int, exp: float) -> None:
    machine = gpu(name)
    assert machine.tensor["fp16"] == flops
    # A query row spends 4 d FLOP on a key whose K and V bring 2 d values.
    assert machine.flops("fp16") / machine.dram_rate == pytest.approx(rows, rel=0.005)
    uses = clock_table(attention(), Recipe("q"), machine)
    clocks = interval(uses)
    assert clocks["special"] == pytest.approx(exp, abs=0.005)
    assert clocks["tensor"] == pytest.approx(2 * 2 * 64 * 128 / flops)
    assert (clocks["special"] > clocks["tensor"]) == (name == "b200")


def test_section_6_3_configuration() -> None:
    found = configure(attention(), MIXED, H100)
    assert found.shared_per_block == 48 * 1024
    assert found.shared_per_group == 48 * 1024
    assert found.registers_per_group / 1024 == 74.75
    assert found.registers_per_group / 128 == 598
    assert found.by_shared == pytest.approx(3.73, abs=0.01)
    assert found.by_registers == pytest.approx(3.42, abs=0.01)
    assert found.groups == 3
    sizes = {v.name: v.bytes / 128 for v in found.variables if v.place == "registers"}
    assert sizes == {
        "out~": 256,
        "contract": 128,
        "e": 128,
        "slice 32": 64,
        "slice 8": 16,
        "statistics": 6,
    }


def test_section_6_4_throughput() -> None:
    uses = clock_table(attention(), MIXED, H100)
    table = {u.operation: (u.count, u.rate, u.clocks) for u in uses}
    assert table["contract"] == (16384, 8192, 2)
    assert table["e"] == (65, 16, 4.0625)
    assert table["out~"] == (16384, 4096, 4)
    assert table["rescale out~"] == (256, 512, 0.5)
    clocks = interval(uses)
    assert clocks["tensor"] == 6 and clocks["tensor"] - clocks["special"] == pytest.approx(
        1.94, abs=0.005
    )
    assert ceiling(uses, H100) == pytest.approx(1.319e15, rel=1e-3)
    assert stream_seconds(
        attention(), Recipe("q", dtypes=MIXED.dtypes, buffers=1), H100
    ) == pytest.approx(0.968e-6, rel=1e-3)
    assert compute_seconds(uses, 384, H100) == pytest.approx(1.259e-6, rel=1e-3)
    even = stream_seconds(attention(), MIXED, H100) / compute_seconds(uses, 1, H100)
    assert even == pytest.approx(295.4, abs=0.1)


def test_section_6_5_and_6_6() -> None:
    assert utilisation(8, 4, 2 / 3, 4) == pytest.approx(0.75)
    assert utilisation(4, 4, 2 / 3, 0) == pytest.approx(0.60)
    a100 = gpu("a100")
    assert warps_by_registers(598, a100) == 13
    assert warps_by_registers(4 * 255, a100) == 8
    assert warps_by_registers(585, a100) == 14 and warps_by_registers(630, a100) == 13
    ampere = Recipe("q", row_tile=32, buffers=1, staging=False)
    found = configure(attention(32), ampere, a100)
    # Q fp16 8 KB for each warp, K and V fp16 of 64 keys once
    assert found.shared_per_group * 13 + found.shared_per_block == 136 * 1024
    assert found.groups == 13


def test_bad_recipes_are_refused() -> None:
    with pytest.raises(InputError, match="no axis"):
        configure(attention(), Recipe("y"), H100)
    with pytest.raises(InputError, match="halve"):
        configure(attention(keys=2048), MIXED, H100)
    with pytest.raises(InputError, match="known are"):
        gpu("h900")
    with pytest.raises(InputError, match="tensor core"):
        gpu("a100").flops("fp8")
    with pytest.raises(InputError, match="element type"):
        H100.values("fp7")
