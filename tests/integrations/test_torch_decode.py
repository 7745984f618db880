"""The operator over a cache of keys: shapes, refusals, and its tensors on the interpreter."""

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
FakeTensorMode = pytest.importorskip("torch._subclasses.fake_tensor").FakeTensorMode

from tests.kernels.decode_case import decode_case  # noqa: E402

from warploom import tile as t  # noqa: E402
from warploom.errors import InputError  # noqa: E402
from warploom.integrations import torch_decode, torch_program  # noqa: E402
from warploom.integrations.torch_decode import attention_with_kvcache  # noqa: E402
from warploom.kernels.attention.combine import combine  # noqa: E402
from warploom.kernels.attention.decode import PART, DecodeConfig, decode  # noqa: E402
from warploom.kernels.attention.decode_plan import planned  # noqa: E402


def given(queries=1, heads=8, keys=64, batch=2, dtype=torch.bfloat16, **changes):
    """Arguments on "meta"."""
    found = {
        "q": torch.empty(batch, queries, heads, 64, dtype=dtype, device="meta"),
        "k_cache": torch.empty(batch, keys, 2, 64, dtype=dtype, device="meta"),
        "v_cache": torch.empty(batch, keys, 2, 64, dtype=dtype, device="meta"),
        "cache_seqlens": torch.empty(batch, dtype=torch.int32, device="meta"),
    }
    return found | changes


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def test_outputs_are_like_q():
    assert attention_with_kvcache(**given(queries=3)).shape == (2, 3, 8, 64)
    for lengths in (None, 17):
        assert attention_with_kvcache(**given(cache_seqlens=lengths)).dtype is torch.bfloat16
    paged = given(block_table=meta(2, 4, dtype=torch.int32), k_cache=meta(9, 16, 2, 64))
    assert attention_with_kvcache(**paged | {"v_cache": meta(9, 16, 2, 64)}).shape[2] == 8
    with FakeTensorMode():
        fake = {n: torch.empty_like(x, device="cuda") for n, x in given().items()}
        assert attention_with_kvcache(**fake).shape == (2, 1, 8, 64)


NARROW = {
    **{x: meta(2, 64, 2, 64, dtype=torch.float8_e4m3fn) for x in ("k_cache", "v_cache")},
    "q": meta(2, 1, 8, 64, dtype=torch.float8_e4m3fn),
}
FACTORS = {f"{x}_descale": meta(2, 2, dtype=torch.float32) for x in "qkv"}


def test_8_bits_give_bf16():
    assert attention_with_kvcache(**given(**NARROW, **FACTORS)).dtype is torch.bfloat16


