"""The pipeline `sft`: supervised fine-tuning on chats or prompts with completions."""

from __future__ import annotations

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Cancelled

from backend.errors import UserError
from flows.pipelines.training import Setting, Trained, train
from tasks.pipelines.board import Board
from tasks.pipelines.connection import connect
from tasks.pipelines.control import StoppedError
from tasks.pipelines.data import DataReport, check_data, load_rows
from tasks.pipelines.imitate import Imitate
from tasks.pipelines.parameters import SftParameters
from tasks.pipelines.render import Renderer, load_examples, render
from tasks.pipelines.work import default_work_url


@flow(name="sft", flow_run_name="sft {parameters.name}", log_prints=False, validate_parameters=True)
async def sft(parameters: SftParameters) -> Trained | State[None]:
    """Check the data, render it, train in segments, and save the weights; Cancelled when somebody asks to stop."""
    try:
        return await fine_tune(parameters)
    except StoppedError as stopped:
        return Cancelled(message=str(stopped))


async def fine_tune(parameters: SftParameters, *, pipeline: str = "sft") -> Trained:
    """What the flow does; StoppedError when somebody asks to stop."""
    work_url = parameters.work or default_work_url()
    board = Board(f"{pipeline}-{parameters.name}")
    async with connect(parameters.connection) as server:
        name = await server.base_model(parameters.model.base_model)
        sampler = await server.service.create_sampling_client(base_model=name)
        renderer = Renderer(sampler.get_tokenizer(), parameters.model.format)
        sources = {"data": parameters.data} | ({"held_out": parameters.held_out} if parameters.held_out else {})
        reports: dict[str, DataReport] = {}
        for what, source in sources.items():
            reports[what] = check_data(source, work_url, renderer.special_tokens)
            if reports[what].schema_name not in ("chat", "prompt_completion"):
                raise UserError(f"{what}: schema {reports[what].schema_name}: sft needs chat or prompt_completion")
        await board.data(reports)
        rendered = {
            what: render(report.digest, work_url, renderer, parameters.training.max_tokens)
            for what, report in reports.items()
        }
        shown = load_rows(work_url, reports["held_out" if parameters.held_out else "data"].digest)
        recipe = Imitate(
            load_examples(work_url, rendered["data"].key),
            batch_size=parameters.training.batch_size,
            seed=parameters.model.seed,
            renderer=renderer,
            held_out=load_examples(work_url, rendered["held_out"].key) if parameters.held_out else (),
            sampled=shown[: parameters.samples.rows],
            sample_tokens=parameters.samples.max_tokens,
        )
        setting = Setting(pipeline, parameters, server.service, name, work_url, rendered["data"].key, board)
        return await train(setting, recipe)
