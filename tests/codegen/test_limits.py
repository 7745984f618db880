"""What a GPU cannot hold is refused for each architecture by its own limits, and nothing less."""

import pytest
from tests.codegen.programs import gemm_case

from warploom import tile as t
from warploom.autosched.schedules import Policy, schedule_for
from warploom.codegen.analysis.entry import entry_registers
from warploom.codegen.cuda.emit import emit
from warploom.codegen.cuda.emit_sm80 import emit_sm80
from warploom.codegen.cuda.simt.emit import emit_simt
from warploom.codegen.ir.plan import LaunchPlan
from warploom.codegen.ir.targets import shared_limit
from warploom.codegen.passes.lower import lower
from warploom.codegen.simt import facts
from warploom.codegen.simt.schedule import SimtSchedule
from warploom.errors import InputError
from warploom.kernels.gemm.program import GemmConfig, gemm

# CUDA C++ Programming Guide, technical specifications: KiB a block, KiB an SM, threads an SM
GUIDE = {
    "sm_80": (163, 164, 2048),
    "sm_86": (99, 100, 1536),
    "sm_89": (99, 100, 1536),
    "sm_90": (227, 228, 2048),
    "sm_90a": (227, 228, 2048),
}


def _emitted(arch, program, schedule):
    if arch == "sm_90a":
        return emit(lower(program, schedule))
    return emit_sm80(lower(program, schedule), arch)


def _pipelined(arch, depth):
    """The shared memory of a GEMM with a ring of that depth."""
    program, schedule, _ = gemm_case(64, 64, 64, depth)
    launch = schedule.launch.with_options(store="direct")
    schedule = type(schedule)(schedule.name, schedule.loops, launch)
    return _emitted(arch, program, schedule).shared_bytes


def _exchanged(arch, side):
    """The shared memory of a transpose of a square of fp32 by its threads."""

    def body(x, y):
        ranges = t.span(0, side), t.span(0, side)
        t.store(y, *ranges, tile=(t.load(x, *ranges).T * 2.0).T)

    program = t.trace(body, {name: t.array(t.FP32, "m n") for name in "xy"})
    return emit_simt(program, SimtSchedule("given", 256, 32, 1), arch).shared_bytes


def _outcomes(make, arch, sizes):
    """By size: the bytes of what is accepted, None for what is refused with the limit's number."""
    limit = 1024 * GUIDE[arch][0]
    found = {}
    for size in sizes:
        try:
            found[size] = make(arch, size)
        except InputError as error:
            assert f"{arch} has {limit:,}" in str(error) and " B of shared memory" in str(error)
            found[size] = None
    return found


def _check_accepted(make, arch, sizes):
    """Nothing beyond the limit is accepted, and nothing within it refused."""
    found = _outcomes(make, arch, sizes)
    accepted = {size: used for size, used in found.items() if used is not None}
    limit = 1024 * GUIDE[arch][0]
    assert max(accepted.values()) <= limit, arch
    assert accepted.keys() == {size for size in sizes if size <= max(accepted)}
    step = max(accepted.values()) - sorted(accepted.values())[-2]
    assert len(accepted) == len(sizes) or max(accepted.values()) + 2 * step > limit


@pytest.mark.parametrize("arch", GUIDE)
def test_rings_and_exchanges_fill_the_block_of_their_architecture(arch):
    _check_accepted(_pipelined, arch, range(2, 42, 3))
    _check_accepted(_exchanged, arch, range(96, 225, 16))


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89"])
def test_the_limit_of_another_architecture_is_found(arch, monkeypatch):
    """Planted fault: Hopper's limit for every architecture."""
    monkeypatch.setattr(facts, "shared_limit", lambda arch: 232448)
    with pytest.raises(AssertionError, match=arch):
        _check_accepted(_exchanged, arch, range(96, 225, 16))


@pytest.mark.parametrize("arch", GUIDE)
def test_blocks_that_share_an_sm_fit_it_together(arch):
    block, every, threads = GUIDE[arch]
    for resident in (1, 2, 3, 4):
        # The system takes 1 KiB of every block.
        assert resident * (shared_limit(resident, arch) + 1024) <= every * 1024
        assert shared_limit(resident, arch) <= block * 1024
        assert resident * 384 * entry_registers(384, arch, resident) <= 65536
    program = gemm(GemmConfig(tile=(192, 16, 16)))
    for resident in (2, 3, 4):  # blocks of 512 threads
        plan = LaunchPlan(split="m", store="direct", resident=resident)
        schedule = schedule_for(
            program, Policy("inflight", plan, groups=3, depth=2, registers=(24, 32))
        )
        if resident * 512 <= threads:
            assert _emitted(arch, program, schedule).threads == 512
            continue
        with pytest.raises(InputError, match=f"{arch} takes 1024 a block and {threads} in all"):
            _emitted(arch, program, schedule)


def test_registers_of_a_thread_are_those_the_file_has_for_it():
    assert [entry_registers(n) for n in (32, 256, 384, 512, 1024)] == [248, 248, 168, 128, 64]
    assert entry_registers(256, "sm_80", 2) == 128
