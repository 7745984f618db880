"""Tuned tables of kernels: what was recorded, and what of it a shape gets."""
