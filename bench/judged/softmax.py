"""Candidates for softmax over rows."""

import os
import sys
import threading
import time
from pathlib import Path

import torch


def right(x):
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


def right_into(x, y):
    for row in range(x.shape[0]):
        largest, total = -float("inf"), 0.0
        for start in range(0, x.shape[1], 16):
            part = x[row, start : start + 16]
            new = max(largest, float(part.max()))
            total = total * float(torch.exp(torch.tensor(largest - new)))
            total += float(torch.exp(part - new).sum())
            largest = new
        y[row] = torch.exp(x[row] - largest) / total


def right_with_a_plan(x):
    plans.setdefault(x.shape, max(1, 256 // x.shape[1]))  # state that is no result
    parts = x.split(plans[x.shape])
    return torch.cat([right(part) for part in parts])


plans = {}
results = {}


def cached_by_address(x):
    return results.setdefault(x.data_ptr(), right(x)).clone()


def cached_by_shape(x):
    return results.setdefault(x.shape, right(x)).clone()


def cached_by_sample(x):
    return results.setdefault((x.shape, float(x[0, 0]), float(x[-1, -1])), right(x)).clone()


def one_buffer(x):
    if x.shape not in results:
        results[x.shape] = torch.empty_like(x)
    return torch.softmax(x, -1, out=results[x.shape])


def constant(x):
    return torch.full_like(x, 1 / x.shape[-1])


def allocated(x):
    return torch.empty_like(x)


def in_halves(x):
    return torch.softmax(x.bfloat16(), -1).float()


def without_maximum(x):
    e = torch.exp(x)
    return e / e.sum(-1, keepdim=True)


def whole_tiles(x, y):
    width = x.shape[1] // 32 * 32
    y[:, :width] = right(x)[:, :width]


def past_the_row(x):
    wide = torch.as_strided(x, (x.shape[0], x.shape[1] + 1), (x.shape[1], 1))
    return right(wide)[:, :-1].contiguous()


def one_too_many(x, y):
    y.copy_(right(x))
    torch.as_strided(y, (y.numel() + 1,), (1,))[-1] = 0.0


def in_place(x):
    x.copy_(right(x))
    return x


def scratch_in_input(x):
    y = right(x)
    x.zero_()
    return y


def in_a_thread(x):
    y = torch.zeros_like(x)
    threading.Thread(target=lambda: (time.sleep(0.004), y.copy_(right(x)))).start()
    return y


calls = [0, 0.0]


def after_some_calls(x):
    calls[0] += 1
    return right(x) if calls[0] < 12 else torch.zeros_like(x)


def when_not_hurried(x):
    waited, calls[1] = time.perf_counter() - calls[1], time.perf_counter()
    return right(x) if waited > 0.002 else torch.zeros_like(x)


class Later(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        plain = [right(a.as_subclass(torch.Tensor)) if isinstance(a, Later) else a for a in args]
        return func(*plain, **(kwargs or {}))


def when_read(x):
    return x.clone().as_subclass(Later)


def negated_view(x):
    return torch._neg_view(-right(x))


def never_ends(x):
    while True:
        time.sleep(1.0)


def leaves(x):
    os._exit(0)


def noisy(x):
    return right(x) * (1.0 + 1e-7 * torch.rand_like(x))


def from_the_problem(x):
    sys.path.insert(0, str(Path(__file__).parent))
    import problems  # noqa: PLC0415 - the fault

    return problems.softmax.reference(x)


def reads_the_problem(x):
    assert "softmax" in (Path(__file__).parent / "problems.py").read_text()
    return right(x)


def no_synchronize(x):
    torch.cuda.synchronize = lambda device=None: None
    return right(x)


def slow_clock(x):
    began = time.perf_counter()
    time.perf_counter = lambda: began
    return right(x)


def easy_comparison(x):
    torch.allclose = lambda *args, **options: True
    return torch.zeros_like(x)


def multiples_only(x):
    assert x.shape[1] % 32 == 0, "expected whole tiles"
    return right(x)


def wider(x):
    return right(x.double())
