"""Parts of bench/whole_set.py: prepare the bases, play on them, report."""
