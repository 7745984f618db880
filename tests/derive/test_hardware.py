"""Numbers of 2412.03317 on hardware, computed from kernels and machine data."""

from __future__ import annotations

import pytest
from tests.derive.cases import loops

from warploom.derive.cost.gpu import gpu
from warploom.derive.cost.hardware import Recipe, ceiling, clock_table, configure, interval
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


def test_section_6_6_ampere() -> None:
    found = configure(
        attention(32), Recipe("q", row_tile=32, buffers=1, staging=False), gpu("a100")
    )
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
