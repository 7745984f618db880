"""Hopper on a CPU: CUDA C++ runs from its source, and what it leaves to luck is a fault."""
