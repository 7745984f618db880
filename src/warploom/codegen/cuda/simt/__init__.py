"""The printer of kernels whose threads all do the same."""
