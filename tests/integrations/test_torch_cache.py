"""The operator that appends to a cache, without a GPU: shapes, refusals, the kernel's arrays."""

import pytest

torch = pytest.importorskip("torch")

from warploom.errors import InputError  # noqa: E402
from warploom.integrations import torch_cache, torch_program  # noqa: E402
from warploom.integrations.torch_cache import append_kvcache  # noqa: E402
from warploom.kernels.attention.append import AppendConfig, append  # noqa: E402
from warploom.tile import E4M3  # noqa: E402


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def given(**changes):
    """Three tokens of two sequences, two key heads, four query heads, to be rotated."""
    found = {x: meta(2, 3, 2, 64) for x in "kv"}
    found |= {f"{x}_cache": meta(2, 96, 2, 64) for x in "kv"}
    found |= {"cache_seqlens": meta(2, dtype=torch.int32), "q": meta(2, 3, 4, 64)}
    found |= {f"rotary_{x}": meta(500, 32, dtype=torch.float32) for x in ("cos", "sin")}
    return found | changes


def test_rotated_queries_are_given_back():
    assert append_kvcache(**given()).shape == (2, 3, 4, 64)
    bare = {name: one for name, one in given().items() if "rotary" not in name and name != "q"}
    assert append_kvcache(**bare).numel() == 0


NARROW = {f"{x}_cache": meta(2, 96, 2, 64, dtype=torch.float8_e4m3fn) for x in "kv"}
OTHER = {f"{x}_cache": meta(2, 96, 2, 64, dtype=torch.float16) for x in "kv"}
FACTORS = {f"{x}_descale": meta(2, 2, dtype=torch.float32) for x in "kv"}
REFUSED = {
    "expected k and v .batch, tokens": {"v": meta(2, 3, 4, 64)},
    "expected caches .batch": {"k_cache": meta(2, 96, 2, 32)},
    "expected caches of 2 heads of 64": {f"{x}_cache": meta(2, 96, 4, 64) for x in "kv"},
    "cache_seqlens of int32 .2.": {"cache_seqlens": meta(3, dtype=torch.int32)},
    "a cache for each sequence": {f"{x}_cache": meta(3, 96, 2, 64) for x in "kv"},
    "a block_table of int32 .2": {"block_table": meta(2, 1)},
    "expected both rotary_cos and rotary_sin": {"rotary_sin": None},
    "of one shape and type": {"rotary_sin": meta(400, 32, dtype=torch.float32)},
    "expected q .2, 3, heads, 64": {"q": meta(2, 1, 4, 64)},
    "k_descale and v_descale of fp32 .2, 2.": NARROW,
    "neither for others": FACTORS,
    "expected bf16 or fp16, to a cache": OTHER | FACTORS,
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_no_kernel_takes_is_refused(message):
    with pytest.raises(InputError, match=f"append.*{message}"):
        append_kvcache(**given(**REFUSED[message]))


@pytest.mark.parametrize("pairs", [False, True])
def test_the_kernel_gets_every_array_of_its_program(monkeypatch, pairs):
    calls = []
    monkeypatch.setattr(
        torch_program, "launch", lambda key, make, arrays: calls.append((key[1], arrays))
    )
    table = meta(2, 6, dtype=torch.int32)
    caches = {f"{x}_cache": meta(20, 16, 2, 64, dtype=torch.float8_e4m3fn) for x in "kv"}
    arguments = given(**caches, **FACTORS, block_table=table, rotary_interleaved=pairs)
    tensors = [arguments.get(name) for name in torch_cache.TENSORS]
    torch_cache.RUN(*tensors[:9], pairs, *tensors[9:])
    ((config, arrays),) = calls
    style = "pairs" if pairs else "halves"
    assert config == AppendConfig(
        cache=E4M3, head_dim=64, rotary=style, angles=config.angles, group=2, page=16
    )
    specs = {spec.name: spec for spec in append(config).arrays}
    assert set(arrays) == set(specs)
    for name, one in arrays.items():
        assert one.dim() == len(specs[name].dims), name
