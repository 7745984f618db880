"""Kernels whose threads all do the same: every op of the language but the matmul."""
