"""Starting a worker process, and saying how one ended."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import backend

_PACKAGES = Path(backend.__file__).parents[1]
_STDERR = 2  # ours, inherited


async def spawn_worker(
    *, port: int, secret: bytes, generation: int, rank: int, log_dir: Path | None
) -> asyncio.subprocess.Process:
    """Start `backend.pool.worker`, which will connect to `port`. It writes to our stderr, or to a file in `log_dir`.

    The secret goes through standard input. The worker leads a session of its own: Ctrl-C reaches the supervisor only.
    """
    path = os.pathsep.join(filter(None, (str(_PACKAGES), os.environ.get("PYTHONPATH"))))
    output = _STDERR if log_dir is None else _log_file(log_dir, rank)
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "backend.pool.worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=output,
            stderr=output,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )
    finally:
        if output != _STDERR:
            os.close(output)
    birth = {"port": port, "secret": secret.hex(), "generation": generation, "rank": rank, "parent": os.getpid()}
    assert process.stdin is not None  # for the type checker: PIPE was asked for
    process.stdin.write(json.dumps(birth).encode())  # far less than a pipe holds: no need to drain
    process.stdin.close()
    return process


def _log_file(folder: Path, rank: int) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    return os.open(folder / f"worker-{rank}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def how_it_ended(code: int) -> str:
    """`was killed by SIGKILL`, `ended with exit status 1`: for a process's return code."""
    if code >= 0:
        return f"ended with exit status {code}"
    known = {s.value: s.name for s in signal.Signals}
    return f"was killed by {known.get(-code, f'signal {-code}')}"
