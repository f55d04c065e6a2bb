"""The fixtures of engine_parts.py, for this folder."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from engine_parts import *  # noqa: F403
