"""What a derivation moves, holds and takes: traffic, tiles, time on a GPU."""
