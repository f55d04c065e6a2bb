"""The connection to a Tinkerflow server, from a Prefect block or from the environment."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx
from prefect.blocks.core import Block
from prefect.utilities.asyncutils import run_coro_as_sync
from pydantic import Field, SecretStr

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.core.log_levels import logging_at
from tinkerflow.backend.settings import Settings
from tinkerflow.tasks.pipelines.render import Renderer
from tinkerflow.tasks.pipelines.server_address import offered_name, sendable_key, server_from_environment

if TYPE_CHECKING:
    import tinker

log = logging.getLogger(__name__)

CLOSE_SECONDS = 60.0  # longest wait for the end of a session
_NO_LIMIT = 2**31  # tokens, for a server that does not report its limit


class TinkerflowConnection(Block):
    """URL and key of a Tinkerflow server, stored by Prefect. The key is encrypted."""

    _block_type_name = "Tinkerflow Connection"
    _block_type_slug = "tinkerflow-connection"

    base_url: str = Field(description="URL of the API, which `tinkerflow up` prints.")
    api_key: SecretStr = Field(description="A key that `tinkerflow key create` created.")


@dataclass(frozen=True)
class OfferedModel:
    """A base model that the server offers. max_context: longest sequence in tokens."""

    name: str
    max_context: int


@dataclass(frozen=True)
class ServerClients:
    """The SDK's two clients of one Tinkerflow server, and its URL and key for requests that the SDK lacks."""

    service: tinker.ServiceClient
    rest: tinker.RestClient
    url: str = ""
    key: str = field(default="", repr=False)

    async def base_model(self, wanted: str) -> OfferedModel:
        """The base model to use. wanted: its name; "" = the first one. UserError: the server does not offer it."""
        capabilities = await self.rest.get_server_capabilities()
        offered = {
            model.model_name: OfferedModel(model.model_name, model.max_context_length or _NO_LIMIT)
            for model in capabilities.supported_models
            if model.model_name
        }
        return offered[offered_name(wanted, offered)] if wanted else next(iter(offered.values()))

    def http(self, seconds: float) -> httpx.AsyncClient:
        """A client for requests that the SDK lacks. seconds: the time limit of a request."""
        headers = {"X-API-Key": self.key}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=seconds, follow_redirects=True)

    async def unload(self, model_id: str) -> None:
        """Unload a model, and wait until it no longer counts toward max_live_models.

        A failure is only logged as a warning, because the end of the session unloads the model.
        """
        problem = ""
        try:
            async with asyncio.timeout(CLOSE_SECONDS), self.http(CLOSE_SECONDS) as http:
                asked = await http.post("api/v1/unload_model", json={"model_id": model_id})
                if asked.status_code == httpx.codes.GONE:
                    return  # the model has ended already
                poll = {"request_id": asked.raise_for_status().json()["request_id"]}
                answer = {"type": "try_again"}
                while answer.get("type") == "try_again":
                    answer = (await http.post("api/v1/retrieve_future", json=poll)).raise_for_status().json()
                problem = answer.get("error", "")
        except (httpx.HTTPError, TimeoutError) as error:
            problem = f"{type(error).__name__}: {error}"
        if problem:
            log.warning("model %s was not unloaded, and stays until its session ends: %s", model_id, problem)

    async def sampler_weights(self, wanted: str) -> str:
        """The path of sampler weights. wanted: this path (tinker://…), or a training run's id for its newest weights.

        UserError: the run has saved none yet. If there is no such run, the SDK's errors are raised.
        """
        if wanted.startswith("tinker://"):
            return wanted
        newest = (await self.rest.get_training_run(wanted)).last_sampler_checkpoint
        if newest is None:
            raise UserError(f"training run {wanted!r}: it has no sampler weights: call save_weights_for_sampler")
        return str(newest.tinker_path)

    async def base_of(self, path: str) -> str:
        """The name of the base model that a checkpoint belongs to. tinker.NotFoundError: the key cannot read it."""
        return str((await self.rest.get_weights_info_by_tinker_path(path)).base_model)

    async def refuse_other_tokenizer(self, name: str, path: str, model: OfferedModel) -> None:
        """Raise UserError if `model` reads rows with another tokenizer than the base model of sampler weights.

        name: of the weights, for the error. path: of the weights.
        """
        if (base := await self.base_of(path)) == model.name:
            return
        samplers = [await self.service.create_sampling_client(base_model=one) for one in (model.name, base)]
        ours, theirs = (Renderer(sampler.get_tokenizer(), "text").vocabulary for sampler in samplers)
        if ours != theirs:
            raise UserError(
                f"{name} {path}: belongs to base model {base!r}, whose tokenizer differs from that of {model.name!r}, "
                f"which reads the rows: set the base model to {base!r}, or leave these weights out"
            )


def address(block: str = "") -> tuple[str, str]:
    """URL and key of the server that `connect` would use, for callers that do not await."""
    if block:
        loaded: Any = run_coro_as_sync(TinkerflowConnection.aload(block))
        return _address_in(loaded, block)
    return server_from_environment(Settings())


def _address_in(loaded: TinkerflowConnection, block: str) -> tuple[str, str]:
    return str(loaded.base_url), sendable_key(loaded.api_key.get_secret_value(), f"api_key of block {block!r}")


@asynccontextmanager
async def connect(block: str = "", *, close_seconds: float = CLOSE_SECONDS) -> AsyncIterator[ServerClients]:
    """Clients of the server in the Prefect block `block`, or else of TINKER_BASE_URL and TINKER_API_KEY.

    Without these variables: the service of the data dir (`server_from_environment`). close_seconds: longest wait for
    the end of the session.
    """
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    import tinker

    url, key = _address_in(await TinkerflowConnection.aload(block), block) if block else address()
    service = tinker.ServiceClient(base_url=url, api_key=key)
    try:
        yield ServerClients(service, tinker.RestClient(base_url=url, api_key=key), url, key)
    finally:
        try:
            # The SDK reports samples that it can no longer cancel. The server ends them with the session.
            with logging_at(logging.CRITICAL, "tinker"):
                await asyncio.to_thread(service.close("success").result, close_seconds)
        except TimeoutError:  # a task of the SDK may miss its cancellation and never end
            log.warning("the session of this run was not closed within %g s; the server ends it", close_seconds)
