"""Kernels with planted faults for the emulation: files of several styles, emitted kernels by kind."""
