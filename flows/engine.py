"""The engine: takes requests from the journal, runs them on the pool through flows and tasks, and answers them.

It runs in a thread with an event loop of its own. The engine therefore does not block its caller's loop, and the caller
receives signals.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from tinkerflow.backend.catalog.model_card import ModelCard
from tinkerflow.backend.core import tracing
from tinkerflow.backend.core.clock import SystemClock, every_second
from tinkerflow.backend.core.disk import make_folder
from tinkerflow.backend.core.errors import StoreError, UserError
from tinkerflow.backend.core.hosts import is_loopback, url_of, with_port
from tinkerflow.backend.core.joining import make_secret, parse_address
from tinkerflow.backend.journal import Journal, migrate
from tinkerflow.backend.pool import Hosts, Pool, PoolConfig, ThisMachine
from tinkerflow.backend.settings import Settings
from tinkerflow.backend.store import Store
from tinkerflow.backend.store.local import MARK
from tinkerflow.flows.compile_status import CompileStatusWatch
from tinkerflow.flows.dispatcher import Dispatcher
from tinkerflow.flows.groups import ServedModel, group_config
from tinkerflow.flows.lease import hold_lease
from tinkerflow.flows.observers import EngineObserver, Unobserved
from tinkerflow.flows.sampling_runner import SamplingRunner
from tinkerflow.tasks.execution.full_model_queue import FullModelQueue
from tinkerflow.tasks.execution.operation import AnswerWriter, ExecutionContext
from tinkerflow.tasks.execution.sampling_snapshots import Snapshots
from tinkerflow.tasks.execution.sequencer import Saves

if TYPE_CHECKING:
    from tinkerflow.flows.prefect.connection import PrefectConnection

log = logging.getLogger(__name__)

DRAIN_SECONDS = 5.0
_STORE_SECONDS = 1.0  # between two looks for a store that is not mounted
_LOCAL_JOIN_SECONDS = 3.0  # an agent of this machine tries ten times a second

T = TypeVar("T")

Say = Callable[[str], None]


async def run_engine(
    settings: Settings,
    *,
    on_ready: Callable[[], None],
    on_progress: Say,
    on_turn: Callable[[], None] = lambda: None,
    executor: str = "tinkerflow.backend.compute.executor:Executor",
) -> None:
    """Serve `settings.base_models` until cancelled; then stop cleanly and raise CancelledError.

    on_ready: called once, when the engine executes requests. on_progress: gets lines for people about the start and
    compilation. on_turn: called every second by the engine's event loop, in its thread, unless the loop is blocked.
    executor: the class that the worker processes run, as `module:name`.

    The engine continues where an earlier engine ended, even after a crash. Models are restored when they are first
    needed (tasks/execution), and pending requests are executed. One engine works on a journal at a time. A second
    engine waits until the first has ended, or has not renewed its lease in time.

    A clean stop takes no more requests from the journal. Operations in flight and last snapshots get DRAIN_SECONDS.
    UserError: invalid settings or base models. GroupFailedError: no worker group starts.
    """
    loop = asyncio.get_running_loop()
    ready, progress = partial(_call, loop, on_ready), partial(_call, loop, on_progress)
    await _in_thread(lambda stop: _run(settings, stop, ready, progress, on_turn, executor))


async def _run(
    settings: Settings,
    stop: asyncio.Event,
    on_ready: Callable[[], None],
    on_progress: Say,
    on_turn: Callable[[], None],
    executor: str,
) -> None:
    """Open the parts one after another, serve until `stop`, and close the parts in reverse order."""
    if not settings.base_models:
        raise UserError("base_models is empty: the engine must be given at least one base model")
    tracing.export("engine")
    make_folder(settings.data_dir)
    if settings.prefect != "off":  # otherwise Prefect is not imported, which takes a second of CPU time
        import tinkerflow.flows.prefect.mirror  # noqa: F401  before the heartbeats, which it would delay
    async with AsyncExitStack() as stack:
        _run_beside(stack, every_second(on_turn), "heartbeats")
        if (opened := await _unless(stop, _open_journal(settings, stack))) is None:
            return
        journal, cards, lease = opened
        store = Store.open(settings.store_url, clock=SystemClock())
        hosts = await _listen(settings, on_progress)
        if hosts is not None:
            stack.push_async_callback(hosts.close)
        if (mark := await _unless(stop, _wait_for_store(store, journal, cards, on_progress))) is None:
            return
        starting = [
            asyncio.create_task(_start_pool(settings, card, journal, hosts, on_progress, executor, mark))
            for card in cards
        ]
        stack.push_async_callback(_stop_pools, starting)
        # The Prefect server takes seconds of CPU to start, so it starts while the pools do.
        connection = await _open_prefect(settings, on_progress, stack)
        if (pools := await _unless(stop, asyncio.gather(*starting))) is None:
            return
        observer = await _open_observer(settings, journal, store, connection, cards)
        cards = [card.served_by(pool.info) if pool.ready else card for card, pool in zip(cards, pools, strict=True)]
        await asyncio.to_thread(journal.base_models.register, [(card.name, card.to_json()) for card in cards])
        answers = AnswerWriter(journal.results.finish)
        stack.push_async_callback(answers.close)
        served = [
            _serve_base_model(settings, journal, store, answers, card, pool, observer, stack)
            for card, pool in zip(cards, pools, strict=True)
        ]
        await _serve_until(stop, Dispatcher(settings, journal, observer, served), on_ready, lease)


def _run_beside(stack: AsyncExitStack, work: Coroutine[object, object, None], name: str) -> None:
    """Run `work` until the stack is closed."""
    stack.callback(asyncio.create_task(work, name=name).cancel)


async def _open_journal(
    settings: Settings, stack: AsyncExitStack
) -> tuple[Journal, list[ModelCard], asyncio.Task[None]]:
    """Open the journal. Returns it, the base models' cards, and the task that renews the lease of the journal."""
    await asyncio.to_thread(migrate, settings.journal_url)
    journal = Journal.open(settings.journal_url, clock=SystemClock())
    stack.callback(journal.close)
    load = partial(ModelCard.load, max_context=settings.max_context)
    cards = await asyncio.gather(*(asyncio.to_thread(load, name) for name in settings.base_models))
    lease = await stack.enter_async_context(hold_lease(journal))
    for card in cards:
        await asyncio.to_thread(journal.base_models.note_progress, card.name, "the service is starting")
    return journal, cards, lease


