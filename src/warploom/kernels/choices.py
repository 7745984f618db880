"""Which variant of a kernel a shape gets: `gemm_choices` and `attention_choices` under one name.

Both are lists of variants and a time model with a few constants that are fitted to measured rows
(bench/fit_gemm.py, bench/fit_attention.py; one H200, torch 2.11, nvcc 13.5, random data).
"""

from __future__ import annotations

from warploom.kernels.attention.choose import (
    ATTENTION_CHOICES,
    AttentionChoice,
    choose_attention,
    default_attention,
)
from warploom.kernels.gemm.choose import (
    GEMM_CHOICES,
    SHARED_REGISTERS,
    GemmChoice,
    choose_gemm,
    default_gemm,
    gemm_choice,
)

__all__ = [
    "ATTENTION_CHOICES",
    "GEMM_CHOICES",
    "SHARED_REGISTERS",
    "AttentionChoice",
    "GemmChoice",
    "choose_attention",
    "choose_gemm",
    "default_attention",
    "default_gemm",
    "gemm_choice",
]
