"""Kernels in tile language: the library's (GEMM, attention) and a user's own."""

from warploom.kernels.user import UserKernel

__all__ = ["UserKernel"]
