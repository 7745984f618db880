"""The static timing model: it ranks, it is deterministic, and it moves the right way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from warploom.sass.decode.control import NO_SCOREBOARD, Control
from warploom.sass.decode.cubin import Cubin
from warploom.sass.decode.kernel import Kernel
from warploom.sass.edit.edit import Editor
from warploom.sass.timing.timing_model import ModelSettings, TimingModel

Fields = tuple[tuple[int, ...], tuple[Control, ...]]


@pytest.fixture
def kernel(kernels_of: Callable[[str], list[Kernel]]) -> Kernel:
    """A small kernel."""
    return kernels_of("triton_softmax_1x4096_w8_s1_sm90")[0]


def block_of(kernel: Kernel, block: int) -> Fields:
    """A block as the editor would give it."""
    found = kernel.blocks[block]
    items = kernel.instructions[found.start : found.end]
    return tuple(item.index for item in items), tuple(item.control for item in items)


def all_of(kernel: Kernel) -> list[Fields]:
    """Every block."""
    return [block_of(kernel, block.index) for block in kernel.blocks]


def test_same_question_same_answer(kernel: Kernel) -> None:
    one = TimingModel(kernel).kernel_cycles(all_of(kernel))
    assert one == TimingModel(kernel).kernel_cycles(all_of(kernel))
    assert one > 0


def test_a_kernel_takes_at_least_its_stalls(kernel: Kernel) -> None:
    cycles = TimingModel(kernel).kernel_cycles(all_of(kernel))
    fields = [control for _, controls in all_of(kernel) for control in controls]
    assert cycles >= sum(max(1, control.stall) for control in fields[:-1])


def test_longer_stalls_never_help(kernel: Kernel) -> None:
    model = TimingModel(kernel)
    plain = all_of(kernel)
    for number, (order, controls) in enumerate(plain):
        slow = tuple(replace(control, stall=15, stay=False) for control in controls)
        longer = [*plain[:number], (order, slow), *plain[number + 1 :]]
        assert model.kernel_cycles(longer) >= model.kernel_cycles(plain)


def test_what_it_remembers_changes_no_answer(kernel: Kernel) -> None:
    # Versions asked for one after the other, against a model that was asked for nothing else.
    plain, model = all_of(kernel), TimingModel(kernel)
    for number, (order, controls) in enumerate(plain):
        for stall in (1, 6):
            fields = tuple(replace(each, stall=stall, stay=False) for each in controls)
            version = [*plain[:number], (order[::-1], fields), *plain[number + 1 :]]
            assert model.kernel_cycles(version) == TimingModel(kernel).kernel_cycles(version)


def test_a_wait_costs_the_latency_of_what_it_waits_for(kernel: Kernel) -> None:
    model = TimingModel(kernel)
    load = next(item for item in kernel.instructions if item.base == "LDG")
    other = next(item for item in kernel.instructions if item.base == "IADD3")
    free = Control(4, False, NO_SCOREBOARD, NO_SCOREBOARD, 0, 0)
    order = (load.index, other.index)
    empty: list[Fields] = [((), ())] * (len(kernel.blocks) - 1)

    def cycles(wait: int) -> float:
        fields = replace(free, write_sb=2), replace(free, wait=wait)
        return model.kernel_cycles([(order, fields), *empty])

    assert cycles(0) == cycles(1 << 3) < 20
    assert cycles(1 << 2) > 200


def test_loops_weigh_more(kernels_of: Callable[[str], list[Kernel]]) -> None:
    (gemm,) = kernels_of("triton_batched_gemm_128x128x64_w8_s4_sm80")
    model = TimingModel(gemm)
    assert max(model.weights) == ModelSettings().loop_trips ** 1.0
    assert min(model.weights) == 1.0
    heavy = model.weights.index(max(model.weights))
    blocks = gemm.blocks[heavy]
    assert any(item.base == "HMMA" for item in gemm.instructions[blocks.start : blocks.end])


def test_one_more_pass_of_a_loop_adds_its_steady_state(
    kernels_of: Callable[[str], list[Kernel]],
) -> None:
    (gemm,) = kernels_of("triton_batched_gemm_128x128x64_w8_s4_sm80")
    cycles = [
        TimingModel(gemm, ModelSettings(loop_trips=trips)).kernel_cycles(all_of(gemm))
        for trips in (1, 2, 3, 4)
    ]
    steps = [later - earlier for earlier, later in pairwise(cycles)]
    assert steps[0] == steps[1] == steps[2] > 0


def test_warp_groups_share_the_tensor_core(kernels_of: Callable[[str], list[Kernel]]) -> None:
    (gemm,) = kernels_of("triton_gemm_leaky_relu_128x256x64x8_w8_s3_sm90")
    cycles = [
        TimingModel(gemm, ModelSettings(loop_trips=32, warp_groups=groups)).kernel_cycles(
            all_of(gemm)
        )
        for groups in (1, 2, 4)
    ]
    assert cycles == sorted(cycles)
    assert cycles[2] > 1.5 * cycles[1]
    # The file says it has eight warps, two warp groups.
    assert TimingModel(gemm, ModelSettings(loop_trips=32)).kernel_cycles(all_of(gemm)) == cycles[1]


def test_it_takes_what_the_editor_gives(cubin_of: Callable[[str], Cubin]) -> None:
    editor = Editor(cubin_of("triton_rmsnorm_2x4096_w8_s2_sm90"))
    model = TimingModel(editor.kernel)
    assert model.kernel_cycles(editor.signature()) == model.kernel_cycles(all_of(editor.kernel))
