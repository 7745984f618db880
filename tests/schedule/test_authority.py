"""Constants that a checker and what it checks both state, held to the machine, and it to ptxas."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from fixtures import target_b

from warploom import toolchain
from warploom.machine import load
from warploom.schedule import Graph, Node, check
from warploom.schedule.model import target as model
from warploom.schedule.model.assemble import assemble
from warploom.schedule.model.costs import costs, target
from warploom.schedule.model.rules import OURS

WITH_SETMAXNREG = {"h100": "sm_90a", "b200": "sm_100a"}


@pytest.mark.parametrize("gpu", WITH_SETMAXNREG)
def test_ptxas_takes_the_counts_of_the_machine(gpu: str, tmp_path: Path) -> None:
    machine = load(gpu)
    least, most, step = (
        int(machine.value(f"setmaxnreg.{k}")) for k in ("min", "max", "granularity")
    )
    ptxas = toolchain.find("ptxas").path
    for count in (0, least - step, least, least + 1, least + step, most - 1, most, most + step):
        text = f""".version 8.6
.target {WITH_SETMAXNREG[gpu]}
.address_size 64
.visible .entry f() .maxntid 128 {{ setmaxnreg.inc.sync.aligned.u32 {count}; ret; }}
"""
        source = tmp_path / f"{count}.ptx"
        source.write_text(text)
        words = [str(ptxas), "-arch", WITH_SETMAXNREG[gpu], "-o", str(tmp_path / "o"), str(source)]
        taken = subprocess.run(words, capture_output=True, check=False).returncode == 0
        assert taken == (least <= count <= most and count % step == 0), count


@pytest.mark.parametrize("gpu", WITH_SETMAXNREG)
def test_the_checker_takes_the_counts_of_the_machine(gpu: str) -> None:
    machine = load(gpu)
    least, step = (int(machine.value(f"setmaxnreg.{key}")) for key in ("min", "granularity"))
    most = int(machine.value("registers.per_thread_max"))
    graph = Graph("alone", (Node("a", "a", latency=1),), ())
    where = replace(target_b(), register_pool=int(machine.value("registers.per_sm")))
    schedule = assemble(graph, where, OURS, 8, {"a": 0}, {"a": "compute0"})
    for count in range(300):
        own = tuple(replace(g, registers=count) if g.warps == 4 else g for g in schedule.groups)
        found = check(graph, where, replace(schedule, groups=own)).broken("setmaxnreg")
        assert (not found) == (least <= count <= most and count % step == 0), (count, found)


@pytest.mark.parametrize("gpu", WITH_SETMAXNREG)
def test_the_solvers_constants_are_the_machines(gpu: str) -> None:
    machine = load(gpu)
    assert machine.value("setmaxnreg.granularity") == model.REGISTER_STEP
    assert machine.value("setmaxnreg.min") == model.REGISTER_FLOOR
    where = target(costs(gpu))
    assert where.register_pool == machine.value("registers.per_sm")
    assert where.registers_per_thread == machine.value("registers.per_thread_max")
