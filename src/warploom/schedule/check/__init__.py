"""What believes none of the solver: a checker of rules, a simulator."""
