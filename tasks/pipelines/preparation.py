"""What a training pipeline does before its first step: connect to the server, check the data and render it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import orjson

from tinkerflow.backend.core.errors import UserError
from tinkerflow.tasks.pipelines.artifacts import RunArtifacts
from tinkerflow.tasks.pipelines.connection import ServerClients, connect
from tinkerflow.tasks.pipelines.data import DataReport, check_data, load_rows
from tinkerflow.tasks.pipelines.parameters import PipelineParameters
from tinkerflow.tasks.pipelines.progress import Sample
from tinkerflow.tasks.pipelines.render import Renderer, TokenizedExample, load_examples, render
from tinkerflow.tasks.pipelines.rows import Row, Schema
from tinkerflow.tasks.pipelines.schedule import batch_of
from tinkerflow.tasks.pipelines.scoring import greedy_answers
from tinkerflow.tasks.pipelines.work import digest

if TYPE_CHECKING:
    import tinker


@dataclass(frozen=True)
class PreparedRun:
    """A run whose data passed its checks.

    base: samples from the base model. renderer: makes tokens of rows. work_url: the work folder. artifacts: what people
    see of the run. reports: of the data sets `data` and, when it is given, `held_out`.
    """

    pipeline: str
    parameters: PipelineParameters
    server: ServerClients
    base_model: str
    base: tinker.SamplingClient
    renderer: Renderer
    work_url: str
    artifacts: RunArtifacts
    reports: dict[str, DataReport]

    def rows(self, dataset: str) -> list[Row]:
        """The rows of `data` or `held_out`; none when that was not given."""
        return load_rows(self.work_url, self.reports[dataset].digest) if dataset in self.reports else []

    def examples(self, dataset: str) -> tuple[str, list[TokenizedExample]]:
        """The rows of `data` or `held_out` as tokens, after the key under which the work folder keeps them."""
        if dataset not in self.reports:
            return "", []
        longest = self.parameters.training.max_tokens
        rendered = render(self.reports[dataset].digest, self.work_url, self.renderer, longest)
        return rendered.key, load_examples(self.work_url, rendered.key)

    def prompts(self, dataset: str) -> tuple[str, list[Row]]:
        """The rows whose prompts have at most `training.max_tokens` tokens, after a digest of these rows.

        Raises UserError when there are rows, but every prompt is longer.
        """
        rows, longest = self.rows(dataset), self.parameters.training.max_tokens
        fit = [row for row in rows if len(self.renderer.prompt(row.prompt)) <= longest]
        if rows and not fit:
            raise UserError(f"training.max_tokens {longest}: all {len(rows)} prompts of {dataset} are longer")
        return digest(self.renderer.fingerprint, *(orjson.dumps(row.to_json()) for row in fit)), fit

    def batch(self, step: int, rows: int) -> list[int]:
        """The indices of the rows of step `step`, of `rows` in all."""
        return batch_of(step, size=self.parameters.training.batch_size, rows=rows, seed=self.parameters.model.seed)

    async def preview(self, client: tinker.TrainingClient) -> list[Sample]:
        """The greedy answers of the model as it is now to a few prompts, for people to look at."""
        wanted = self.parameters.samples
        rows = (self.rows("held_out") or self.rows("data"))[: wanted.rows]
        if not rows:
            return []
        sampler = await client.save_weights_and_get_sampling_client()
        return await greedy_answers(sampler, self.renderer, rows, max_tokens=wanted.max_tokens)


@asynccontextmanager
async def prepare(pipeline: str, parameters: PipelineParameters, *schemas: Schema) -> AsyncIterator[PreparedRun]:
    """Connect to the server, check the data and show the report; the connection lasts for the block.

    Raises DataCheckError when too many rows are wrong, UserError when the data is of none of the `schemas`.
    """
    work_url = parameters.work_url
    artifacts = RunArtifacts(f"{pipeline}-{parameters.name}")
    async with connect(parameters.connection) as server:
        base_model = await server.base_model(parameters.model.base_model)
        base = await server.service.create_sampling_client(base_model=base_model)
        renderer = Renderer(base.get_tokenizer(), parameters.model.format)
        sources = {"data": parameters.data} | ({"held_out": parameters.held_out} if parameters.held_out else {})
        reports: dict[str, DataReport] = {}
        for dataset, source in sources.items():
            report = reports[dataset] = check_data(source, work_url, renderer.special_tokens)
            if report.schema_name not in schemas:
                raise UserError(f"{dataset}: schema {report.schema_name}: {pipeline} needs {' or '.join(schemas)}")
        await artifacts.data(reports)
        yield PreparedRun(pipeline, parameters, server, base_model, base, renderer, work_url, artifacts, reports)
