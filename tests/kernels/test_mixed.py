"""Mixed batches, chunks of prompts beside single tokens, against float64: interpreted, under random
interleavings, and as emitted; the list of their tasks."""

import numpy as np
import pytest
from tests.kernels.decode_case import attended

from warploom.autosched.schedules import schedule_for
from warploom.codegen.cuda.emit import emit
from warploom.codegen.cuda.simt.emit import emit_simt
from warploom.codegen.oracle.simulate import simulate
from warploom.codegen.passes.lower import lower, verified
from warploom.emulate.kernel import Library
from warploom.errors import InputError
from warploom.kernels.attention.decode import FIELDS, DecodeConfig, decode, decode_policy
from warploom.kernels.attention.tasks import TaskListConfig, task_list, task_list_schedule
from warploom.tile import interpret

torch_mixed = pytest.importorskip("warploom.integrations.torch_mixed")
torch = pytest.importorskip("torch")

PAGE, HEADS = 16, 2
# (new tokens, keys) of each sequence: tokens, chunks, one of no key, one whose chunk is all it has.
SEQUENCES = ((1, 90), (40, 40), (0, 30), (1, 1), (70, 130), (2, 64))
CONFIGS = {
    "one group": DecodeConfig(
        group=4, head_dim=64, causal=True, page=PAGE, split=False, mixed=True
    ),
    "two groups, window": DecodeConfig(
        group=2, head_dim=64, causal=True, page=PAGE, split=False, mixed=True,
        tile=(128, 64), window=50,
    ),
    "three heads in the room of four": DecodeConfig(
        group=3, head_dim=64, causal=True, page=PAGE, split=False, mixed=True
    ),
}  # fmt: skip


def listed(bounds, lengths, high):
    """The list of tasks that the operator makes, of so many tokens a tile."""
    program = task_list(TaskListConfig(high, 32))
    tiles = np.full((len(lengths) + bounds[-1] // high, FIELDS), -1, np.int32)
    arrays = {"bounds": bounds, "lengths": np.array(lengths, np.int32), "tiles": tiles}
    return interpret(program, arrays)["tiles"]


def case(config):
    """(arrays, result) with the list of tasks that the operator makes."""
    random, d, group = np.random.default_rng(0), config.head_dim, config.group
    counts, lengths = (np.array(one) for one in zip(*SEQUENCES, strict=True))
    bounds = np.array([0, *np.cumsum(counts)], np.int32)
    tokens, columns = int(bounds[-1]), -(-int(lengths.max()) // PAGE)
    q = random.integers(-4, 5, (tokens, HEADS, group, d)) * 0.25
    place = random.permutation(len(counts) * columns + 3)[: len(counts) * columns]
    table = place.reshape(len(counts), columns)
    pages = np.full((2, len(counts) * columns + 3, PAGE, HEADS, d), 50.0)
    want = np.zeros(q.shape)
    for s, (count, length) in enumerate(SEQUENCES):
        kv = random.integers(-4, 5, (2, HEADS, length, d)) * 0.25
        for n in range(length):
            pages[:, table[s, n // PAGE], n % PAGE] = kv[:, :, n]
        own = slice(bounds[s], bounds[s + 1])
        for h in range(HEADS):
            packed = q[own, h].reshape(-1, d)
            want[own, h] = attended(config, packed, *kv[:, h], count).reshape(-1, group, d)
    tiles = listed(bounds, lengths, config.tile[0] // config.pitch)
    return {
        "q": q, "k": pages[0], "v": pages[1], "o": np.zeros(q.shape),
        "table": table.astype(np.int32), "tiles": tiles,
    }, want  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_every_sequence_gets_its_attention(name):
    config = CONFIGS[name]
    arrays, want = case(config)
    program = decode(config)
    block = lower(program, schedule_for(program, decode_policy(config)), verified)
    expected = interpret(program, arrays)["o"]
    assert np.abs(expected - want).max() < 6e-3
    assert simulate(block, arrays, seed=3)["o"].tobytes() == expected.tobytes()
    found = Library([emit(block)]).run(0, program, arrays)["o"]
    assert np.abs(found - want).max() < 6e-3


def test_every_tile_is_one_task_and_the_others_are_of_nobody():
    random = np.random.default_rng(1)
    for _ in range(20):
        counts = random.integers(0, 300, 7) * random.integers(0, 2, 7)
        lengths = counts + random.integers(0, 500, 7)
        bounds = np.array([0, *np.cumsum(counts)], np.int32)
        tasks = listed(bounds, lengths, 16).tolist()
        want = [
            [s, bounds[s] + first, bounds[s + 1], n, lengths[s]]
            for s, n in enumerate(counts)
            for first in range(0, int(n), 16)
        ]
        assert tasks[: len(want)] == want
        assert all(end == count == keys == 0 for _, _, end, count, keys in tasks[len(want) :])


def test_the_emitted_list_of_tasks_is_that_of_the_program():
    config = TaskListConfig(16, 32)
    program, bounds = task_list(config), np.array([0, 1, 41, 41, 42, 112, 114], np.int32)
    arrays = {"bounds": bounds, "lengths": np.array([n for _, n in SEQUENCES], np.int32)}
    arrays["tiles"] = np.full((150, FIELDS), -1, np.int32)
    found = Library([emit_simt(program, task_list_schedule(config), "sm_90a")]).run(
        0, program, arrays
    )
    assert np.array_equal(found["tiles"], interpret(program, arrays)["tiles"])
    with pytest.raises(InputError, match="at most 1024 sequences"):
        TaskListConfig(room=2048)


def test_keys_of_a_mixed_batch_are_not_in_parts():
    with pytest.raises(InputError, match="mixed=True"):
        DecodeConfig(causal=True, mixed=True)


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def given(**changes):
    found = {"q": meta(20, 8, 64), "k_cache": meta(9, 16, 2, 64), "v_cache": meta(9, 16, 2, 64)}
    found["cache_seqlens"] = meta(3, dtype=torch.int32)
    found["block_table"] = meta(3, 4, dtype=torch.int32)
    return found | {"cu_seqlens_q": meta(4, dtype=torch.int32)} | changes


REFUSED = {
    "expected q .tokens, heads, d": {"q": meta(1, 20, 8, 64)},
    "one element type": {"q": meta(20, 8, 64, dtype=torch.float16)},
    "a whole number of heads": {"q": meta(20, 7, 64)},
    "cu_seqlens_q .batch.1.": {"cu_seqlens_q": meta(3, dtype=torch.int32)},
    "expected int32 of": {"cache_seqlens": meta(3, dtype=torch.int64)},
    "scheduler_metadata of int32 .4, 5.": {"scheduler_metadata": meta(5, 5, dtype=torch.int32)},
    "pages of 48": {f"{x}_cache": meta(9, 48, 2, 64) for x in "kv"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_no_kernel_takes_is_refused(message):
    with pytest.raises(InputError, match=message):
        torch_mixed.attention_mixed(**given(**REFUSED[message]))


def test_results_are_like_q():
    assert torch_mixed.attention_mixed(**given()).shape == (20, 8, 64)


def test_layers_may_share_a_list_of_tasks():
    of = given()
    tasks = torch_mixed.get_scheduler_metadata(of["cu_seqlens_q"], of["cache_seqlens"], 20, 8, 2)
    assert torch_mixed.attention_mixed(**of, scheduler_metadata=tasks).shape == (20, 8, 64)
    with pytest.raises(InputError, match="heads=7"):
        torch_mixed.get_scheduler_metadata(of["cu_seqlens_q"], of["cache_seqlens"], 20, 7, 2)
