"""What follows from the order of instructions: paths, loops, liveness, aliasing, scoreboards."""
