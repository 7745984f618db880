"""Candidates in Python for sums of rows, where every operation of torch's is forbidden."""

import ctypes
import threading

import numpy as np
import torch


def right(x, y):
    rows, n = x.shape
    values = (ctypes.c_float * (rows * n)).from_address(x.data_ptr())
    sums = (ctypes.c_float * rows).from_address(y.data_ptr())
    for row in range(rows):
        sums[row] = sum(values[row * n : row * n + n])


def of_torch(x):
    return x.sum(-1)


def of_numpy(x, y):
    y.copy_(torch.from_numpy(np.sum(x.numpy(), -1)))


def in_another_thread(x, y):
    other = threading.Thread(target=lambda: torch.sum(x, -1, out=y))
    other.start()
    other.join()
