"""Rewrites with checkers of their own: registers renamed, loops rotated, scoreboards anew."""
