"""Parts of bench/own_kernels.py: the cases, the rows."""
