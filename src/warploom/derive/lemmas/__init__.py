"""What makes a nest streamable: lemmas found, certified, applied."""
