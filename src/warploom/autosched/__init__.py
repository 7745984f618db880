"""From a program to a kernel schedule: named, solved, or the best of several."""
