"""Kernels of a derivation: groups, streams, masks, legality."""
