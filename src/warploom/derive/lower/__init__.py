"""Derivations as tile programs."""
