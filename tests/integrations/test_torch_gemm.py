"""The operators of scaled and grouped products: shapes, refusals, their tensors interpreted."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.kernels.grouped_case import grouped_case  # noqa: E402

from warploom import tile as t  # noqa: E402
from warploom.errors import InputError  # noqa: E402
from warploom.integrations import torch_program  # noqa: E402
from warploom.integrations.torch_gemm import (  # noqa: E402
    grouped_mm,
    masked_grouped_mm,
    scaled_grouped_mm,
    scaled_mm,
)
from warploom.integrations.torch_weight_only import pack_int4, weight_only_mm  # noqa: E402
from warploom.kernels.gemm.grouped import GroupedConfig, grouped, work_list  # noqa: E402

F8 = torch.float8_e4m3fn


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def weights(*shape, dtype=torch.bfloat16):
    """`[..., k, n]` with contiguous columns."""
    return meta(*shape, dtype=dtype).transpose(-1, -2)


OFFS = meta(3, dtype=torch.int32)


def test_shapes_and_types_of_results():
    a, b = meta(70, 64), weights(3, 40, 64)
    assert grouped_mm(a, b, OFFS).shape == (70, 40)
    assert grouped_mm(a, b, OFFS, swiglu=True).shape == (70, 20)
    assert grouped_mm(a, b, OFFS, out_dtype=torch.float32).dtype is torch.float32
    assert masked_grouped_mm(meta(3, 9, 64), b, OFFS).shape == (3, 9, 40)
    x, w = meta(70, 200, dtype=F8), weights(136, 200, dtype=F8)
    f32 = {"dtype": torch.float32}
    for of_a, of_b in (((), ()), ((70, 1), (1, 136)), ((70, 2), (2, 2))):
        found = scaled_mm(x, w, meta(*of_a, **f32), meta(*of_b, **f32))
        assert found.shape == (70, 136) and found.dtype is torch.bfloat16


def test_shapes_of_products_with_narrow_weights():
    a, scale = meta(7, 512), meta(40, dtype=torch.float32)
    packed = pack_int4(torch.zeros(40, 512, dtype=torch.int8)).to("meta").t()
    for mat_b in (weights(40, 512, dtype=F8), weights(40, 512, dtype=torch.int8), packed):
        for of_b in (scale, meta(4, 40, dtype=torch.float32)):
            found = weight_only_mm(a, mat_b, of_b)
            assert found.shape == (7, 40) and found.dtype is torch.bfloat16


REFUSED = {
    "one a column": lambda: weight_only_mm(meta(7, 64), weights(40, 64, dtype=F8), meta(40)),
    "expected one of e4m3, e5m2, int8": lambda: weight_only_mm(
        meta(7, 64), weights(40, 64), meta(40, dtype=torch.float32)
    ),
    "or packed int8": lambda: weight_only_mm(
        meta(7, 128), weights(40, 64, dtype=torch.int8), meta(40, dtype=torch.float32)
    ),
    "a multiple of 4 columns": lambda: weight_only_mm(
        meta(7, 256), weights(41, 256, dtype=F8), meta(2, 41, dtype=torch.float32)
    ),
    "expected mat_a .m, k. and mat_b .experts, k, n.": lambda: grouped_mm(
        meta(70, 64), weights(40, 64), OFFS
    ),
    "64 columns and 72 rows": lambda: grouped_mm(meta(70, 64), weights(3, 40, 72), OFFS),
    "one element type": lambda: grouped_mm(meta(70, 64), weights(3, 40, 64, dtype=F8), OFFS),
    "offs of int32 .3.": lambda: grouped_mm(
        meta(70, 64), weights(3, 40, 64), meta(3, dtype=torch.int64)
    ),
    "contiguous columns": lambda: grouped_mm(
        meta(70, 64, dtype=F8), meta(3, 64, 40, dtype=F8), OFFS
    ),
    "with bias: no kernel": lambda: grouped_mm(meta(70, 64), weights(3, 40, 64), OFFS, meta(40)),
    "as many experts": lambda: masked_grouped_mm(meta(2, 9, 64), weights(3, 40, 64), OFFS),
    "expected both scales": lambda: scaled_grouped_mm(
        meta(70, 64, dtype=F8), weights(3, 40, 64, dtype=F8), None, meta(3, 40), OFFS
    ),
    "or of blocks, .70, 2. and .2, 2.": lambda: scaled_mm(
        meta(70, 200, dtype=F8), weights(136, 200, dtype=F8),
        meta(70, 3, dtype=torch.float32), meta(2, 2, dtype=torch.float32),
    ),
    "8-bit elements and float32": lambda: scaled_mm(
        meta(70, 64), weights(40, 64), meta(dtype=torch.float32), meta(dtype=torch.float32)
    ),
    "even number of columns": lambda: grouped_mm(
        meta(70, 64), weights(3, 41, 64), OFFS, swiglu=True
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_no_kernel_takes_is_refused_before_a_launch(message):
    with pytest.raises(InputError, match=message) as caught:
        REFUSED[message]()
    assert "\n" not in str(caught.value)


class Interpreted:
    """A kernel whose launch interprets its program, on the tensors' own memory."""

    def __init__(self, key):
        lists = key[0] == "work_list"
        self.program = work_list(*key[1:]) if lists else grouped(key[1].config)
        self.written = "tasks" if lists else "c"

    def __call__(self, tensors, scalars, stream):
        assert all(x.stride(-1) == 1 for x in tensors.values())
        tensors[self.written].zero_()
        arrays = {name: x.float().numpy() if x.is_floating_point() else x.numpy()
                  for name, x in tensors.items()}  # fmt: skip
        found = t.interpret(self.program, arrays)[self.written]
        tensors[self.written].copy_(torch.from_numpy(np.asarray(found, np.float32)))