REFUSED = {
    "expected q_descale, k_descale and v_descale of fp32 .2, 2.": NARROW,
    "k_descale.*and none for others": FACTORS,
    "expected q .batch, queries, heads, d": {"q": meta(2, 8, 64)},
    "one element type": {"v_cache": meta(2, 64, 2, 64, dtype=torch.float16)},
    "a whole number of heads": {"q": meta(2, 1, 7, 64)},
    "expected cache_seqlens of int32 .2.": {"cache_seqlens": meta(2, dtype=torch.int64)},
    "a cache for each sequence": {"k_cache": meta(3, 64, 2, 64), "v_cache": meta(3, 64, 2, 64)},
    "expected a block_table of int32 .2, pages": {"block_table": meta(3, 1, dtype=torch.int32)},
    "pages of 48 tokens": {
        "block_table": meta(2, 1, dtype=torch.int32),
        "k_cache": meta(2, 48, 2, 64),
        "v_cache": meta(2, 48, 2, 64),
    },
    "fp32 heads of 64: expected bf16, fp16 or e4m3": {
        name: meta(2, 1 if name == "q" else 64, 2, 64, dtype=torch.float32)
        for name in ("q", "k_cache", "v_cache")
    },
    "scale=-1.0: expected a number above 0": {"softmax_scale": -1.0},
    "window_size=.3, 2.: expected": {"window_size": (3, 2)},
    "softcap=-1.0": {"softcap": -1.0},
    "sinks float32 .7.: expected fp32 .8.": {"sinks": meta(7, dtype=torch.float32)},
    "num_splits=129: expected 0 to 128": {"num_splits": 129},
    "num_splits=3 batch_invariant=True": {"num_splits": 3, "batch_invariant": True},
    "is on cpu": {"q": torch.empty(2, 1, 8, 64, dtype=torch.bfloat16)},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_no_kernel_takes_is_refused_before_a_launch(message):
    with pytest.raises(InputError, match=message) as caught:
        attention_with_kvcache(**given(**REFUSED[message]))
    assert "\n" not in str(caught.value)


def test_a_gradient_is_refused_by_name():
    arguments = given()
    arguments["q"].requires_grad_()
    out = attention_with_kvcache(**arguments)
    with pytest.raises(NotImplementedError, match="attention_with_kvcache has no backward"):
        out.sum().backward()


class Interpreted:
    """A kernel whose launch interprets its program, on the tensors' own memory."""

    def __init__(self, key):
        make = decode if key[0] == "decode" else combine
        self.program = make(*key[1:])
        self.launches = 0

    def __call__(self, tensors, scalars, stream):
        self.launches += 1
        arrays = {name: x.float().numpy() if x.is_floating_point() else x.numpy()
                  for name, x in tensors.items()}  # fmt: skip
        for name, array in t.interpret(self.program, arrays).items():
            if name in ("o", "parts", "sums"):
                tensors[name].copy_(torch.from_numpy(np.asarray(array, np.float32)))


CALLS = {
    "one query": (DecodeConfig(group=4, head_dim=64), (150, 0, 33), 1, {}),
    "in parts": (DecodeConfig(group=4, head_dim=64), (300, 7), 1, {"num_splits": 3}),
    "queries": (DecodeConfig(group=3, head_dim=64, causal=True), (200, 2), 3, {"causal": True}),
    "pages": (DecodeConfig(group=2, head_dim=64, page=32), (150, 31), 1, {}),
    "window": (
        DecodeConfig(group=2, head_dim=64, page=64, window=40, causal=True),
        (150, 31),
        2,
        {"window_size": (39, 0), "causal": True},
    ),
    "any batch": (
        DecodeConfig(group=2, head_dim=64, page=32, part=PART),
        (900, 0, 31),
        1,
        {"batch_invariant": True},
    ),
    "sinks": (DecodeConfig(group=2, head_dim=64, sinks=True), (70, 33), 1, {}),
    "options": (
        DecodeConfig(group=2, head_dim=64, softcap=3.0, scale=0.3),
        (70,),
        1,
        {"softcap": 3.0, "softmax_scale": 0.3},
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_tensors_reach_the_kernels_in_their_order(name, monkeypatch):
    config, lengths, queries, options = CALLS[name]
    kernels = {}
    monkeypatch.setattr(torch_program, "check_devices", lambda *_: None)
    monkeypatch.setattr(torch_program, "current_stream", lambda _: 0)
    monkeypatch.setattr(torch_program, "multiprocessors", lambda _: 8)
    monkeypatch.setattr(
        torch_program,
        "built_kernel",
        lambda key, tensor, make: kernels.setdefault(key, Interpreted(key)),
    )
    arrays, want = decode_case(config, lengths, queries)
    batch, heads, rows, d = arrays["q"].shape
    q = torch.from_numpy(arrays["q"]).view(batch, heads, queries, config.group, d)
    q = q.transpose(1, 2).reshape(batch, queries, heads * config.group, d).bfloat16()
    caches = [torch.from_numpy(arrays[name]).bfloat16() for name in "kv"]
    table = None
    if config.page is None:
        caches = [x.transpose(1, 2).contiguous() for x in caches]
    else:
        table = torch.from_numpy(arrays["table"])
    run = torch_program.RUNS["warploom::attention_with_kvcache"]
    monkeypatch.setattr(torch_decode, "_operator", run)
    lengths = torch.from_numpy(arrays["lengths"])
    if config.sinks:
        options = {**options, "sinks": torch.from_numpy(arrays["sinks"]).flatten()}
    out = attention_with_kvcache(q, *caches, lengths, table, **options)
    out = out.double().view(batch, queries, heads, config.group, d).transpose(1, 2)
    assert float((out.reshape(batch, heads, rows, d) - torch.from_numpy(want)).abs().max()) < 0.02
    (first,) = [key[1] for key in kernels if key[0] == "decode"]
    assert first.causal == (config.causal and queries > 1) and first.window == config.window
    assert (len(kernels) == 2) == (queries > 1 or first.split)


def test_parts_keep_every_multiprocessor_busy():
    config = DecodeConfig(group=4)
    for heads, keys, least, most in (
        (8, 131072, 11, 16),
        (32, 16384, 4, 5),
        (128, 4096, 1, 1),
        (128, 16384, 8, 8),  # parts of 2048 keys in a long cache
        (512, 4096, 1, 1),
        (8, 100, 1, 2),
    ):
        plan = planned(config, heads, 1, keys, 132)
        assert least <= plan.splits <= most, (heads, keys, plan.splits)
        assert plan.config.split == (plan.splits > 1) and plan.room >= plan.splits
        assert plan.config.once == (heads * plan.splits <= 132)
    assert planned(config, 8, 1, 4096, 132, splits=5).splits == 5
    equal = replace(config, part=PART)
    plans = [planned(equal, heads, 1, keys, 132) for heads in (8, 512) for keys in (100, 131072)]
    assert len({(plan.config, plan.room) for plan in plans}) == 1
    assert [plan.splits for plan in plans] == [1, 256] * 2
    assert planned(config, 8, 17, 4096, 132).config.tile[0] == 128
