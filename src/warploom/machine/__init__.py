"""GPUs as data: every number with its unit and its source."""

from warploom.machine.keys import KEYS, KINDS, Key
from warploom.machine.load import architecture, architectures, largest, load, names, overlay
from warploom.machine.machine import Machine, Quantity

__all__ = [
    "KEYS",
    "KINDS",
    "Key",
    "Machine",
    "Quantity",
    "architecture",
    "architectures",
    "largest",
    "load",
    "names",
    "overlay",
]
