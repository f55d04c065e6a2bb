"""Log levels of other libraries, changed for a while."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def logging_at(level: int, *names: str, propagate: bool | None = None) -> Iterator[None]:
    """Inside, the loggers of these names have this level. Afterwards they are as before.

    propagate: whether they pass their lines on to the loggers above them; None: as before.
    """
    loggers = [logging.getLogger(name) for name in names]
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.setLevel(level)
        logger.propagate = logger.propagate if propagate is None else propagate
    try:
        yield
    finally:
        for logger, (old_level, propagated) in zip(loggers, before, strict=True):
            logger.setLevel(old_level)
            logger.propagate = propagated
