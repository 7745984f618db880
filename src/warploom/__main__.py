"""`python -m warploom` is the `warploom` command."""

from warploom.cli import main

main()
