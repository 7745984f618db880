"""Derivations drawn and written down."""
