"""Lowering: from a tile program and a schedule to a block program."""
