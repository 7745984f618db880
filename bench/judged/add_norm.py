"""Candidates for x + r and its RMS norm, two results."""

import torch

print("what a candidate prints is no part of a verdict")


def right(x, r):
    h = x + r
    return h / torch.sqrt((h * h).sum(-1, keepdim=True) / h.shape[-1] + 1e-6), h


def right_into(x, r, y, h):
    torch.add(x, r, out=h)
    y.copy_(h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6))


def into_the_residual(x, r):
    r += x
    return right(r, torch.zeros_like(r))[0], r


def no_epsilon(x, r):
    h = x + r
    return h * torch.rsqrt((h * h).mean(-1, keepdim=True)), h


def swapped(x, r):
    y, h = right(x, r)
    return h, y


def one_result(x, r):
    return right(x, r)[0]


def not_one_tensor(x, r):
    return right(x, r if r.data_ptr() != x.data_ptr() else torch.zeros_like(r))
