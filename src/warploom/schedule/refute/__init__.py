"""Lower bounds proved again by a search that knows nothing of the solver's model."""
