"""The walk of one scheduler partition: rules one by one, then against the machine's own figures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import partition
from warploom.errors import CheckFailed
from warploom.sass.decode.control import NO_SCOREBOARD, Control
from warploom.sass.decode.opcodes import Pipe
from warploom.sass.timing.costs import hopper
from warploom.sass.timing.partition import IDLE, Partition
from warploom.sass.timing.slots import Line, Slot

ROOT = Path(__file__).resolve().parents[2]


FREE = Control(stall=1, stay=False, write_sb=NO_SCOREBOARD, read_sb=NO_SCOREBOARD, wait=0, reuse=0)


def _slot(pipe: Pipe, **changes: Any) -> Line:
    reads = pipe not in (Pipe.ASYNC, Pipe.CONTROL)
    plain = Slot(pipe, hopper().occupancy[pipe], result=0, sources=0, reads=reads)
    return replace(plain, **changes), FREE


def _matmul(cycles: float) -> Line:
    return _slot(Pipe.ASYNC, matmul=cycles, commits=True)


WAIT = _slot(Pipe.CONTROL, retires=0)


def _pace(*groups: tuple[Line, ...], passes: int = 60) -> list[float]:
    ends = Partition(groups, [0.0] * len(groups)).run(passes)
    return [(own[passes - 1] - own[9]) / (passes - 10) for own in ends]


@pytest.mark.parametrize(("pipe", "cycles"), [(Pipe.FMA, 1), (Pipe.ALU, 2), (Pipe.XU, 8)])
def test_a_pipe_serves_one_warp_or_two_at_its_rate(pipe: Pipe, cycles: int) -> None:
    loop = (_slot(pipe),) * 16
    assert _pace(loop) == [16 * cycles]
    assert _pace(loop, loop) == pytest.approx([32 * cycles] * 2, rel=0.02)


def test_two_pipes_serve_two_warps_side_by_side() -> None:
    special, half = (_slot(Pipe.XU),) * 8, (_slot(Pipe.ALU),) * 32
    together = _pace(special, half)
    assert together[0] == pytest.approx(64, rel=0.1)
    assert together[1] == pytest.approx(64, rel=0.1)


def test_arithmetic_and_a_matmul_slow_each_other() -> None:
    batch = (*(_matmul(64.0),) * 16, WAIT)
    lanes = (_slot(Pipe.FMA),) * 64
    (alone,), (lanes_alone,) = _pace(batch), _pace(lanes)
    both = _pace(batch, lanes)
    assert both[0] > alone + 0.3 * 64 * both[0] / both[1]
    assert both[1] > 1.5 * lanes_alone


def test_matmuls_of_two_groups_run_one_after_the_other() -> None:
    batch = (*(_matmul(64.0),) * 8, WAIT)
    assert _pace(batch)[0] > 8 * 64
    assert _pace(batch, batch) == pytest.approx([16 * 64] * 2, rel=0.01)


def test_the_queue_holds_back_the_warp_that_fills_it() -> None:
    # Behind so many matmuls an instruction of the same warp issues late, with room for them early.
    many = (*(_matmul(64.0),) * 12, _slot(Pipe.FMA))
    first = {
        room: Partition([many], [0.0], replace(hopper(), queue=room)).run(1)[0][0]
        for room in (2, 20)
    }
    assert first[2] > 9 * 64
    assert first[20] < 2 * 64


@given(st.integers(1, 9), st.integers(1, 9))
def test_a_matmul_is_waited_for_and_its_issue_takes_turns(own: int, other: int) -> None:
    groups = [(*(_matmul(32.0),) * count, WAIT) for count in (own, other)]
    ends = Partition(groups, [0.0, 5.0]).run(20)
    busy = 32.0 * min(own, other) * 2 * 20
    assert max(one[19] for one in ends) >= 32.0 * max(own, other) * 20
    assert min(one[19] for one in ends) <= busy + 32.0 * max(own, other) * 20 + 20 * 200


KINDS = st.sampled_from(
    [
        _slot(Pipe.FMA),
        _slot(Pipe.XU),
        (_slot(Pipe.LSU, result=40.0, sources=12.0)[0], replace(FREE, write_sb=1, read_sb=2)),
        (_slot(Pipe.ALU)[0], replace(FREE, wait=0b110, stall=4)),
        _matmul(64.0),
        _slot(Pipe.ASYNC, matmul=32.0, from_registers=True),
        _slot(Pipe.CONTROL, arrives=True),
        _slot(Pipe.CONTROL, retires=1),
        _slot(Pipe.CONTROL, copies=True, result=90.0),
        _slot(Pipe.CONTROL, copies_left=0),
        _slot(Pipe.CONTROL, pause=21.0),
    ]
)


@given(st.lists(KINDS, min_size=2, max_size=60), st.integers(1, 20))
def test_a_walk_in_stretches_ends_where_the_whole_walk_ends(code: list[Line], length: int) -> None:
    whole = Partition([code], [0.0])
    whole.run(1)
    state, clock = IDLE, 0.0
    for start in range(0, len(code), length):
        part = Partition.resumed(code[start : start + length], state)
        part.run(1)
        state, clock = part.state(), clock + part.clock
    assert clock == pytest.approx(whole.clock, abs=1e-3)
    assert clock + state[0] == pytest.approx(whole.clock + whole.state()[0], abs=1e-3)


class _Shut:
    def opens(self, group: int, number: int) -> float | None:
        return None if (group, number) == (0, 2) else 0.0

    def signals(self, group: int, number: int, now: float) -> None:
        del group, number, now


def test_a_gate_that_nothing_opens_is_told() -> None:
    loop = (_slot(Pipe.FMA), _slot(Pipe.FMA, gate=True))
    with pytest.raises(CheckFailed, match="every group waits"):
        Partition([loop], [0.0], gates=_Shut()).run(5)


@pytest.mark.parametrize(
    ("name", "key", "allowed"),
    [
        ("same_ss_exp2", "same ss exp2: 1 groups, 3", 0.10),
        ("same_ss_exp2", "same ss exp2: 2 groups, 3", 0.15),
        ("three_soft", "three soft: 5 operations", 0.10),
        ("three_exp", "three exp: 7 operations", 0.10),
        ("three_fma", "three fma: 5 matmuls", 0.10),
        ("three_max", "three max: 7 operations", 0.12),
        ("three_expfma", "three expfma: 7 matmuls", 0.10),
    ],
)
def test_the_model_says_what_the_machine_took(
    name: str, key: str, allowed: float, cubin: Path
) -> None:
    raw = json.loads((ROOT / "bench/results/raw/partition-h200.json").read_text())
    assert name.split("_")[1] in key
    assert partition.predict(cubin, key) == pytest.approx(raw["cycles"][key], rel=allowed)


@pytest.fixture(scope="module")
def cubin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("partition") / "some.cubin"
    kernels = ("same_ss_exp2", "three_soft", "three_exp", "three_fma", "three_max", "three_expfma")
    partition.build(path, kernels)
    return path
