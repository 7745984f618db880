"""The printer: block programs as CUDA C++ for Hopper and for sm_80."""
