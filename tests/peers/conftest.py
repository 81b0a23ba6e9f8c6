"""Scripts of ci/ import what they share by name, as they do when they are started from there."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "ci"))
