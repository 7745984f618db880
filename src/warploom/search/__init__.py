"""Searching for faster machine code: one game, several players."""
