"""The console log of `tinkerflow serve` and its flow runs: texts as they are, and no error where a person cancels."""

from __future__ import annotations

import copy
import logging

from prefect.logging.handlers import PrefectConsoleHandler


class PlainConsoleHandler(PrefectConsoleHandler):
    """Prefect's handler, without two faults: `:train:` of a run's id becomes an emoji, and a cancelled run an error."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the record."""
        if record.getMessage().startswith("Finished in state Cancelled"):
            record = copy.copy(record)
            record.levelno, record.levelname = logging.INFO, "INFO"
        try:
            self.console.print(self.format(record), soft_wrap=True, emoji=False)
        except Exception:  # noqa: BLE001  as each handler of `logging` treats errors
            self.handleError(record)
