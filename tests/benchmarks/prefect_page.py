"""Prefect beside a long training run: whether its server keeps up, and how long the run's page takes to open.

    .venv/bin/python tests/benchmarks/prefect_page.py [--steps 20000] [--rate 3] [--cost] [--pause 0]

A real engine (journal, pool, flow and task runs, the embedded Prefect server) makes so many steps with the unigram
model of tests/flows instead of JAX; each step is a forward_backward and an optim_step. --rate is the setting
TINKERFLOW_TRACKED_RUNS_PER_SECOND, whose default is the one here: above it, steps share task runs. Then the
pages of its fullest and of its last flow run are opened in a headless Chromium. RESULTS.md keeps the output.

With --cost, it measures what the page's lines, curves and checkpoints cost the engine instead: the CPU time of the
threads that make and send them, while they do, beside that of the whole process, less what this program takes to ask.
What asyncio spends on the bytes of their sockets is not among it. --pause: seconds between two steps, for a run as
slow as a real one.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
import types
from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import numpy as np
import orjson

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "e2e")]
os.environ["PYTHONPATH"] = os.pathsep.join((str(HERE.parent / "flows"), os.environ.get("PYTHONPATH", "")))

from browser import open_page  # noqa: E402
from service import cpu_seconds  # noqa: E402

from tinkerflow.backend.core.ids import model_id  # noqa: E402
from tinkerflow.backend.journal import Journal, Kind, NewModel, NewRequest, NewSession  # noqa: E402
from tinkerflow.backend.settings import Settings  # noqa: E402
from tinkerflow.backend.supervise.processes import free_port  # noqa: E402
from tinkerflow.backend.wire import tinker_pb2 as pb  # noqa: E402
from tinkerflow.deployments.tiny_model import make_tiny  # noqa: E402
from tinkerflow.flows import run_engine  # noqa: E402
from tinkerflow.flows.prefect.flow_run import FlowRunRecord  # noqa: E402
from tinkerflow.flows.prefect.report import Drawing, RunReport  # noqa: E402

AHEAD = 64  # steps that wait in the journal


def forward_backward(model: str, seq_id: int) -> NewRequest:
    """One datum of four tokens."""
    message = pb.ForwardBackwardRequest(model_id=model, seq_id=seq_id, loss_fn="cross_entropy")
    datum, tokens = message.data.add(), [1, 2, 3, 4]
    datum.model_input.add().encoded_text.tokens = np.asarray(tokens, np.int32).tobytes()
    for name, dtype, kind in (("target_tokens", np.int64, pb.DTYPE_INT64), ("weights", np.float32, pb.DTYPE_FLOAT32)):
        tensor = datum.loss_fn_inputs[name]
        tensor.dense, tensor.dtype = np.asarray(tokens, dtype).tobytes(), kind
        tensor.shape.append(len(tokens))
    payload = message.SerializeToString()
    return NewRequest(Kind.FORWARD_BACKWARD, "local", payload, f"f{seq_id}", model_id=model, seq_id=seq_id)


def create(journal: Journal, base_model: str) -> str:
    """A model in training; its id."""
    session = journal.sessions.create(NewSession("local", "0.38.0"))
    model = model_id(session, 0)
    new = NewModel(model, session, "local", base_model, rank=1, seed=7)
    creation = NewRequest(Kind.CREATE_MODEL, "local", b"{}", "create", model_id=model, seq_id=0)
    journal.models.create(new, creation)
    return model


def train(journal: Journal, model: str, steps: int, *, pause: float = 0.0) -> None:
    """Make more steps, as a client with many requests in flight does. pause: seconds between two of them."""
    first = journal.models.get(model, None).step
    session = model.partition(":")[0]
    step = orjson.dumps({"adam_params": {"learning_rate": 0.01}})
    began = time.monotonic()
    for number in range(first, first + steps):
        time.sleep(pause)
        while number - journal.models.get(model, None).step > AHEAD:
            time.sleep(0.02)
        seq_id = 1 + 2 * number
        journal.requests.submit(forward_backward(model, seq_id))
        optim = NewRequest(Kind.OPTIM_STEP, "local", step, f"o{seq_id}", model_id=model, seq_id=seq_id + 1)
        journal.requests.submit(optim)
        if number % 1000 == 999:
            journal.sessions.heartbeat(session, "local")
            print(f"  {number + 1} steps, {(number + 1) / (time.monotonic() - began):.0f} a second", flush=True)
    while journal.models.get(model, None).step < first + steps:
        time.sleep(0.02)
    print(f"{steps} steps in {time.monotonic() - began:.0f} s", flush=True)


@contextmanager
def of_the_page() -> Iterator[Counter[str]]:
    """CPU-seconds that a page's lines and drawings take, by what they are for; states of flow runs are not among it."""
    spent: Counter[str] = Counter()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            before = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent[name] += time.thread_time() - before

        return call

    @types.coroutine
    def stepped(work: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """The coroutine, of which every step is counted."""
        send, throw = counted("requests", work.send), counted("requests", work.throw)
        step, value = send, None
        while True:
            try:
                waits_for = step(value)
            except StopIteration as end:
                return end.value
            try:
                step, value = send, (yield waits_for)
            except BaseException as error:  # noqa: BLE001  the coroutine's own, as if nobody stood between
                step, value = throw, error

    sent = FlowRunRecord._send_all

    async def send_all(flow_run: FlowRunRecord) -> None:
        first = flow_run._requests[0].__name__
        await (stepped(sent(flow_run)) if first in ("_send_lines", "put") else sent(flow_run))

    with ExitStack() as patches:
        for owner, name, own in (
            (RunReport, "answered", counted("reading answers", RunReport.answered)),
            (FlowRunRecord, "log", counted("lines", FlowRunRecord.log)),
            (Drawing, "draw", counted("drawing", Drawing.draw)),  # in a thread of its own
            (FlowRunRecord, "_send_all", send_all),
        ):
            patches.enter_context(patch.object(owner, name, own))
        yield spent


def cost(journal: Journal, model: str, steps: int, pause: float) -> None:
    """Print the engine's CPU time for a step, and which part of it goes into the page."""
    with of_the_page() as spent:
        before = time.process_time() - time.thread_time()
        train(journal, model, steps, pause=pause)
        whole = 1000 * (time.process_time() - time.thread_time() - before) / steps
    parts = {name: 1000 * seconds / steps for name, seconds in spent.items()}
    page = sum(parts.values())
    print(
        f"CPU-ms of the engine for a step: {whole:.2f}, of which the page's lines and drawings {page:.2f}: they add "
        f"{100 * page / (whole - page):.1f} % ({', '.join(f'{name} {spent:.2f}' for name, spent in parts.items())}); "
        f"load {os.getloadavg()[0]:.1f}",
        flush=True,
    )


def task_runs(http: httpx.Client, run: str, **more: object) -> int:
    body = {"flow_runs": {"id": {"any_": [run]}}, **more}
    return int(http.post("/task_runs/count", json=body).raise_for_status().json())


def recorded(http: httpx.Client, model: str) -> list[tuple[str, int]]:
    """The flow runs of the model with their task runs, as soon as no more are written."""
    ended = time.monotonic()
    before, quiet = -1, 0
    while quiet < 4:
        body = {"flow_runs": {"name": {"like_": model}}, "sort": "START_TIME_ASC"}
        runs = [run["id"] for run in http.post("/flow_runs/filter", json=body).raise_for_status().json()]
        open_ones = {"task_runs": {"state": {"type": {"any_": ["RUNNING", "PENDING"]}}}}
        counts = [(run, task_runs(http, run)) for run in runs]
        total = sum(count for _, count in counts)
        quiet = quiet + 1 if total == before and not sum(task_runs(http, run, **open_ones) for run in runs) else 0
        if quiet == 0:
            last = time.monotonic()
        before = total
        time.sleep(0.5)
    print(
        f"{total} task runs in {len(counts)} flow runs; the last was written {last - ended:.1f} s after the last step"
    )
    print("task runs of each flow run:", " ".join(str(count) for _, count in counts))
    return counts


def open_pages(http: httpx.Client, url: str, runs: list[tuple[str, int]], folder: Path) -> None:
    """Time the pages of the fullest and of the last flow run, each three times; and of one without task runs.

    That one shows what Prefect's page costs by itself: a browser without a GPU draws for seconds.
    """
    body = {"flows": {"name": {"any_": ["sampling"]}}}
    sampling, *_ = http.post("/flow_runs/filter", json=body).raise_for_status().json()  # more, if Prefect was away
    fullest, last = max(runs, key=lambda run: run[1]), runs[-1]
    pages = [
        (sampling["id"], 0, "an empty", ("0 Task runs",)),
        (*fullest, "the fullest", ("model-", "step")),
        (*last, "the last", ("model-", "step")),
    ]
    with open_page(folder) as page:
        for run, count, what, words in pages:
            began = time.monotonic()
            graph = http.get(f"/flow_runs/{run}/graph-v2").raise_for_status().json()
            asked, opened, listed = time.monotonic() - began, [], []
            for _ in range(3):
                page.open("about:blank")
                began = time.monotonic()
                page.open(f"{url}/runs/flow-run/{run}")
                page.shows("Task Runs", pause=0.05)
                opened.append(f"{time.monotonic() - began:.1f}")
                page.shows(*words, tab="task-runs", pause=0.05)
                listed.append(f"{time.monotonic() - began:.1f}")
            page.picture(f"page-of-{count}-task-runs")
            print(
                f"page of {what} flow run ({count} task runs): "
                f"open after {', '.join(opened)} s, its task runs listed after {', '.join(listed)} s; "
                f"its graph of {len(graph['nodes'])} nodes is answered in {asked:.2f} s; load {os.getloadavg()[0]:.1f}"
            )


async def main(steps: int, rate: float, with_cost: bool, pause: float) -> None:
    """Engine, steps, pages; or the cost of what pages tell."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        base_model = str(make_tiny(folder / "tiny"))
        settings = Settings(
            data_dir=folder / "data",
            base_models=(base_model,),
            prefect_port=free_port(),
            tracked_runs_per_second=rate,
        )
        ready = asyncio.Event()
        work = run_engine(settings, on_ready=ready.set, on_progress=print, executor="numpy_executor:Unigram")
        engine = asyncio.create_task(work)
        await ready.wait()
        print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, at most {rate:g} task runs a second")
        journal = Journal.open(settings.journal_url)
        before = cpu_seconds(os.getpid())
        model = create(journal, base_model)
        if with_cost:
            await asyncio.to_thread(train, journal, model, 1000)  # a curve to draw
            await asyncio.to_thread(cost, journal, model, steps, pause)
        else:
            await asyncio.to_thread(train, journal, model, steps)
        url = f"http://127.0.0.1:{settings.prefect_port}"
        with httpx.Client(base_url=f"{url}/api", timeout=60) as http:
            runs = await asyncio.to_thread(recorded, http, model)
            spent = cpu_seconds(os.getpid())
            used = {part: round(seconds - before.get(part, 0)) for part, seconds in spent.items()}
            print("CPU-seconds (other: the engine and this program):", used)
            if not with_cost:
                await asyncio.to_thread(open_pages, http, url, runs, folder)
        journal.close()
        engine.cancel()
        await asyncio.gather(engine, return_exceptions=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--rate", type=float, default=3.0)
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--pause", type=float, default=0.0)
    arguments: Any = parser.parse_args()
    asyncio.run(main(arguments.steps, arguments.rate, arguments.cost, arguments.pause))
