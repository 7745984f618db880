"""Candidates for a product of bf16 matrices with fp32 sums, without a product of torch's."""

import torch


def right(a, b):
    c = torch.zeros(a.shape[0], b.shape[1])
    for k in range(a.shape[1]):
        c += a[:, k : k + 1].float() * b[k : k + 1].float()
    return c


def right_into(a, b, c):
    parts = []
    for start in range(0, a.shape[1], 16):
        left, below = a[:, start : start + 16].float(), b[start : start + 16].float()
        parts.append((left[:, :, None] * below[None]).sum(1))
    c.copy_(torch.stack(parts).sum(0))


def library(a, b):
    return a.float() @ b.float()


def library_by_einsum(a, b):
    return torch.einsum("mk,kn->mn", a.float(), b.float())


def whole_tiles_of_k(a, b):
    k = a.shape[1] // 32 * 32
    return right(a[:, :k], b[:k])


def sums_in_bf16(a, b):
    c = torch.zeros(a.shape[0], b.shape[1], dtype=torch.bfloat16)
    for start in range(0, a.shape[1], 8):
        c += right(a[:, start : start + 8], b[start : start + 8]).bfloat16()
    return c.float()


def first_rows(a, b):
    c = torch.zeros(a.shape[0], b.shape[1])
    c[: a.shape[0] // 2] = right(a[: a.shape[0] // 2], b)
    return c


def weights_of_the_first_call(a, b, kept={}):  # noqa: B006 - the fault
    return right(a, kept.setdefault(b.shape, b.clone()))
