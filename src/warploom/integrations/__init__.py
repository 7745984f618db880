"""Joins warploom to the tools that make and run kernels, without forking them."""
