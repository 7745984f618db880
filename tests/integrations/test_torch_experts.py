"""Operators of a mixture of experts: the router's order, refusals, the layer interpreted."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from warploom import tile as t  # noqa: E402
from warploom.errors import InputError  # noqa: E402
from warploom.integrations import torch_experts, torch_program  # noqa: E402
from warploom.integrations.torch_experts import combine_rows, experts_mlp, gather_rows, route  # noqa: E402
from warploom.kernels.gemm import experts  # noqa: E402
from warploom.kernels.gemm.grouped import grouped, work_list  # noqa: E402

EXPERTS, TAKEN, WIDTH, INNER = 4, 2, 64, 48


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def test_rows_of_an_expert_stand_together_in_the_order_of_tokens():
    chosen = torch.tensor([[2, 0], [0, 3], [2, 3], [0, 2]])
    tokens, offs, places = route(chosen, EXPERTS)
    assert tokens.tolist() == [0, 1, 3, 0, 2, 3, 1, 2]
    assert offs.tolist() == [3, 3, 6, 8] and offs.dtype is torch.int32
    assert torch.equal(tokens[places.long()], torch.arange(4).int()[:, None].expand(4, TAKEN))


I32, F32 = {"dtype": torch.int32}, {"dtype": torch.float32}
REFUSED = {
    "expected int32 or int64": lambda: route(meta(4, 2), EXPERTS),
    "multiples of 8": lambda: gather_rows(meta(4, 12), meta(3, **I32)),
    "expected contiguous int32": lambda: gather_rows(meta(4, 16), meta(3)),
    "expected one a row": lambda: gather_rows(meta(4, 16), meta(3, 2, **I32)),
    "tokens, taken. of both": lambda: combine_rows(meta(4, 16), meta(3, 2, **I32), meta(3, **F32)),
    "1 to 16 taken": lambda: combine_rows(meta(4, 16), meta(3, 17, **I32), meta(3, 17, **F32)),
    "expected both or none": lambda: experts_mlp(*[None] * 5, scale_up=meta(4, **F32)),
    "expected one of bf16, fp16": lambda: gather_rows(meta(4, 16, **F32), meta(3, **I32)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_no_kernel_takes_is_refused(message):
    with pytest.raises(InputError, match=message):
        REFUSED[message]()


PROGRAMS = {
    "work_list": lambda key: (work_list(*key[1:]), "tasks"),
    "grouped": lambda key: (grouped(key[1].config), "c"),
    "gather_rows": lambda key: (experts.gather_rows(key[1]), "sorted"),
    "combine_rows": lambda key: (experts.combine_rows(key[2], key[1]), "y"),
}


class Interpreted:
    """A kernel whose launch interprets its program, on the tensors' own memory."""

    def __init__(self, key):
        self.program, self.written = PROGRAMS[key[0]](key)

    def __call__(self, tensors, scalars, stream):
        tensors[self.written].zero_()
        arrays = {name: x.float().numpy() if x.is_floating_point() else x.numpy()
                  for name, x in tensors.items()}  # fmt: skip
        found = t.interpret(self.program, arrays)[self.written]
        tensors[self.written].copy_(torch.from_numpy(np.asarray(found, np.float32)))


def quantised(x):
    scale = x.float().abs().amax(-1) / 448
    return (x.float() / scale[..., None]).to(torch.float8_e4m3fn), scale


@pytest.mark.parametrize("narrow", [False, True])
def test_the_layer_is_that_of_every_token_alone(monkeypatch, narrow):
    """With e4m3 weights the other operands are rounded like them, which is most of the error."""
    monkeypatch.setattr(torch_program, "check_devices", lambda *_: None)
    monkeypatch.setattr(torch_program, "current_stream", lambda _: 0)
    monkeypatch.setattr(torch_program, "built_kernel", lambda key, tensor, make: Interpreted(key))
    torch.manual_seed(0)
    x = torch.randn(9, WIDTH).bfloat16()
    up = (torch.randn(EXPERTS, 2 * INNER, WIDTH) / 8).bfloat16().transpose(1, 2)
    down = (torch.randn(EXPERTS, WIDTH, INNER) / 8).bfloat16().transpose(1, 2)
    chosen, weights = torch.rand(9, EXPERTS).topk(TAKEN).indices, torch.rand(9, TAKEN)
    monkeypatch.setattr(torch_experts, "quantised_rows", quantised)
    given, scales = (up, down), ()
    if narrow:
        rounded = [quantised(one.transpose(1, 2)) for one in given]
        given = [one.transpose(1, 2) for one, _ in rounded]
        scales = [scale for _, scale in rounded]
        up, down = (a.double() * b[:, None] for a, b in zip(given, scales, strict=True))
    got = experts_mlp(x, *given, chosen, weights, *scales).double()
    want = torch.zeros(9, WIDTH).double()
    for token in range(9):
        for choice in range(TAKEN):
            expert = chosen[token, choice]
            gate, other = (x[token].double() @ up[expert].double()).chunk(2)
            inner = torch.nn.functional.silu(gate) * other
            want[token] += weights[token, choice].double() * (inner @ down[expert].double())
    assert float((got - want).norm() / want.norm()) < (5e-2 if narrow else 1e-2)
