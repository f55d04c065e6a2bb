"""`tinkerflow quickstart`: start everything, teach the embedded model pig latin through the SDK, show the run."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import httpx
from rich.console import Console
from rich.table import Table

from tinkerflow.backend.core.prefect_access import PrefectAccess
from tinkerflow.deployments.local import API_KEY, running_stack
from tinkerflow.deployments.pig_latin import LESSONS, Lesson
from tinkerflow.deployments.run import dim_lines, print_line, see_again

if TYPE_CHECKING:
    import tinker
    from transformers import PreTrainedTokenizerBase

STEPS = 30
LEARNING_RATE = 5e-3
RANK = 32
SAVED = "pig-latin"  # the checkpoint of what was learnt
SHOWN_SECONDS = 60.0  # how long the flow run may take to be seen in Prefect


def quickstart(console: Console, *, data_dir: Path | None = None, steps: int = STEPS, stay: bool = False) -> bool:
    """Fine-tune on `LESSONS` and say where the run can be seen.

    data_dir: for what the service keeps; default: a scratch folder. steps: of the optimizer. stay: keep serving after
    the lesson, until Ctrl-C. Returns whether the loss fell and the model then says every answer exactly.
    """
    with running_stack(data_dir, dim_lines(console), warm_up=False) as stack:
        learnt, page = teach(console, stack.api_url, stack.prefect, steps)
        if stay:
            print_line(console, f"serving until Ctrl-C: {stack.api_url}  {stack.prefect_url}")
            with contextlib.suppress(KeyboardInterrupt):
                stack.keep()
    if page and stack.settings.prefect == "embedded":
        print_line(console, see_again(page, data_dir))
        if not stay:
            console.print("with --stay, quickstart keeps serving this page until Ctrl-C", highlight=False)
    return learnt


def teach(console: Console, api_url: str, prefect: PrefectAccess | None, steps: int) -> tuple[bool, str]:
    """Fine-tune on the service at `api_url` for `steps` optimizer steps; whether it learnt, and the path of its page.

    prefect: the server that shows the run; None: none does, and then the run has no page.
    """
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    import tinker
    from tinker import types

    rest = tinker.RestClient(base_url=api_url, api_key=API_KEY)
    models = [m.model_name for m in rest.get_server_capabilities().result().supported_models]
    base_model = next(name for name in models if name)
    with tinker.ServiceClient(base_url=api_url, api_key=API_KEY) as service:
        console.print(f"base model: {base_model}", highlight=False)
        trainer = service.create_lora_training_client(base_model=base_model, rank=RANK, seed=0).result()
        tokenizer = trainer.get_tokenizer()
        data = [_datum(tokenizer, lesson) for lesson in LESSONS]

        console.print("sampling before the first step; the first batch of each kind waits for JAX to compile")
        before = _answers(trainer.save_weights_and_get_sampling_client().result(), tokenizer)
        losses = []
        for step in range(steps):
            forward = trainer.forward_backward(data, "cross_entropy")
            update = trainer.optim_step(types.AdamParams(learning_rate=LEARNING_RATE))
            losses.append(forward.result().metrics["loss:sum"])
            update.result()
            console.print(f"step {step + 1:3d}/{steps}  loss {losses[-1]:9.4f}", highlight=False)
        after = _answers(trainer.save_weights_and_get_sampling_client().result(), tokenizer)
        console.print(_table(before, after))
        saved = trainer.save_weights_for_sampler(SAVED).result()
        print_line(console, f"the run in the console: {api_url}/training_runs/{trainer.model_id}")
        talk = f"{api_url}/playground?mode=checkpoint&checkpoint={quote(saved.path, safe='')}"
        print_line(console, f"talk to it there: {talk}")
        page = "" if prefect is None else _flow_run_page(prefect, trainer.model_id)
        if prefect is None:
            print_line(console, "this run has no page (Prefect is off)")
        else:
            print_line(console, f"the run in Prefect, with its batches: {prefect.link(page, time.time())}")
    learnt = after == [lesson.pig_latin for lesson in LESSONS]
    console.print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}; {'all three answers learnt' if learnt else 'not learnt'}")
    return learnt and losses[-1] < losses[0], page


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
    table = Table("english", "before", "after", "pig latin", title="greedy samples")
    for lesson, old, new in zip(LESSONS, before, after, strict=True):
        table.add_row(*(ascii(text)[1:-1] for text in (lesson.english, old, new, lesson.pig_latin)))
    return table


def _flow_run_page(prefect: PrefectAccess, model_id: str) -> str:
    """The path of the page of the training run of `model_id`; of the page of all runs if the run is untracked."""
    named, url = {"flow_runs": {"name": {"like_": model_id}}}, f"{prefect.api_url}/flow_runs/filter"
    deadline = time.monotonic() + SHOWN_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):  # on a busy machine Prefect may be late, or start anew
            if runs := httpx.post(url, json=named, headers=prefect.headers).raise_for_status().json():
                return f"/runs/flow-run/{runs[0]['id']}"
        time.sleep(0.2)
    return "/runs"
