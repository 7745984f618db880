"""The six scoreboards given out anew: what sets which, and who waits for what."""
