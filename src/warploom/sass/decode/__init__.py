"""Cubins and their instructions: words to opcodes, operands, control fields, effects."""
