"""The fixtures of this folder."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from engine_parts import *  # noqa: F403
from prefect_server import collected_connections, server  # noqa: F401
