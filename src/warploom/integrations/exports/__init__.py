"""Kernels to ship: folders that run without warploom, and the pack of the library's defaults."""