async def _open_prefect(settings: Settings, say: Say, stack: AsyncExitStack) -> PrefectConnection | None:
    """Open the connection to Prefect until the stack is closed; None if nothing is tracked."""
    if settings.prefect == "off":
        return None
    from tinkerflow.flows.prefect.connection import open_prefect

    return await stack.enter_async_context(open_prefect(settings, say))


async def _open_observer(
    settings: Settings, journal: Journal, store: Store, connection: PrefectConnection | None, cards: Sequence[ModelCard]
) -> EngineObserver:
    """Open the mirror that shows runs in Prefect, if there is one. Emit an event that the engine has started."""
    if connection is None:
        return Unobserved()
    from tinkerflow.flows.prefect.mirror import Mirror
    from tinkerflow.flows.prefect.pacing import Pacing

    pacing = Pacing(settings.tracked_runs_per_second, SystemClock())
    api_url = settings.public_url.rstrip("/") or url_of(settings.host, settings.port)
    mirror = Mirror(
        connection,
        pacing,
        journal=journal,
        api_url=api_url,
        budget_tokens=settings.budget_tokens,
        drift_limits=settings.drift_limits,
        store=store,
    )
    await mirror.reconcile()
    epoch = journal.leases.epoch or 0  # how many engines have held the lease of this journal
    event = "tinkerflow.engine.restarted" if epoch > 1 else "tinkerflow.engine.started"
    base_models = [card.name for card in cards]
    mirror.emit(event, str(settings.data_dir), "engine", engine=epoch, base_models=base_models)
    return mirror


def _serve_base_model(
    settings: Settings,
    journal: Journal,
    store: Store,
    answers: AnswerWriter,
    card: ModelCard,
    pool: Pool,
    observer: EngineObserver,
    stack: AsyncExitStack,
) -> ServedModel:
    """Make the parts that serve one base model. card, pool: the base model's. The other arguments are the engine's."""
    saves = Saves()
    context = ExecutionContext(
        journal,
        pool,
        store,
        card,
        SystemClock(),
        answers,
        saves,
        Snapshots(saves),
        drift_limits=settings.drift_limits,
        recheck_share=settings.recheck_share,
        max_stored_bytes=settings.max_stored_bytes,
        inflight_kv_cache=settings.inflight_kv_cache,
        prefill_answers=settings.prefill_answers,
        routing_replay=settings.routing_replay,
        support_replay=settings.support_replay,
        full_models=FullModelQueue(settings.host_snapshot_bytes),
    )
    stack.callback(context.close)
    _run_beside(stack, CompileStatusWatch(journal, pool, card).watch(), "compile status")
    sampling = SamplingRunner(context, observer.observe_sampling(card.name), most_waiting=4 * settings.sample_slots)
    return ServedModel(card, context, pool, sampling)


