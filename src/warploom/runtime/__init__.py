"""Load, launch, test and time cubins; keep what was measured."""
