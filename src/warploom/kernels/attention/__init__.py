"""Attention forward: the tile program, its tuned variants, how one is chosen, the reference."""
