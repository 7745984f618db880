"""From a tile program and a schedule to standalone CUDA C++ and a cubin."""
