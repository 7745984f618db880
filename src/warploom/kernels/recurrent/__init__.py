"""Linear attention with a decaying state: program, reference, schedules."""
