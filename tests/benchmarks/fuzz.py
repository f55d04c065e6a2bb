"""Ten thousand broken requests to one API process: what it answers, how long that takes, and what memory it keeps.

    .venv/bin/python -m tests.benchmarks.fuzz [--requests 10000] [--database-url URL] [--seed 1]

Starts `tinkerflow api` alone in a scratch folder, over SQLite, with the NumPy engine of tests/api/conftest.py in this
process. Two thirds are valid requests broken by tests/api/fuzz.py, one third is made by schemathesis from the OpenAPI
document. Ends with an error at the first 5xx, hang, or operation that is never answered. Prints the statuses, and the
server's memory as it goes. RESULTS.md keeps the output.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from tests.api.conftest import BASE, Engine, lettered_card
from tests.api.fuzz import KEY, PROTO, Target, attacks
from tests.benchmarks.waiters import cpu_seconds, memory

from tinkerflow.api.app import create_app
from tinkerflow.backend.journal import Journal, migrate
from tinkerflow.backend.settings import Settings
from tinkerflow.backend.store import Store
from tinkerflow.backend.supervise.processes import free_port


def run(target: Target, document: dict[str, Any], requests: int, pid: int, number: int) -> None:
    """Attack until `requests` were answered; print the server's memory ten times on the way."""
    target.prepare()
    schema = schemathesis.openapi.from_dict(document)
    operations = [one.ok() for one in schema.exclude(path_regex=PROTO).get_all_operations()]
    began, step = time.monotonic(), requests // 10
    told, slowest = 0, 0.0

    def tell() -> None:
        nonlocal told
        if target.sent >= told * step:
            told += 1
            seconds = time.monotonic() - began
            print(f"{target.sent:6} requests  {seconds:6.1f} s  server {memory(pid) / 2**20:6.1f} MiB", flush=True)

    def part(count: int, strategy: st.SearchStrategy[Any], send: Callable[[Any], None], of: int) -> None:
        @seed(of)
        @settings(
            max_examples=count, database=None, deadline=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(strategy)
        def one(drawn: Any) -> None:
            nonlocal slowest
            at = time.monotonic()
            send(drawn)
            slowest = max(slowest, time.monotonic() - at)
            tell()

        one()

    def ask(case: Any) -> None:
        case.headers = {"X-API-Key": KEY}
        answer = case.call(base_url=target.url, timeout=60)
        target.note(answer.status_code)
        assert answer.status_code < 500, (case.method, case.path, answer.status_code, answer.text)

    # In turns: memory that one kind of request kept would show as a slope, not as a step.
    for turn in range(10):
        part(step * 2 // 3, attacks(target.endpoints()), target.launch, number * 100 + turn)
        asked = (turn + 1) * step - target.sent
        part(asked, st.one_of([operation.as_strategy() for operation in operations]), ask, number * 100 + turn)
    print("statuses: " + "  ".join(f"{status}: {count}" for status, count in sorted(target.statuses.items())))
    print(f"slowest of all, with its future answered: {slowest * 1000:.0f} ms; load {os.getloadavg()[0]:.1f}")


def main() -> None:
    """Start the server and the engine, attack, stop them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--database-url", default="")
    parser.add_argument("--seed", type=int, default=1)
    given_ = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        configured = Settings(data_dir=Path(folder), port=port, poll_hold=0.5, database_url=given_.database_url)
        migrate(configured.journal_url)
        journal = Journal.open(configured.journal_url)
        journal.base_models.register([(BASE, lettered_card(Path(folder) / "bigram").to_json())])
        store = Store.open(configured.store_url)
        document = create_app(configured, journal, MagicMock(), store).openapi()
        engine = Engine(journal, store)
        thread = threading.Thread(target=engine.run)
        thread.start()
        command = [sys.executable, "-m", "tinkerflow", "api"]
        log = Path(folder) / "api.log"
        with log.open("wb") as output:
            environment = {**os.environ, **configured.environment()}
            server = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        try:
            while socket.socket().connect_ex(("127.0.0.1", port)):
                assert server.poll() is None, "the server ended"
                time.sleep(0.1)
            with httpx.Client() as http:
                target = Target(http, f"http://127.0.0.1:{port}")
                run(target, document, given_.requests, server.pid, given_.seed)
            assert server.poll() is None, "the server ended"
            print(f"server used {cpu_seconds(server.pid):.0f} s of CPU; tracebacks in its log: {_tracebacks(log)}")
        finally:
            engine.stopped = True
            thread.join()
            server.terminate()
            server.wait(30)
            journal.close()


def _tracebacks(log: Path) -> int:
    return log.read_text(errors="replace").count("Traceback")


if __name__ == "__main__":
    main()
