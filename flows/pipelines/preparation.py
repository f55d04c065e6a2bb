"""What a training pipeline does before its recipe: reach the server, and check and render the data."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import orjson
from prefect.client.schemas.objects import State
from prefect.states import Cancelled

from tinkerflow.backend.errors import UserError
from tinkerflow.flows.pipelines.training import Setting
from tinkerflow.tasks.pipelines.board import Board
from tinkerflow.tasks.pipelines.connection import Server, connect
from tinkerflow.tasks.pipelines.control import StoppedError
from tinkerflow.tasks.pipelines.data import DataReport, check_data, load_rows
from tinkerflow.tasks.pipelines.parameters import PipelineParameters
from tinkerflow.tasks.pipelines.render import Example, Renderer, load_examples, render
from tinkerflow.tasks.pipelines.rows import Row, Schema
from tinkerflow.tasks.pipelines.sampling import Shown
from tinkerflow.tasks.pipelines.work import default_work_url, digest

if TYPE_CHECKING:
    import tinker

T = TypeVar("T")


@dataclass(frozen=True)
class Prepared:
    """A pipeline whose data passed its checks. reports: of `data`, and of `held_out` when there is some."""

    pipeline: str
    parameters: PipelineParameters
    server: Server
    base_model: str
    base: tinker.SamplingClient
    renderer: Renderer
    work_url: str
    board: Board
    reports: dict[str, DataReport]

    def setting(self, data: str) -> Setting:
        """For `train`; data: a digest of what is learnt from."""
        return Setting(
            self.pipeline, self.parameters, self.server.service, self.base_model, self.work_url, data, self.board
        )

    def rows(self, what: str) -> list[Row]:
        """The rows of `data` or `held_out`; none when it was not given."""
        return load_rows(self.work_url, self.reports[what].digest) if what in self.reports else []

    def examples(self, what: str) -> tuple[str, list[Example]]:
        """The same as tokens, and the key under which they are kept."""
        if what not in self.reports:
            return "", []
        found = render(self.reports[what].digest, self.work_url, self.renderer, self.parameters.training.max_tokens)
        return found.key, load_examples(self.work_url, found.key)

    def prompts(self, what: str) -> tuple[str, list[Row]]:
        """The rows whose prompts are of at most `training.max_tokens`, and a digest of them.

        UserError when there are rows, but none is left.
        """
        rows, longest = self.rows(what), self.parameters.training.max_tokens
        fit = [row for row in rows if len(self.renderer.prompt(row.prompt)) <= longest]
        if rows and not fit:
            raise UserError(f"training.max_tokens {longest}: all {len(rows)} prompts of {what} are longer")
        return digest(self.renderer.fingerprint, *(orjson.dumps(row.to_json()) for row in fit)), fit

    @property
    def shown(self) -> Shown:
        """What is sampled on the way."""
        wanted = self.parameters.samples
        rows = self.rows("held_out") or self.rows("data")
        return Shown(self.renderer, rows[: wanted.rows], wanted.max_tokens)


@asynccontextmanager
async def prepared(pipeline: str, parameters: PipelineParameters, *schemas: Schema) -> AsyncIterator[Prepared]:
    """Check the data, which must be of one of the schemas, and show the report; the connection lasts for the block.

    Raises DataCheckError when too much of the data is wrong, UserError when it is of another schema.
    """
    work_url = parameters.work or default_work_url()
    board = Board(f"{pipeline}-{parameters.name}")
    async with connect(parameters.connection) as server:
        base_model = await server.base_model(parameters.model.base_model)
        base = await server.service.create_sampling_client(base_model=base_model)
        renderer = Renderer(base.get_tokenizer(), parameters.model.format)
        sources = {"data": parameters.data} | ({"held_out": parameters.held_out} if parameters.held_out else {})
        reports: dict[str, DataReport] = {}
        for what, source in sources.items():
            reports[what] = check_data(source, work_url, renderer.special_tokens)
            if reports[what].schema_name not in schemas:
                raise UserError(f"{what}: schema {reports[what].schema_name}: {pipeline} needs {' or '.join(schemas)}")
        await board.data(reports)
        yield Prepared(pipeline, parameters, server, base_model, base, renderer, work_url, board, reports)


async def or_cancelled(work: Awaitable[T]) -> T | State[None]:
    """What the work makes; the state Cancelled when somebody asks it to stop."""
    try:
        return await work
    except StoppedError as stopped:
        return Cancelled(message=str(stopped))
