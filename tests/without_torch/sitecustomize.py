"""Processes that tests start have no torch, because an installation of Tinkerflow has none.

Python imports this by its name when it starts. Where torch is, the SDK and transformers import it: for five seconds.
"""

import sys

sys.modules["torch"] = None  # type: ignore[assignment]
