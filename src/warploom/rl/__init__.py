"""The assembly game for learned players: an environment, its observations, policies, training."""
