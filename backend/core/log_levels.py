"""Log levels of other libraries, changed temporarily."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def logging_at(level: int, *names: str, propagate: bool | None = None) -> Iterator[None]:
    """Set the level of the named loggers for the duration of the block.

    propagate: whether they pass their lines on to their parent loggers; None: unchanged.
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
