"""Reports a person reads: HTML, traces, tables."""
