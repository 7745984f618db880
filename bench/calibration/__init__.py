"""Latency and throughput of the GPU at hand: small kernels, run and fitted into a timing table."""