async def _serve_until(
    stop: asyncio.Event, dispatcher: Dispatcher, on_ready: Callable[[], None], lease: asyncio.Task[None]
) -> None:
    serving = asyncio.create_task(dispatcher.serve(on_ready), name="dispatcher")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    await asyncio.wait((serving, stopping, lease), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if lease.done():
        serving.cancel()
        await asyncio.wait((serving,))
        await lease  # raises the reason
    if not serving.done():
        dispatcher.stop()
        await asyncio.wait((serving,), timeout=DRAIN_SECONDS)
        if not serving.done():
            log.warning("stopping while requests are in flight: they stay pending in the journal")
            serving.cancel()
            await asyncio.wait((serving,))
    if not serving.cancelled():
        await serving


async def _unless(stop: asyncio.Event, work: Awaitable[T]) -> T | None:
    """Await `work`, and return its result. None if `stop` is set first, in which case `work` is cancelled.

    Another engine may never release the lease, and hosts may never join.
    """
    working, stopping = asyncio.ensure_future(work), asyncio.create_task(stop.wait(), name="stop")
    await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if stop.is_set():
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        return None
    return await working


async def _stop_pools(starting: Sequence[asyncio.Task[Pool]]) -> None:
    """Stop the pools, and cancel those that are still starting."""
    for task in starting:
        task.cancel()
    for pool in await asyncio.gather(*starting, return_exceptions=True):
        if isinstance(pool, Pool):
            await pool.stop()


async def _listen(settings: Settings, on_progress: Say) -> Hosts | None:
    """Listen for hosts, if `group` is set: other machines, or the agent that `tinkerflow up` starts on this one."""
    if not settings.group:
        return None
    host, port = parse_address(settings.group)
    secret = await asyncio.to_thread(make_secret, settings.group_secret_path)
    try:
        hosts = await Hosts.listen(host, port, secret, settings.heartbeat_timeout)
    except OSError as error:
        raise UserError(f"group is {settings.group!r}: cannot listen at this address: {error}") from error
    if not await _is_joined(hosts, within=_LOCAL_JOIN_SECONDS if is_loopback(host) else 0):
        address = with_port(host, hosts.port)
        on_progress(f"hosts join at {address}: tinkerflow worker --group {address}")
    return hosts


async def _is_joined(hosts: Hosts, *, within: float) -> bool:
    """Whether a host joins in time. within: seconds."""
    with suppress(TimeoutError):
        async with asyncio.timeout(within):
            while hosts.missing(1):
                await hosts.changed()
            return True
    return False


async def _wait_for_store(store: Store, journal: Journal, cards: Sequence[ModelCard], on_progress: Say) -> str:
    """Wait until the store has the states of this journal. Returns its mark, or "" if the store is away.

    The folder of a disk that is not mounted is empty. Its snapshots would count as lost, and saves would go elsewhere.
    If the store is away, states pass through the engine until its next start.
    """
    url = store.url
    known = None if url.startswith("memory:") else await asyncio.to_thread(journal.recovery.store_mark, url)
    told = False
    try:
        while known is not None and await asyncio.to_thread(store.find_mark) != known:
            text = f"store {url} does not contain this service's checkpoints: mount it"
            if not told:
                on_progress(f"{text} (if it was emptied on purpose, write {known} into the object {MARK} of the store)")
                for card in cards:
                    await asyncio.to_thread(journal.base_models.note_progress, card.name, text)
            told = True
            await asyncio.sleep(_STORE_SECONDS)
        mark = await asyncio.to_thread(store.mark)
    except StoreError as error:
        log.warning("worker processes get states from the engine: %s", error)
        return ""
    await asyncio.to_thread(journal.recovery.note_store, url, mark)
    return mark


async def _start_pool(
    settings: Settings,
    card: ModelCard,
    journal: Journal,
    hosts: Hosts | None,
    on_progress: Say,
    executor: str,
    store_mark: str,
) -> Pool:
    """Start the pool of a base model. Its worker group starts on demand if not all base models can have one.

    settings: the engine's. card: the base model's. journal: shows clients why the start waits. hosts: for the
    worker processes; None for this machine. on_progress: gets lines for people. executor: see PoolConfig. store_mark:
    see `group_config`.
    """

    async def tell(text: str) -> None:
        await asyncio.to_thread(journal.base_models.note_progress, card.name, text)

    config = PoolConfig(
        group_config(settings, card.path, card.max_context, store_mark, experts=card.experts_per_token > 0),
        processes=settings.processes,
        command_deadline=settings.command_deadline,
        start_deadline=settings.start_deadline,
        executor=executor,
        heartbeat_timeout=settings.heartbeat_timeout,
        chunks_per_microbatch=settings.chunks_per_microbatch,
        groups=settings.groups,
    )
    site = hosts or ThisMachine(settings.data_dir / "logs", settings.platform)
    on_demand = settings.groups < len(settings.base_models)
    return await Pool.start(config, site, on_progress=on_progress, on_waiting=tell, on_demand=on_demand)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: object) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(function, *args)


async def _in_thread(main: Callable[[asyncio.Event], Coroutine[object, object, None]]) -> None:
    """Await `main` in the event loop of a new thread. Cancellation sets the event that is passed to `main`."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def run() -> None:
        stop = asyncio.Event()
        started.set_result((asyncio.get_running_loop(), stop))
        await main(stop)

    def thread() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:  # noqa: BLE001  the caller gets it
            loop.call_soon_threadsafe(ended.set_exception, error)
        else:
            loop.call_soon_threadsafe(ended.set_result, None)

    # The workers that this process starts end with this thread, so it lives until the pool is stopped.
    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(thread,), name="engine", daemon=True).start()
    inner, stop = await asyncio.wrap_future(started)
    try:
        await asyncio.shield(ended)
    except asyncio.CancelledError:
        inner.call_soon_threadsafe(stop.set)
        await asyncio.wait((ended,))
        ended.result()
        raise
