"""User code, such as rewards and environments: imports it, calls it, and shows where it failed or blocks."""

from __future__ import annotations

import asyncio
import inspect
import pkgutil
import site
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import copy_context
from importlib import import_module
from types import FrameType
from typing import Any, TypeVar

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.core.suggest import did_you_mean

T = TypeVar("T")


class InterruptedCodeError(BaseException):
    """Code was interrupted after a request to stop. The message names the place that blocked the event loop, if any.

    `except Exception` in user code does not catch it.
    """


_NOT_THEIRS = ("tinkerflow", "importlib")  # packages with frames that are not the user's


def import_named(field: str, path: str) -> object:
    """The object at `package.module:name`.

    field: the parameter, for the error. UserError: there is no such module or name, or the module's own code fails.
    """
    module, _, name = path.partition(":")
    try:
        loaded = import_module(module)
    except (Exception, SystemExit) as error:  # a program may end itself when it is imported
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is None or not f"{module}.".startswith(f"{missing}."):
            raise UserError(f"{field} {path!r}: the module fails when it is imported: {described(error)}") from error
        raise UserError(f"{field} {path!r}: {_not_found(missing, name)}") from error
    if not hasattr(loaded, name):
        known = [known for known in vars(loaded) if not known.startswith("_")]
        raise UserError(f"{field} {path!r}: {loaded.__file__} has no {name!r}{did_you_mean(name, known)}")
    found: object = getattr(loaded, name)
    return found


def _not_found(module: str, name: str) -> str:
    """Why a module was not found: the searched folders, and a module with a similar name."""
    package, _, last = module.rpartition(".")
    parent = sys.modules.get(package)
    if parent is not None and last == "py":
        return f"a module is named without .py: write {package}:{name}"
    folders = [*getattr(parent, "__path__", sys.path)]
    near = [found.name for found in pkgutil.iter_modules(folders)]
    where = ", ".join(folders)
    if parent is None:
        installed = (sysconfig.get_path("stdlib"), *site.getsitepackages(), sysconfig.get_path("purelib"))
        own = [folder or "." for folder in folders if not folder.startswith(installed) and not folder.endswith(".zip")]
        where = ", ".join([*own, "and installed packages"])
    return f"there is no module {module!r}{did_you_mean(last, near)}; searched {where}"


async def call_in_thread(function: Callable[..., T], *arguments: object) -> T:
    """Call a plain function in a thread, so that it does not block the event loop. Returns its value.

    The thread does not end when the call is cancelled. It is a daemon, so it does not keep the process alive.
    """
    future, context = Future[T](), copy_context()

    def call() -> None:
        try:
            value = context.run(function, *arguments)
        except StopIteration as error:  # no asyncio future takes this error, so the call would never end
            found_nothing = RuntimeError("the function raised StopIteration: `next` found nothing")
            future.set_exception(found_nothing.with_traceback(error.__traceback__))
        except BaseException as error:  # noqa: BLE001  raised where the call is awaited
            future.set_exception(error)
        else:
            future.set_result(value)

    future.set_running_or_notify_cancel()  # so that a cancelled call can still set its value
    threading.Thread(target=call, name="call of a reward", daemon=True).start()
    return await asyncio.wrap_future(future)


async def call_in_loop(function: Callable[..., Any], *arguments: object) -> Any:
    """Call a function or an `async def` in the event loop. Returns its value. `blocking_reported` reports blocking.

    RuntimeError: the code raised CancelledError, although nothing cancels the caller.
    """
    try:
        value = function(*arguments)
        return await value if inspect.isawaitable(value) else value
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        reason = "it awaited a task that was cancelled"
        raise RuntimeError(reason).with_traceback(error.__traceback__) from error


@contextmanager
def blocking_reported(seconds: float, report: Callable[[str], None]) -> Iterator[None]:
    """During the block, report code of `call_in_loop` that blocks this event loop for more than `seconds`.

    report: called in a thread, in this context, with the function, its file and its line, once each time it blocks.
    """
    loop, blocked, ended = asyncio.get_running_loop(), threading.get_ident(), threading.Event()
    context = copy_context()

    def watch() -> None:
        while not ended.wait(min(seconds, 1.0)):
            passed = threading.Event()
            try:
                loop.call_soon_threadsafe(passed.set)
            except RuntimeError:  # the loop is closed
                return
            if not passed.wait(seconds) and (place := place_in_loop(sys._current_frames().get(blocked))):
                context.run(report, place)
            while not (passed.wait(seconds) or ended.is_set()):
                pass

    threading.Thread(target=watch, name="watch of the event loop", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def place_in_loop(frame: FrameType | None) -> str:
    """The user's function that `call_in_loop` is executing in these frames, with its file and line, or ""."""
    walked = [*traceback.walk_stack(frame)] if frame is not None else []
    calls = [i for i, (found, _) in enumerate(walked) if found.f_code is call_in_loop.__code__]
    own = [(found, line) for found, line in walked[: calls[0] if calls else 0] if _is_theirs(found)]
    if not own:
        return ""
    code = own[-1][0].f_code  # the outermost frame
    line = next(line for found, line in own if found.f_code.co_filename == code.co_filename)
    return f"{code.co_qualname} ({code.co_filename}:{line})"


def _is_theirs(frame: FrameType) -> bool:
    return frame.f_globals["__name__"].partition(".")[0] not in _NOT_THEIRS


def user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames of an error in the user's file, the first file that is not ours. Omits frames of libraries."""
    walked = traceback.walk_tb(error.__traceback__)
    own = [(frame, line) for frame, line in walked if _is_theirs(frame)]
    file = own[0][0].f_code.co_filename if own else ""
    return [*traceback.StackSummary.extract(one for one in own if one[0].f_code.co_filename == file)]


def described(error: BaseException) -> str:
    """The kind of an error, its message, and the place in the user's file, on one line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    frames = user_frames(error)
    return f"{text} ({frames[-1].filename}:{frames[-1].lineno})" if frames else text
