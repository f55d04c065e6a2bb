"""Translation of a store's OSErrors into StoreErrors that name the store and the failed action."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tinkerflow.backend.core.errors import StoreAwayError, StoreError


@contextmanager
def store_errors(url: str, action: str) -> Iterator[None]:
    """Raise OSErrors of the block as StoreAwayErrors, and a missing file as StoreError.

    url: the store's URL. action: completes "cannot ...".
    """
    try:
        yield
    except OSError as error:
        kind = StoreError if isinstance(error, FileNotFoundError) else StoreAwayError
        raise kind(f"store {url}: cannot {action} ({error})") from error
