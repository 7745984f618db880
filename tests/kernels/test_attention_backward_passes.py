"""Gradients of long heads, a pass each, against float64: interpreted and as emitted."""

from itertools import product

import numpy as np
import pytest
from tests.codegen import emulate
from tests.kernels.backward_case import backward_case
from tests.lowering import lowered

from warploom import tile as t
from warploom.codegen.cuda.emit import emit
from warploom.errors import InputError
from warploom.kernels.attention.backward_config import BackwardConfig, fitted
from warploom.kernels.attention.backward_passes import ARRAYS
from warploom.kernels.attention.gradients import kernel, parts
from warploom.kernels.attention.shares import key_tasks, lists_of_tasks

# name -> (config, rows, keys, heads)
CASES = {
    "full": (BackwardConfig(head_dim=256), 70, 150, 1),
    "causal": (BackwardConfig(head_dim=256, causal=True, group=2), 140, 100, 2),
    "values": (BackwardConfig(head_dim=192, value_dim=128, causal=True), 100, 140, 1),
    "window": (BackwardConfig(head_dim=160, causal=True, window=30, softcap=2.0), 150, 160, 1),
}
GRADIENT = {"values": "dv", "keys": "dk", "queries": "dq"}
BOUND = 6e-3  # of the largest element


def made(name, part):
    """(program, emitted kernel, arrays, the name of its gradient, the gradient)."""
    config, rows, keys, heads = CASES[name]
    values, want = backward_case(config, rows, keys, heads=heads)
    values["dq"] = np.full(want["dq"].shape, np.nan)
    program, policy, _ = kernel(config, part)
    arrays = {one: values[one] for one in ARRAYS[part].split()}
    found = GRADIENT[part]
    return program, emit(lowered(program, policy)), arrays, found, want[found]


@pytest.fixture(scope="module")
def kernels():
    cases = [made(name, part) for name in CASES for part in GRADIENT]
    return emulate.compile_all([case[1] for case in cases], None), cases


@pytest.mark.parametrize("number", range(len(CASES) * len(GRADIENT)))
def test_each_pass_gives_its_gradient(kernels, number):
    library, cases = kernels
    program, source, arrays, name, want = cases[number]
    meant = t.interpret(program, arrays)[name]
    got = emulate.run(library, number, source, program, arrays, seed=number)[name]
    for one in (meant, got):
        error = np.abs(np.asarray(one, np.float64) - want).max() / np.abs(want).max()
        assert error < BOUND


def test_long_heads_have_a_kernel_for_each_gradient():
    assert parts(BackwardConfig(head_dim=128)) == ("prepare", "main", "finish")
    assert parts(BackwardConfig(head_dim=136)) == ("prepare", *GRADIENT)


def test_values_of_another_size_are_refused_where_a_kernel_makes_all_gradients():
    with pytest.raises(
        InputError, match="heads of 128 with values of 64: expected heads above 128"
    ):
        BackwardConfig(head_dim=128, value_dim=64)


BANDS = {  # (configuration, rows) -> key heads whose tasks go out together
    (BackwardConfig(causal=True), 5000): 2,
    (BackwardConfig(causal=True, group=4), 300): 16,
    (BackwardConfig(causal=True, group=4), 40000): 0,
    (BackwardConfig(head_dim=64, causal=True), 40000): 4,
    (BackwardConfig(deterministic=True), 4096): 4,
    (BackwardConfig(head_dim=256, causal=True, deterministic=True), 4096): 4,
    (BackwardConfig(), 4096): 0,
    (BackwardConfig(causal=True, deterministic=True), 4096): 0,
    (BackwardConfig(causal=True, window=9), 4096): 4,
}
COUNTED = (  # (configuration, rows): taken from a counter in memory, short tasks that add in turn
    (BackwardConfig(head_dim=64, causal=True, deterministic=True), 4096),
    (BackwardConfig(head_dim=96, causal=True, deterministic=True), 4096),
    (BackwardConfig(causal=True, deterministic=True), 4000),
    (BackwardConfig(causal=True, window=9, deterministic=True, group=4), 4096),
)


