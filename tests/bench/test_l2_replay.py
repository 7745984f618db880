"""The replay of a dispatch through L2: brute force, laws, planted faults."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.derive.cases import kernel

from bench import counters
from bench.l2_replay import Level2, TaskOrder, compulsory_bytes, dram_bytes, task_order
from warploom.derive.cost.counts import exact_transfers
from warploom.derive.kernel.kernel import Kernel
from warploom.errors import CheckFailed, InputError

BENCH = Path(__file__).resolve().parents[2] / "bench"


def matmul(a: int, b: int, c: int, tile: int, step: int) -> Kernel:
    made = kernel("matmul", "g_a g_c s_b").resized({"a": a, "b": b, "c": c})
    return made.tiled({"g_a": min(tile, a), "g_c": min(tile, c), "s_b": min(step, b)})


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 30),
    st.integers(1, 20),
    st.integers(1, 30),
    st.integers(1, 9),
    st.integers(1, 5),
    st.integers(1, 7),
    st.integers(0, 4),
)
def test_requests_are_the_exact_transfers_and_a_large_cache_reads_once(
    a: int, b: int, c: int, tile: int, step: int, workers: int, band: int
) -> None:
    made = matmul(a, b, c, tile, step)
    order = TaskOrder(workers, supergroup=band)
    moved = dram_bytes(made, order, Level2(1e9, 2), 1.0)
    exact = exact_transfers(made)
    assert moved.requested == exact["A"] + exact["B"]
    assert moved.stored == exact["out (store)" if "out (store)" in exact else "C (store)"]
    assert moved.read == a * b + b * c and moved.written == 0
    none = dram_bytes(made, order, Level2(0.0), 1.0)
    assert none.read <= none.requested
    some = dram_bytes(made, order, Level2(float(a * b)), 1.0)
    assert compulsory_bytes(made, 1.0) - a * c <= some.read <= moved.requested


def test_one_worker_and_one_item_match_a_hand_written_lru() -> None:
    made = matmul(4, 6, 4, 2, 2)
    order: list[tuple[str, int, int]] = []
    for i in range(2):
        for j in range(2):
            for k in range(3):
                order += [("A", i, k), ("B", k, j)]
            order.append(("C", i, j))
    for slots in range(1, 14):
        held: list[tuple[str, int, int]] = []
        read = written = 0
        dirty: set[tuple[str, int, int]] = set()
        for item in order:
            if item in held:
                held.remove(item)
            else:
                read += 4 * (item[0] != "C")
                if len(held) == slots:
                    gone = held.pop(0)
                    written += 4 * (gone in dirty)
            held.append(item)
            dirty |= {item} if item[0] == "C" else set()
        moved = dram_bytes(made, TaskOrder(1), Level2(4.0 * slots), 1.0)
        assert (moved.read, moved.written) == (read, written)


def test_shared_data_fits_one_partition_only() -> None:
    made = matmul(2, 40, 2, 1, 1)
    pair = TaskOrder(2)
    assert dram_bytes(made, pair, Level2(1000.0, 1), 1.0).read == 160
    both = dram_bytes(made, TaskOrder(4), Level2(160.0, 2), 1.0)
    assert both.read == 160
    again = made.resized({"a": 8}).tiled({"g_a": 1, "g_c": 1, "s_b": 1})
    one = dram_bytes(again, pair, Level2(190.0, 1), 1.0).read
    two = dram_bytes(again, pair, Level2(190.0, 2), 1.0).read
    assert two > one


def test_what_others_wrote_goes_to_dram_once_it_is_displaced() -> None:
    made = matmul(4, 6, 4, 2, 2)
    quiet = dram_bytes(made, TaskOrder(1), Level2(1000.0, 2, foreign=40.0), 1.0)
    assert quiet.written == 0
    full = dram_bytes(made, TaskOrder(1), Level2(50.0, 2), 1.0)
    shared = dram_bytes(made, TaskOrder(1), Level2(50.0, 2, foreign=40.0), 1.0)
    assert shared.written == full.written + 40
    assert shared.read >= full.read


def test_task_order_visits_everything_once_in_bands() -> None:
    for order in (
        TaskOrder(3),
        TaskOrder(3, supergroup=2),
        TaskOrder(3, supergroup=3, grouped="all"),
    ):
        seen = [tuple(p.values()) for p in task_order({"h": 2, "a": 5, "c": 3}, order)]
        assert sorted(seen) == [(h, a, c) for h in range(2) for a in range(5) for c in range(3)]
    band = [tuple(p.values()) for p in task_order({"a": 4, "c": 2}, TaskOrder(1, supergroup=2))]
    assert band == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)]
    back = [tuple(p.values()) for p in task_order({"a": 3}, TaskOrder(1, reverse=("a",)))]
    assert back == [(2,), (1,), (0,)]


def test_bad_walks_and_kernels_are_refused() -> None:
    with pytest.raises(InputError, match="at least 1"):
        TaskOrder(0)
    with pytest.raises(InputError, match="two group axes"):
        list(task_order({"a": 3}, TaskOrder(1, supergroup=2)))
    with pytest.raises(InputError, match="no split"):
        split = kernel("matmul", "g_a g_c w_b s_b").tiled({"g_a": 2, "g_c": 2, "w_b": 4, "s_b": 2})
        dram_bytes(split, TaskOrder(1), Level2(10.0), 1.0)
    with pytest.raises(InputError, match="cluster along"):
        dram_bytes(matmul(4, 4, 4, 2, 2), TaskOrder(1, cluster=("z", 2)), Level2(10.0), 1.0)


def test_counters_are_read_by_name_and_a_foreign_kernel_is_refused() -> None:
    names = ["probe write 4", "gemm-rows 8x8x8"]
    head = '"ID","Kernel Name","CC","dram__bytes_read.sum","gpu__time_duration.sum"\n'
    units = '"","","","byte","ns"\n'
    rows = '"0","probe_write","9.0","1,024","5"\n"1","gemm","9.0","2048","6"\n'
    found = counters.parse(f"==PROF== x\n{head}{units}{rows}", names)
    assert found["probe write 4"] == {"dram__bytes_read.sum": 1024.0, "gpu__time_duration.sum": 5.0}
    with pytest.raises(CheckFailed, match="expected gemm-rows"):
        counters.parse(f"{head}{units}{rows.replace('gemm', 'sgemm')}", names)
    with pytest.raises(CheckFailed, match="base unit"):
        counters.parse(head + units.replace("byte", "Mbyte") + rows, names)


def test_prediction_is_within_five_percent_of_the_committed_counters() -> None:
    """A sample of the measured cases, the quick ones; bench/counters.py has them all."""
    path = BENCH / "results" / "raw" / "counters-h200.json"
    measured = json.loads(path.read_text())["counters"]
    for name, sizes in (
        ("gemm-band8-pair", (2048, 2048, 2048)),
        ("gemm-band8-pair", (4096, 4096, 4096)),
        ("attention", (4, 32, 256, 16384)),
        ("attention", (1, 16, 4096, 4096)),
    ):
        found = measured[counters.label(name, sizes)]
        moved, _ = counters.predict(name, sizes, counters.H200)
        seen = found["dram__bytes_read.sum"] + found["dram__bytes_write.sum"]
        assert moved.dram == pytest.approx(seen, rel=0.05)
        assert counters.predict(name, sizes, Level2(0.0))[0].dram > 1.3 * seen
