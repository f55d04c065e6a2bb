"""The console log of `tinkerflow serve` and its flow runs: unchanged text, and no error when a person cancels a run."""

from __future__ import annotations

import copy
import logging

from prefect.logging.handlers import PrefectConsoleHandler


class PlainConsoleHandler(PrefectConsoleHandler):
    """Prefect's handler, except that `:train:` in a run's id stays text, and a cancelled run is no error."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("Finished in state Cancelled"):
            record = copy.copy(record)
            record.levelno, record.levelname = logging.INFO, "INFO"
        try:
            self.console.print(self.format(record), soft_wrap=True, emoji=False)
        except Exception:  # noqa: BLE001  as each handler of `logging` treats errors
            self.handleError(record)