def test_heads_go_out_in_bands():
    for (config, rows), band in BANDS.items():
        found = fitted(config, rows, rows, heads=1)  # of many short tasks sums have one order
        assert found.band == band
        assert found.listed == (config.causal and not config.long)
        assert found.both_ways == (found.listed and config.deterministic)
        plan = kernel(found, "keys" if config.long else "main")[1].launch
        assert plan.supergroup == (0 if found.listed else band)


def test_short_tasks_that_add_in_turn_have_no_list():
    for config, rows in COUNTED:
        found = fitted(config, rows, rows)
        launch = kernel(found, "main")[1].launch
        assert not found.listed and launch.tile_scheduler == "dynamic" and launch.reverse


@pytest.mark.parametrize(
    ("keys", "group", "batch", "heads", "sms", "most"),
    [
        (4096, 4, 4, 4, 132, 530),  # of 512 blocks on the mean
        (1024, 4, 16, 4, 132, 160),  # of 155
        (4096, 1, 4, 16, 132, 530),
        (1024, 1, 2, 3, 132, 17),  # fewer tasks than SMs: the longest
        (1000, 2, 3, 3, 7, 210),  # of 206, of an odd number of heads
        (300, 1, 1, 1, 2, 8),
        (1500, 8, 1, 5, 132, 192),
    ],
)
def test_heads_that_go_both_ways_give_sms_alike_and_tasks_their_turns(
    keys, group, batch, heads, sms, most
):
    rows = keys + 100  # those in front see no key
    config = BackwardConfig(causal=True, group=group, deterministic=True, listed=True, sms=sms)
    tasks = lists_of_tasks(config, batch, heads, rows, keys)["key_tasks"]
    tiles = -(-keys // 128)
    places = {tuple(one[:3]): (n, one[3]) for n, one in enumerate(tasks.tolist()) if one[2] < tiles}
    assert len(tasks) % sms == 0 and len(places) == sum(tasks[:, 2] < tiles)
    assert set(places) == set(product(range(batch), range(heads), range(tiles)))
    for (b, h, j), (place, back) in places.items():
        assert back == h % 2
        before = j - 1 if back else j + 1
        assert not 0 <= before < tiles or places[b, h, before][0] < place
    blocks = [-(-(rows) // 64) - (128 * j + 100) // 64 for j in range(tiles)] + [0]
    loads = group * np.asarray(blocks)[tasks[:, 2]].reshape(-1, sms).sum(0)
    assert loads.max() <= most


@pytest.mark.parametrize(
    ("rows", "keys", "group", "window", "batch", "heads", "most"),
    [
        (4096, 4096, 1, None, 4, 16, 520),  # of 512 blocks on the mean
        (4096, 4096, 4, None, 4, 4, 520),
        (300, 1000, 1, None, 2, 3, 5),  # fewer tasks than SMs: the longest
        (900, 300, 2, None, 1, 1, 12),
        (2048, 2048, 1, 500, 2, 16, 40),  # four tasks of 10 blocks at most
    ],
)
def test_lists_hold_every_task_and_give_sms_alike(rows, keys, group, window, batch, heads, most):
    config = fitted(BackwardConfig(causal=True, group=group, window=window), rows, keys, heads=1)
    tasks = key_tasks(config, batch, heads, rows, keys, 132)
    tiles = -(-keys // 128)
    known = {(b, h, j) for b in range(batch) for h in range(heads) for j in range(tiles)}
    real = [tuple(task) for task in tasks.tolist() if task[2] < tiles]
    assert len(real) == len(known) and set(real) == known and len(tasks) % 132 == 0
    row, key = np.arange(rows)[:, None] + keys - rows, np.arange(keys)
    seen = (key <= row) & (key > row - (window or keys))
    pad = ((0, -rows % 64), (0, -keys % 128))
    blocks = np.pad(seen, pad).reshape(-(-rows // 64), 64, tiles, 128).any((1, 3)).sum(0)
    loads = group * np.append(blocks, 0)[tasks[:, 2]].reshape(-1, 132).sum(0)
    assert loads.max() <= most
