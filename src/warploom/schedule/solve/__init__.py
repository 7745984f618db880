"""The solver: encodings, objectives, and how they are gone through."""
