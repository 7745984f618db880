"""Scoreboards given out anew, and the proof that the program is still the same."""
