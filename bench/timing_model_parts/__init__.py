"""The steps of the `timing-model` claim: make schedules, measure them, report."""
