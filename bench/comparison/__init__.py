"""The parts of `bench/search_comparison.py`: runs, the process that scores for them, the report."""
