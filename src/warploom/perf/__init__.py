"""Cycles of loops: their graph, walks of their steps, replays of their machine code."""
