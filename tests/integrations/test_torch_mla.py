"""Latent attention as a torch operator: what it refuses, and how tensors reach the kernels."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.integrations.test_torch_decode import Interpreted, meta  # noqa: E402
from tests.kernels.decode_case import decode_case  # noqa: E402

from warploom.errors import InputError  # noqa: E402
from warploom.integrations import torch_mla, torch_program  # noqa: E402
from warploom.integrations.torch_mla import attention_mla  # noqa: E402
from warploom.kernels.attention.decode import PART, DecodeConfig  # noqa: E402
from warploom.kernels.attention.decode_plan import planned  # noqa: E402
from warploom.tile import BF16, E4M3  # noqa: E402

NARROW = torch.float8_e4m3fn


def given(**changes):
    """Arguments on "meta"."""
    found = {"q": meta(2, 3, 16, 576), "kv_cache": meta(2, 64, 1, 576)}
    return found | {"cache_seqlens": meta(2, dtype=torch.int32)} | changes


def test_outputs_have_the_columns_of_values():
    assert attention_mla(**given()).shape == (2, 3, 16, 512)
    assert attention_mla(**given(cache_seqlens=None)).dtype is torch.bfloat16
    paged = given(block_table=meta(2, 4, dtype=torch.int32), kv_cache=meta(9, 64, 1, 576))
    assert attention_mla(**paged).shape == (2, 3, 16, 512)
    narrow = {"q": given()["q"].to(NARROW), "kv_cache": given()["kv_cache"].to(NARROW)}
    factors = {f"{x}_descale": meta(2, 1, dtype=torch.float32) for x in "qk"}
    assert attention_mla(**given(**narrow, **factors)).dtype is torch.bfloat16


REFUSED = {
    "expected q .batch, queries, heads, d. and a cache": {"kv_cache": meta(2, 64, 2, 576)},
    "one element type and one head size": {"kv_cache": meta(2, 64, 1, 512)},
    "expected heads of .576: 512.": {"head_dim_v": 256},
    "expected cache_seqlens of int32 .2.": {"cache_seqlens": meta(2, dtype=torch.int64)},
    "expected a block_table of int32": {"block_table": meta(3, 1, dtype=torch.int32)},
    "for torch.float8_e4m3fn, and neither": {"q_descale": meta(2, 1, dtype=torch.float32)},
    "num_splits=129": {"num_splits": 129},
    "is on cpu": {"q": torch.empty(2, 3, 16, 576, dtype=torch.bfloat16)},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_no_kernel_takes_is_refused_before_a_launch(message):
    with pytest.raises(InputError, match=message) as caught:
        attention_mla(**given(**REFUSED[message]))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (DecodeConfig(BF16, 576, 512, 8), {"num_splits": 1}),
        (DecodeConfig(BF16, 576, 512, 8, causal=True, page=16), {"causal": True, "num_splits": 3}),
        (DecodeConfig(BF16, 576, 512, 8, causal=True, page=64), {"causal": True, "num_splits": 1}),
        (DecodeConfig(BF16, 576, 512, 8, scale=0.1, page=32, part=PART), {"batch_invariant": True}),
        (DecodeConfig(E4M3, 576, 512, 8), {"num_splits": 2}),
    ],
)
def test_tensors_reach_the_kernels_in_their_order(config, options, monkeypatch):
    kernels = {}
    monkeypatch.setattr(torch_program, "check_devices", lambda *_: None)
    monkeypatch.setattr(torch_program, "current_stream", lambda _: 0)
    monkeypatch.setattr(torch_program, "multiprocessors", lambda _: 8)
    monkeypatch.setattr(
        torch_program,
        "built_kernel",
        lambda key, tensor, make: kernels.setdefault(key, Interpreted(key)),
    )
    queries = 2 if config.causal else 1
    arrays, want = decode_case(config, (70, 33), queries, heads=1)
    kind = NARROW if config.narrow else torch.bfloat16
    q = torch.from_numpy(arrays["q"]).view(2, queries, config.group, 576).to(kind)
    cache, table = torch.from_numpy(arrays["k"]).to(kind), None
    if config.page is None:
        cache = cache.transpose(1, 2).contiguous()
    else:
        table = torch.from_numpy(arrays["table"])
    factors = {
        f"{x}_descale": torch.from_numpy(np.float32(arrays[f"scale_{x}"])) for x in config.scaled
    }
    scale = {} if config.scale is None else {"softmax_scale": config.scale}
    run = torch_program.RUNS[torch_mla.NAME]
    monkeypatch.setattr(torch_mla, "_operator", run)
    lengths = torch.from_numpy(arrays["lengths"])
    out = attention_mla(q, cache, lengths, table, **options, **factors, **scale)
    bound = 0.04 if config.narrow else 0.02  # whose weights are of 8 bits, too
    assert float((out.double().view(want.shape) - torch.from_numpy(want)).abs().max()) < bound
    assert len(kernels) == (1 if options.get("num_splits") == 1 else 2)


def test_parts_of_latent_attention_fill_the_gpu_once():
    config = DecodeConfig(BF16, 576, 512, 128)
    for batch, keys, least, most in ((128, 4096, 1, 1), (32, 4096, 2, 2), (1, 32768, 33, 66)):
        plan = planned(config, batch, 1, keys, 132)
        assert least <= plan.splits <= most and plan.config.tile == (64, 64), (batch, plan.splits)
