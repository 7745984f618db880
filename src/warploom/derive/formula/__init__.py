"""Formulas as diagrams: language, graph, operators, library, evaluation."""
