"""`tinkerflow.local`: the complete service with a client, for a block of a program or for a notebook."""

from __future__ import annotations

import atexit
import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import TYPE_CHECKING, Any
from unittest import mock

from tinkerflow.backend.core.environment import variables
from tinkerflow.backend.settings import Settings
from tinkerflow.deployments.extras import require_extra
from tinkerflow.deployments.up import Stack

if TYPE_CHECKING:
    import tinker

log = logging.getLogger(__name__)

API_KEY = "tml-local"
_CLOSE_SECONDS = 60.0  # the longest wait for the end of the client's session


@contextmanager
def local(
    base_model: str | Path = "",
    *,
    data_dir: str | Path | None = None,
    progress: Callable[[str], None] = print,
    **settings: Any,
) -> Iterator[tinker.ServiceClient]:
    """Serve a base model on this machine for a block: `with tinkerflow.local(base_model=…) as service:`.

    The API, the engine and the workers are child processes on free ports of loopback. They end with the block, or with
    this process. Prefect tracks runs only with `prefect="embedded"`. In the block, the variables TINKER_BASE_URL and
    TINKER_API_KEY name the service, for programs that read them.

    base_model: a Hugging Face id or a folder; empty, or `tinkerflow/tiny` = the tiny embedded model.
    data_dir: the folder for checkpoints, logs and compiled programs, which later blocks can reuse; None = a scratch
    folder, which is removed at the end.
    progress: gets lines for people, from other threads.
    settings: settings of docs/settings.md, such as `processes=2`. They override environment variables.

    ValueError (pydantic's): a setting is wrong. UserError: the extra `server` is not installed. ServerError, with the
    last lines of the log: the service does not start.
    """
    if base_model:
        settings["base_models"] = (str(base_model),)
    folder = None if data_dir is None else Path(data_dir)
    with ExitStack() as stack:
        # A notebook may end inside the block. The service is stopped while the interpreter still has its threads.
        stack.callback(atexit.unregister, stack.close)
        atexit.register(stack.close)
        Thread(target=import_module, args=("tinker",), daemon=True).start()  # this takes seconds, while processes start
        serving = stack.enter_context(running_stack(folder, progress, **({"prefect": "off"} | settings)))
        import tinker
        from tinker.lib import console_urls

        console = mock.patch.object(console_urls, "_CONSOLE_BASE_URL", serving.api_url)
        stack.enter_context(console)  # links of the SDK's `get_console_url` lead to this service
        service = tinker.ServiceClient(api_key=API_KEY)
        stack.push(_closing(service))
        yield service


@contextmanager
def running_stack(data_dir: Path | None, report: Callable[[str], None], **settings: Any) -> Iterator[Stack]:
    """Run all parts on free ports for the block, in `data_dir` or a scratch folder. TINKER_BASE_URL names the API.

    report: gets lines for people, from other threads. settings: arguments of Settings. UserError: this installation
    has no server.
    """
    require_extra("server", "a service on this machine")
    with tempfile.TemporaryDirectory(prefix="tinkerflow-") as scratch:
        free: dict[str, Any] = {"data_dir": data_dir or Path(scratch), "port": 0, "prefect_port": 0}
        with Stack(Settings(**(free | settings)), report=report) as stack:
            report(stack.ready_line)
            names = {"TINKER_BASE_URL": stack.api_url, "TINKER_API_KEY": API_KEY, "TINKER_TELEMETRY": "0"}
            with variables(names):
                yield stack


def _closing(
    service: tinker.ServiceClient,
) -> Callable[[type[BaseException] | None, BaseException | None, TracebackType | None], None]:
    """A callback that closes the client's session at the end of the block, and waits at most _CLOSE_SECONDS."""

    def close(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            service.close("success" if kind is None else "errored").result(_CLOSE_SECONDS)
        except TimeoutError:  # a task of the SDK may miss its cancellation, and then never ends
            log.warning("the client's session was not closed within %g s; the service ends anyway", _CLOSE_SECONDS)

    return close
