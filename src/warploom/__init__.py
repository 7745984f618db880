"""warploom: derive, tile, schedule, emit and tune GPU kernels."""

__version__ = "0.1.0"
