"""Kernels with planted faults for the emulation: files of several styles, and emitted kernels."""
