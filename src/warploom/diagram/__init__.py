"""The diagram floor."""
