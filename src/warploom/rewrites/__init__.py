"""Rules that rewrite a textbook tile program into one that runs faster and means the same."""
