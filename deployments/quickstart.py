"""`tinkerflow quickstart`: start everything, teach the embedded model pig latin through the SDK, show the run."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.status import Status
from rich.table import Table

from tinkerflow.backend.core.ids import EMBEDDED
from tinkerflow.backend.core.prefect_access import PrefectAccess, page_command
from tinkerflow.deployments.local import API_KEY, running_stack
from tinkerflow.deployments.pig_latin import LESSONS, Lesson
from tinkerflow.deployments.run import LINE_SECONDS, print_line, quiet_client
from tinkerflow.tasks.pipelines.row_errors import shorten

if TYPE_CHECKING:
    import tinker
    from transformers import PreTrainedTokenizerBase

STEPS = 30
LEARNING_RATE = 5e-3
RANK = 32
RUN_NAME = "quickstart: pig latin"  # the run's name in the console and in Prefect
SAVED = "pig-latin"  # the checkpoint with the trained weights
SHOWN_SECONDS = 60.0  # how long the flow run may take to appear in Prefect


def quickstart(console: Console, *, data_dir: Path | None = None, steps: int = STEPS, stay: bool = False) -> bool:
    """Fine-tune on `LESSONS`, and print links to the run's pages.

    data_dir: the service's data; default: a scratch folder. steps: optimizer steps. stay: keep serving after
    the lesson, until Ctrl-C. Returns whether the loss fell and the model then gives every answer exactly.

    KeyboardInterrupt or SystemExit: a signal ended the lesson.
    """
    learned, page = False, ""
    taught, stopped = False, None
    try:
        with ExitStack() as stack:
            with console.status("starting the API, the engine, a worker and Prefect") as status:
                progress = _progress(status)
                service = stack.enter_context(running_stack(data_dir, progress, warm_up=False))
            learned, page = teach(console, service.api_url, service.prefect, steps)
            taught = True
            if stay:
                print_line(console, f"serving until Ctrl-C; from Python: {_client(service.api_url)}")
                service.keep()
    except (KeyboardInterrupt, SystemExit) as error:
        stopped = error
        console.print("stopped")
    if data_dir is None:
        print_line(console, "everything was in a scratch folder; to keep it: tinkerflow quickstart --data-dir DIR")
    else:
        print_line(console, f"saved in {data_dir}; to continue: tinkerflow up --data-dir {shlex.quote(str(data_dir))}")
        if page:
            print_line(console, f"the run's page: {page_command(page, data_dir)}")
    if stopped is not None and not taught:
        raise stopped
    return learned


def _progress(status: Status) -> Callable[[str], None]:
    """Show the newest line of a service's parts, or without a terminal, one now and then. The `ready:` line stays."""
    next_line = time.monotonic()

    def report(line: str) -> None:
        nonlocal next_line
        in_file = not status.console.is_terminal and time.monotonic() >= next_line
        if line.startswith("ready:") or in_file:
            print_line(status.console, line)
            next_line = time.monotonic() + LINE_SECONDS
        else:
            status.update(line)

    return report


def _client(api_url: str) -> str:
    return f'tinker.ServiceClient(base_url="{api_url}", api_key="{API_KEY}")'


def teach(console: Console, api_url: str, prefect: PrefectAccess | None, steps: int) -> tuple[bool, str]:
    """Fine-tune at `api_url` for `steps` optimizer steps. Returns whether it learned, and the path of the run's page.

    prefect: the server that shows the run; None = there is none, and the path is empty.
    """
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    import tinker
    from tinker import types

    print_line(console, f"teaching {EMBEDDED} three phrases; the first batch of each kind waits for JAX to compile")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        quiet_client(),
        tinker.ServiceClient(base_url=api_url, api_key=API_KEY) as service,
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar,
    ):
        task = bar.add_task("compiling", total=steps)
        trainer = service.create_lora_training_client(
            base_model=EMBEDDED, rank=RANK, seed=0, user_metadata={"name": RUN_NAME}
        ).result()
        tokenizer = trainer.get_tokenizer()
        data = [_datum(tokenizer, lesson) for lesson in LESSONS]
        before = _answers(trainer.save_weights_and_get_sampling_client().result(), tokenizer)
        losses = []
        for step in range(steps):
            forward = trainer.forward_backward(data, "cross_entropy")
            update = trainer.optim_step(types.AdamParams(learning_rate=LEARNING_RATE))
            losses.append(forward.result().metrics["loss:sum"])
            update.result()
            line = f"step {step + 1}, loss {losses[-1]:.4f}"
            bar.update(task, completed=step + 1, description=line)
            if bar.disable:
                print_line(console, line)
        after = _answers(trainer.save_weights_and_get_sampling_client().result(), tokenizer)
        saved = trainer.save_weights_for_sampler(SAVED).result()
        page = "" if prefect is None else _flow_run_page(prefect, trainer.model_id)
    learned = after == [lesson.pig_latin for lesson in LESSONS]
    answers = "all three answers learned" if learned else "not learned"
    fell = f"loss {losses[0]:.4f} -> {losses[-1]:.4f}"
    print_line(console, f"{EMBEDDED}, {steps} steps, {fell}: {answers}")
    console.print(_table(before, after))
    print_line(console, f"the run in the console: {api_url}/training_runs/{trainer.model_id}")
    talk = f"{api_url}/playground?mode=checkpoint&checkpoint={quote(saved.path, safe='')}"
    print_line(console, f"talk to it there: {talk}")
    if prefect is not None:
        print_line(console, f"the run in Prefect: {prefect.link(page, time.time())}")
    return learned and losses[-1] < losses[0], page


def _datum(tokenizer: PreTrainedTokenizerBase, lesson: Lesson) -> tinker.Datum:
    from tinker import types

    prompt, completion = tokenizer.encode(lesson.prompt), tokenizer.encode(lesson.completion)
    tokens = prompt + completion
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(completion)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=tokens[1:], dtype="int64", shape=[len(weights)]),
            "weights": types.TensorData(data=weights, dtype="float32", shape=[len(weights)]),
        },
    )


def _answers(sampler: tinker.SamplingClient, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    from tinker import types

    greedy = types.SamplingParams(max_tokens=24, temperature=0.0, stop=["\n"])
    futures = [
        sampler.sample(
            types.ModelInput.from_ints(tokenizer.encode(lesson.prompt)), num_samples=1, sampling_params=greedy
        )
        for lesson in LESSONS
    ]
    return [str(tokenizer.decode(f.result().sequences[0].tokens)).strip() for f in futures]


def _table(before: list[str], after: list[str]) -> Table:
    table = Table("english", "before", "after", "pig latin")
    for lesson, old, new in zip(LESSONS, before, after, strict=True):
        table.add_row(*(shorten(_printable(text), 24) for text in (lesson.english, old, new, lesson.pig_latin)))
    return table


def _printable(text: str) -> str:
    """The text in ASCII on one line, with "?" for the untrained model's bytes that form no character."""
    return ascii(text.replace("\ufffd", "?"))[1:-1]


def _flow_run_page(prefect: PrefectAccess, model_id: str) -> str:
    """The path of the page of the training run `model_id`, or of all runs if this run is not found in SHOWN_SECONDS."""
    tagged, url = {"flow_runs": {"tags": {"all_": [model_id]}}}, f"{prefect.api_url}/flow_runs/filter"
    deadline = time.monotonic() + SHOWN_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError):  # on a busy machine Prefect may be late, answer 503, or restart
            if runs := httpx.post(url, json=tagged, headers=prefect.headers).raise_for_status().json():
                return f"/runs/flow-run/{runs[0]['id']}"
        time.sleep(0.2)
    return "/runs"
