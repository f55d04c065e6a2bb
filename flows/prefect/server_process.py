"""The process of the embedded Prefect server: `python -m …server_process SOCKET PARENT [PUBLIC_URL]`.

It replaces `prefect server start`, without Prefect's command line. SOCKET: the number of the listening socket
that the parent has opened. PARENT: the parent's process id. This process ends when the parent ends. PUBLIC_URL: the URL
of a proxy that serves it to people.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
from pathlib import Path

from tinkerflow.backend.core.disk import make_private
from tinkerflow.backend.supervise.processes import die_with_parent


def main() -> None:
    """Serve until SIGTERM, or until the parent ends."""
    listener, parent = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    die_with_parent(parent)
    os.umask(0o077)  # Prefect's database is for the owner only
    gc.disable()  # collections took a tenth of the start's CPU time
    import uvicorn
    from prefect.server.api.server import create_app

    from tinkerflow.flows.prefect.guard import GuardedApp

    app = GuardedApp(
        create_app(),
        os.environ["PREFECT_SERVER_API_AUTH_STRING"],
        *sys.argv[3:],
    )
    for path in Path(os.environ["PREFECT_SERVER_UI_STATIC_DIRECTORY"]).rglob("*"):
        make_private(path)  # `create_app` has copied folders with their modes
    gc.freeze()  # later collections skip the modules
    gc.enable()
    config = uvicorn.Config(app, log_level="warning", timeout_keep_alive=5, timeout_graceful_shutdown=2)
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
