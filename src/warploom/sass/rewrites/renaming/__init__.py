"""Giving values other registers: find what may be renamed, do it, and prove it changed nothing."""
