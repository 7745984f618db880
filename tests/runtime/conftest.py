"""Lets tests, and the worker processes they spawn, import the fake device by name."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
