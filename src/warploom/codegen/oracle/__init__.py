"""Block programs run on a CPU, asynchronous operations in any order they may have."""
