"""Seconds that the console's pages take on a database of a thousand runs, one of them with 100,000 steps.

    python -m tests.benchmarks.console_pages [--runs 1000] [--steps 100000]

Serves the API on an SQLite database, and prints each page's wall seconds and the API's CPU-seconds, the best of three.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import httpx
import sqlalchemy as sa
from tests.benchmarks.connection import cpu_seconds

from tinkerflow.backend.catalog.model_card import ModelCard
from tinkerflow.backend.core.clock import SystemClock
from tinkerflow.backend.core.ids import model_id
from tinkerflow.backend.journal import Journal, Kind, NewModel, NewRequest, NewSession, migrate
from tinkerflow.backend.journal.run_metrics import RunMetric, RunMetricValue
from tinkerflow.backend.journal.tables import TrainingStep
from tinkerflow.backend.settings import Settings
from tinkerflow.deployments.tiny_model import make_tiny

STEPS_OF_OTHERS = 200


def furnish(folder: Path, runs: int, steps: int) -> str:
    """Write the rows into the database of a data dir, and return the id of the long run."""
    url, model = Settings(data_dir=folder).journal_url, str(make_tiny(folder / "tiny"))
    migrate(url)
    journal, now = Journal.open(url), SystemClock().now()
    journal.base_models.register([(model, ModelCard.load(model).to_json())])
    session = journal.sessions.create(NewSession("local", "0.38.0", display_name="many runs"))
    ids = [model_id(session, n) for n in range(runs)]
    for n, run in enumerate(ids):
        metadata = {"name": f"run {n}", "pipeline": ("sft", "rl", "dpo")[n % 3], "data": f"{n:064x}"}
        creation = NewRequest(Kind.CREATE_MODEL, "local", b"{}", run, model_id=run, seq_id=0)
        journal.models.create(NewModel(run, session, "local", "Qwen/Qwen3-8B", 32, user_metadata=metadata), creation)
    journal.close()
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        for n, run in enumerate(ids):
            count = STEPS_OF_OTHERS if n else steps
            rows = [
                {"model_id": run, "seq_id": 2 * step, "step": step, "at": now + timedelta(seconds=step), "tokens": 8192}
                | {"weight": 8e3, "loss": 2e4 / (n + step), "kl": 1e-3, "grad_norm": 1.0, "learning_rate": 1e-4}
                for step in range(1, count + 1)
            ]
            connection.execute(sa.insert(TrainingStep), rows)
            for name in ("reward", "answer_tokens"):
                metric = {"model_id": run, "name": name}
                connection.execute(sa.insert(RunMetric), metric | {"number": count, "last_step": count})
                values = [metric | {"step": step, "value": step / count} for step in range(1, count + 1)]
                connection.execute(sa.insert(RunMetricValue), values)
    engine.dispose()
    return ids[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=100_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        long = furnish(Path(folder), given.runs, given.steps)
        settings = {"TINKERFLOW_DATA_DIR": folder, "TINKERFLOW_PORT": str(port), "TINKERFLOW_PREFECT": "off"}
        api = subprocess.Popen([sys.executable, "-m", "tinkerflow", "api"], env=os.environ | settings)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as browser:
                until = time.monotonic() + 120
                while True:
                    try:
                        browser.get("/pool").raise_for_status()
                        break
                    except httpx.TransportError:
                        assert time.monotonic() < until, "the API did not start"
                        time.sleep(0.2)
                others = "&".join(f"run={long.rpartition(':')[0]}:{n}" for n in range(1, 8))
                for path in (
                    *("/", "/sessions", "/training_runs", "/checkpoints", "/samples", "/usage"),
                    "/training_runs?q=pipeline%3Drl+run&columns=reward,data&sort=reward&group=pipeline",
                    f"/training_runs/{long}",
                    f"/training_runs/{long}?x=tokens&smooth=0.9&log=yes",
                    f"/training_runs/{long}?first=50000&last=50400",
                    f"/compare?run={long}&{others}",
                ):
                    best = (1e9, 0.0, 0)
                    for _ in range(3):
                        spent, began = cpu_seconds(api.pid), time.perf_counter()
                        page = browser.get(path).raise_for_status()
                        best = min(best, (time.perf_counter() - began, cpu_seconds(api.pid) - spent, len(page.content)))
                    figures = {"seconds": round(best[0], 3), "cpu": round(best[1], 2), "kB": best[2] // 1000}
                    print(path.replace(long, "LONG").replace(others, "7 others"), json.dumps(figures), flush=True)
        finally:
            api.terminate()
            api.wait()


if __name__ == "__main__":
    main()
