"""CUDA C++ to a cubin, with what the compiler says of it."""
