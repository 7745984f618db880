"""Measurements behind the results: run one from the repository root, `python -m bench.NAME`."""
