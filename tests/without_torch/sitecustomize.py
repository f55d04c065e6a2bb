"""Hide torch from processes that tests start, because an installation of Tinkerflow has none.

Python imports a module of this name when it starts. The SDK and transformers would import torch, for five seconds.
"""

import sys

sys.modules["torch"] = None  # type: ignore[assignment]
