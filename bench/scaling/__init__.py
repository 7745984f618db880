"""Candidates scored on several workers: processes of a host, its GPUs, a Ray cluster."""
