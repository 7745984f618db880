"""The search for the fastest kernel of a user's program: its space, a model of time, a store."""
