"""The log lines of one module. Other threads, and tasks of earlier tests, may log during a test, too."""

from __future__ import annotations

from logging import LogRecord
from types import ModuleType

import pytest


def logged_by(caplog: pytest.LogCaptureFixture, module: ModuleType | str) -> list[LogRecord]:
    """The records of the logger of `module`, or of the module with this name, in their order."""
    name = module if isinstance(module, str) else module.__name__
    return [record for record in caplog.records if record.name == name]
