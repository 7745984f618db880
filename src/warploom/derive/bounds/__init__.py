"""Lower bounds on traffic, and when they may be claimed."""
