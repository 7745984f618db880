"""The artifacts of scheduling: graph, target, rules, costs, schedule, analytic bounds."""
