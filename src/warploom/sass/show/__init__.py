"""Machine code explained, compared and counted."""
