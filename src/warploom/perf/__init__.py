"""Cycles of loops: the graph of a tile program's loop, the replay of its machine code."""
