"""The start of a training pipeline: connect to the server, then check and tokenize the data."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

import orjson
from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run

from tinkerflow.backend.catalog.champions import checked_name
from tinkerflow.backend.core.errors import UserError
from tinkerflow.tasks.pipelines.artifacts import RunArtifacts, begin_phase, show_note
from tinkerflow.tasks.pipelines.connection import OfferedModel, ServerClients, connect
from tinkerflow.tasks.pipelines.data import DataReport, Use, check_source, load_examples, load_rows
from tinkerflow.tasks.pipelines.parameters import PipelineParameters
from tinkerflow.tasks.pipelines.progress import Sample
from tinkerflow.tasks.pipelines.render import Renderer, TokenizedExample
from tinkerflow.tasks.pipelines.rows import Row
from tinkerflow.tasks.pipelines.schedule import batch_of
from tinkerflow.tasks.pipelines.scoring import greedy_answers
from tinkerflow.tasks.pipelines.sources import JOURNAL, DataSource
from tinkerflow.tasks.pipelines.work import create_once, digest, open_work, read_json

if TYPE_CHECKING:
    import tinker


_data_run: ContextVar[str] = ContextVar("_data_run", default="")


@dataclass(frozen=True)
class PreparedRun:
    """A run whose data passed its checks.

    base: samples from the base model. renderer: tokenizes rows. work_url: the work folder. artifacts: the run's page
    for people. reports: the reports on the data sets `data` and, if given, `held_out`.
    """

    pipeline: str
    parameters: PipelineParameters
    server: ServerClients
    model: OfferedModel
    base: tinker.SamplingClient
    renderer: Renderer
    work_url: str
    artifacts: RunArtifacts
    reports: dict[str, DataReport]

    @property
    def used_rows(self) -> str:
        """The number of used and omitted rows of `data` and of `held_out`, as a text."""
        parts = {name: report.summary() for name, report in self.reports.items()}
        return "; ".join(text if name == "data" else f"{name}: {text}" for name, text in parts.items())

    def rows(self, dataset: str) -> list[Row]:
        """The good rows of `data` or `held_out` that are not too long; none if the data set was not given."""
        return load_rows(self.work_url, self.reports[dataset]) if dataset in self.reports else []

    def examples(self, dataset: str) -> tuple[str, Sequence[TokenizedExample]]:
        """A name for the tokenized rows of `data` or `held_out`, used in plans and checkpoints, and their tokens."""
        if dataset not in self.reports:
            return "", []
        report = self.reports[dataset]
        return f"rendered/{report.tokenized}.npz", load_examples(self.work_url, report)

    def prompts(self, dataset: str) -> tuple[str, list[Row]]:
        """A digest of the rows whose prompts are not too long, and these rows."""
        rows = self.rows(dataset)
        return digest(self.renderer.fingerprint, *(orjson.dumps(row.to_json()) for row in rows)), rows

    def batch(self, step: int, rows: int) -> list[int]:
        """The indices of the rows of step `step`, out of `rows` rows."""
        return batch_of(step, size=self.parameters.training.batch_size, rows=rows, seed=self.parameters.model.seed)

    async def preview(self, client: tinker.TrainingClient) -> list[Sample]:
        """Sample greedy answers of the current model to a few prompts, for people to look at."""
        wanted = self.parameters.samples
        rows = [row for row in self.rows("held_out") or self.rows("data") if row.prompt][: wanted.rows]
        if not rows:
            return []
        sampler = await client.save_weights_and_get_sampling_client()
        return await greedy_answers(
            sampler, self.renderer, rows, max_tokens=wanted.max_tokens, max_context=self.model.max_context
        )


def run_name(parameters: PipelineParameters) -> str:
    """The name that retries of this run share: `resume` of the parameters, or else the flow run's id."""
    return parameters.resume or str(flow_run.id or "")


def share_data(run: str) -> None:
    """Let runs that are prepared in the current context, such as the points of a sweep, use the rated answers of `run`.

    A flow cannot refer to a context variable, because flows are pickled.
    """
    _data_run.set(run)


@task(name="check data", task_run_name="check data: {source.url}", cache_policy=NO_CACHE)
def check_data(source: DataSource, work_url: str, renderer: Renderer, use: Use) -> DataReport:
    """Check and tokenize a data set with `check_source`, and show the notes of the report."""
    report = check_source(source, work_url, renderer, use)
    for note in report.notes:
        show_note(f"data {source.url}: {note}")
    return report


def begun_with(source: DataSource, run: str, work_url: str, renderer: Renderer, use: Use) -> DataReport:
    """The report of `check_data`. Ratings change while a run is interrupted, so a run keeps its original ratings.

    source, work_url, renderer, use: see `check_data`. run: the name that retries share; "" keeps nothing.
    """
    if not (run and source.url.startswith(JOURNAL)):
        return check_data(source, work_url, renderer, use)
    fields = "all" if use.extra is None else sorted(use.extra)
    uses = str((use.name, use.schemas, use.max_tokens, use.learns, fields, use.answer_tokens))
    about = digest(source.model_dump_json(), renderer.fingerprint, uses)
    work, key = open_work(work_url), f"progress/{checked_name('run', run)}/kept/data-{about}"
    if (kept := read_json(work, key)) is None:
        create_once(work, key, check_data(source, work_url, renderer, use).model_dump_json().encode())
        kept = read_json(work, key)
    return DataReport.model_validate(kept)


async def _refuse_other_base(server: ServerClients, start: str, model: OfferedModel) -> None:
    """Raise UserError if the checkpoint `start` belongs to another base model, whose tokenizer the rows would need."""
    from tinker import NotFoundError

    with suppress(NotFoundError):  # a run that has begun no longer needs the checkpoint
        if (base := await server.base_of(start)) != model.name:
            fix = f"the run has base model {model.name!r}: set model.base_model to {base!r}"
            raise UserError(f"model.start_from {start}: belongs to base model {base!r}, but {fix}")


@asynccontextmanager
async def prepare(parameters: PipelineParameters) -> AsyncIterator[PreparedRun]:
    """Connect to the server for the block, check the data and show the report.

    DataCheckError: too many rows are wrong. UserError: the pipeline does not accept the rows, or `model.start_from`
    belongs to another base model.
    """
    work_url, use = parameters.work_url, parameters.use()
    artifacts = RunArtifacts(f"{use.name}-{parameters.name}")
    begin_phase("connecting to the service")
    async with connect(parameters.connection) as server:
        model = await server.base_model(parameters.model.base_model)
        if start := parameters.model.start_from:
            await _refuse_other_base(server, start, model)
        base = await server.service.create_sampling_client(base_model=model.name)
        renderer = Renderer(base.get_tokenizer(), parameters.model.format, parameters.data.special_tokens)
        use = use.within(model.max_context + use.learns)  # the last token of a trained sequence is only a target
        sources = parameters.sources().items()
        begin_phase("checking the data")
        run = _data_run.get() or run_name(parameters)
        reports = {name: begun_with(source, run, work_url, renderer, use) for name, source in sources}
        await artifacts.data(reports)
        yield PreparedRun(use.name, parameters, server, model, base, renderer, work_url, artifacts, reports)
