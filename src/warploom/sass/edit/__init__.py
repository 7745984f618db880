"""Changing instructions and deriving their control fields again."""
