"""The worker's side of transfers: threads read and write states in the store, so states bypass the driver.

Commands continue meanwhile. A fetched state stays in host memory until a command imports it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from tinkerflow.backend.pool.protocol.messages import Transfer, Transferred, to_failed
from tinkerflow.backend.spec.checkpoint import Digest
from tinkerflow.backend.spec.commands import FetchState, Float32, GroupConfig, StoredState, WriteState

if TYPE_CHECKING:
    from tinkerflow.backend.store.blobs import Blobs

log = logging.getLogger(__name__)

PATIENCE = 60.0  # seconds
_THREADS = 2  # concurrent transfers


@runtime_checkable
class StateHolder(Protocol):
    """An executor that reads and writes its part of a state. Other executors get complete states from the driver."""

    def take_kept(self, write: WriteState) -> Mapping[str, Float32]:
        """Remove the tensors that an ExportAdapter command kept for `write`, and return them with their names."""

    def needed_tensors(self, state: StoredState, shapes: Mapping[str, tuple[int, ...]]) -> Collection[str]:
        """The names of the stored tensors that this process needs. shapes: the shape of each stored tensor."""

    def keep_fetched(self, fetch: FetchState, tensors: Mapping[str, Float32]) -> None:
        """Keep the fetched tensors until a command imports them."""


class Transfers:
    """Executes the driver's transfers, each in a thread."""

    def __init__(self, executor: object, config: GroupConfig, rank: int, patience: float = PATIENCE) -> None:
        """Check whether this process can reach the group's store.

        executor: reads and writes states if it is a StateHolder. config: the group's configuration. rank: this
        process's rank. patience: seconds that the store may take to answer. A hanging store must not prevent the start
        of a group.
        """
        self._rank = rank
        self._holder = executor if isinstance(executor, StateHolder) else None
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="transfer")
        reach = self._holder is not None and config.store_url
        self._blobs = reached_store(config, self._threads, patience) if reach else None

    @property
    def reach_store(self) -> bool:
        """Whether this process can read and write states itself."""
        return self._blobs is not None

    def start(self, transfer: Transfer, answer: Callable[[Transferred], None]) -> None:
        """Start a transfer. `answer` is called once, in another thread."""
        self._threads.submit(self._run, transfer, answer)

    def _run(self, transfer: Transfer, answer: Callable[[Transferred], None]) -> None:
        try:
            answer(Transferred(transfer.number, self._do(transfer.job), None))
        except Exception as error:
            log.exception("%s failed", type(transfer.job).__name__)
            answer(Transferred(transfer.number, {}, to_failed(error)))

    def _do(self, job: FetchState | WriteState) -> Mapping[str, Digest]:
        from tinkerflow.backend.store import parts

        assert self._holder is not None
        assert self._blobs is not None
        if isinstance(job, WriteState):
            return parts.write_part(self._blobs, job.folder, self._rank, self._holder.take_kept(job))
        holder = self._holder
        holder.keep_fetched(
            job, parts.read_tensors(self._blobs, job.state, lambda shapes: holder.needed_tensors(job.state, shapes))
        )
        return {}


def reached_store(config: GroupConfig, threads: ThreadPoolExecutor, patience: float = PATIENCE) -> Blobs | None:
    """The store that `config` names; None if this process cannot reach it within `patience` seconds."""
    from tinkerflow.backend.store import parts
    from tinkerflow.backend.store.blobs import open_blobs

    def look() -> Blobs | None:
        blobs = open_blobs(config.store_url)
        return blobs if parts.is_store(blobs, config.store_mark) else None

    why = "it is another store, or it does not exist"
    try:
        if (blobs := threads.submit(look).result(patience)) is not None:
            return blobs
    except TimeoutError:
        why = f"no answer within {patience:g} s"
    except Exception as error:  # noqa: BLE001  after any error of the store's client, the driver sends the states
        why = repr(error)
    log.info("store %s cannot be used from here: %s; states come from the driver", config.store_url, why)
    return None