COUNTS = (70, 0, 1, 130)
BLOCKS = {"dtype": t.E4M3, "scales": "blocks"}
CALLS = {
    "rows": GroupedConfig(groups="rows"),
    "kn": GroupedConfig(groups="rows", b="kn"),
    "blocks of one": GroupedConfig(**BLOCKS),
    "blocks": GroupedConfig(groups="rows", **BLOCKS),
    "scales of rows": GroupedConfig(groups="rows", dtype=t.E4M3, scales="rows"),
    "masked": GroupedConfig(groups="masked", **BLOCKS),
    "swiglu": GroupedConfig(groups="rows", swiglu=True),
}


@pytest.mark.parametrize("name", CALLS)
def test_tensors_reach_the_kernels_in_their_order(name, monkeypatch):
    config = CALLS[name]
    monkeypatch.setattr(torch_program, "check_devices", lambda *_: None)
    monkeypatch.setattr(torch_program, "current_stream", lambda _: 0)
    monkeypatch.setattr(torch_program, "built_kernel", lambda key, tensor, make: Interpreted(key))
    counts = (201,) if config.groups == "none" else COUNTS
    arrays, want = grouped_case(config, counts, 136, 200)
    kind = F8 if config.dtype.bits == 8 else torch.bfloat16
    x = {name: torch.from_numpy(one) for name, one in arrays.items()}
    x |= {name: x[name].to(kind) for name in "ab"}
    x |= {name: x[name].float() for name in ("scale_a", "scale_b") if name in x}
    b = x["b"].transpose(-1, -2) if config.b == "nk" else x["b"]
    scales = []
    if config.scales == "blocks":
        scales = [x[name].transpose(-1, -2) for name in ("scale_a", "scale_b")]
    elif config.scales == "rows":
        scales = [x["scale_a"], x["scale_b"]]
    if config.groups == "none":
        got = scaled_mm(x["a"], b, *scales)
    elif config.groups == "masked":
        got = masked_grouped_mm(x["a"], b, x["lengths"], *scales)
    else:
        offs = torch.tensor(np.cumsum(counts), dtype=torch.int32)
        call = scaled_grouped_mm if scales else grouped_mm
        got = call(x["a"], b, *scales, offs, swiglu=config.swiglu)
    own = ~np.isnan(want)
    found = got.double().numpy()
    assert np.abs(found - want)[own].max() < 6e-3 * np.abs(want[own]).max()
