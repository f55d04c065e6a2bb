"""Generation through the journal: model names, sessions of the endpoints, results and cancellation."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import ClientDisconnect
from tests.api.conftest import BASE, EOS, Engine
from tests.manual_clock import ManualClock
from tests.waiting import until

from tinkerflow.api.app import create_app
from tinkerflow.api.call import Call
from tinkerflow.api.endpoints.generation import generate, until_gone
from tinkerflow.api.endpoints.targets import list_models, resolve
from tinkerflow.api.identity import Identity
from tinkerflow.backend.catalog.champions import champion_key
from tinkerflow.backend.catalog.model_card import ModelCard
from tinkerflow.backend.core.errors import NotFoundError, ServerError, TooManyError, UserError
from tinkerflow.backend.journal import CheckpointKind, CheckpointSaved, Journal, NewSession
from tinkerflow.backend.settings import Settings
from tinkerflow.backend.store import Store
from tinkerflow.backend.store.blobs import open_blobs

ANN, BOB = Identity("ann", "key-a", admin=False), Identity("bob", "key-b", admin=False)


@asynccontextmanager
async def calls(
    journal: Journal, settings: Settings, clock: ManualClock | None = None
) -> AsyncIterator[Callable[[Identity], Call]]:
    """Makes calls by identities to an app that runs in this event loop."""
    async with journal.result_subscriptions() as subscriptions:
        app = create_app(settings, journal, subscriptions, Store.open(settings.store_url), clock=clock)
        yield lambda identity: Call(SimpleNamespace(scope={}), identity, app.state.services)  # type: ignore[arg-type]


def saved(journal: Journal, run: str, name: str, owner: str = "ann", kind: str = "sampler_weights") -> str:
    """Record a checkpoint that is only a row, and return its path."""
    flags = {"train_attn": True, "train_mlp": True, "train_unembed": True}
    path = f"tinker://{run}/{kind}/{name}"
    journal.imports.restore(
        CheckpointSaved(
            path=path, run_id=run, kind=CheckpointKind(kind), name=name, owner=owner, base_model=BASE, rank=8, **flags,
            step=1, size_bytes=1, user_metadata={}, expires_at=None, attempt="1", created_at=datetime.now(UTC),
        ),
        False,
        {},
        None,
    )  # fmt: skip
    return path


def promote(settings: Settings, name: str, number: int, weights: str) -> None:
    work = open_blobs(settings.pipelines_url)
    work.create(champion_key(name, number), json.dumps({"weights": weights}).encode())


def test_model_name_may_be_a_base_model_path_run_or_champion(
    journal: Journal, lettered: ModelCard, settings_for: Callable[..., Settings]
) -> None:
    settings = settings_for()
    old, new = saved(journal, "sess-1:train:0", "a"), saved(journal, "sess-1:train:0", "b")
    state = saved(journal, "sess-1:train:0", "c", kind="weights")
    export = saved(journal, "sess-1:train:0", "d", kind="external_weights")
    promote(settings, "help", 1, old)
    promote(settings, "help", 2, new)
    promote(settings, "gone", 1, "tinker://sess-1:train:0/sampler_weights/gone")

    async def scene() -> None:
        async with calls(journal, settings) as of:
            ann, bob = of(ANN), of(BOB)
            base = await resolve(ann, BASE)
            assert (base.name, base.path, base.card) == (BASE, None, lettered)
            assert base.tokenizer is (await resolve(bob, BASE)).tokenizer
            for name, path in [(old, old), (state, state), ("sess-1:train:0", new), ("champion/help", new)]:
                target = await resolve(ann, name)
                assert (target.name, target.path, target.card) == (name, path, lettered)
                with pytest.raises(NotFoundError, match="does not exist"):
                    await resolve(bob, name)
            for unknown in ("nobody", "champion/gone", "champion/x", "champion/../x", "tinker://x/weights/y", "", "."):
                with pytest.raises(UserError):
                    await resolve(ann, unknown)
            with pytest.raises(UserError, match="external weights"):
                await resolve(ann, export)
            assert {model.name for model in await list_models(ann)} == {BASE, old, new, "champion/help"}
            assert {model.name for model in await list_models(bob)} == {BASE}

    asyncio.run(scene())


def test_generation_is_a_sample_in_the_session_of_the_key(
    journal: Journal, engine: Engine, lettered: ModelCard, settings_for: Callable[..., Settings]
) -> None:
    clock = ManualClock(datetime.now(UTC))

    async def scene() -> None:
        async with calls(journal, settings_for(), clock) as of:
            call = of(ANN)
            target = await resolve(call, BASE)
            params = {"max_tokens": 6, "seed": 3, "stop_token_ids": [EOS], "stop": ["zz"]}
            first = await generate(call, target, [2, 3], params, 2)
            result = await first.result()
            pieces = [piece async for piece in first]
            for piece, sequence in zip(pieces, result.sequences, strict=True):
                assert piece.tokens == sequence.tokens_T.tolist()
                assert piece.logprobs == sequence.logprobs_T.tolist()
                assert piece.stop_reason == sequence.stop_reason
            again = await generate(call, target, [2, 3], params, 2)
            assert again.id != first.id
            assert [piece async for piece in again] == pieces
            (mine,) = journal.sessions.ids("ann", limit=9, offset=0)
            assert journal.sessions.get(mine, "ann").key_id == "key-a"
            assert [one.id for one in journal.samplers.of_session(mine)] == [f"{mine}:sample:0"]
            # A new session follows a finished one.
            journal.sessions.finish(mine, "ann")
            clock.advance(1000)
            assert await (await generate(call, target, [2], {"max_tokens": 1})).result()
            assert len(journal.sessions.ids("ann", limit=9, offset=0)) == 2
            assert journal.sessions.ids("bob", limit=9, offset=0) == []
            journal.sessions.create(NewSession("bob", ""))

    asyncio.run(scene())


@pytest.mark.parametrize("limit", ["max_sessions", "max_samplers"])
def test_sessions_and_samplers_of_the_endpoints_count_against_limits(
    journal: Journal, engine: Engine, lettered: ModelCard, settings_for: Callable[..., Settings], limit: str
) -> None:
    async def scene() -> None:
        async with calls(journal, settings_for(**{limit: 1})) as of:
            first, other = of(ANN), of(replace(ANN, key_id="key-c"))
            target = await resolve(first, BASE)
            for _ in range(2):
                assert await (await generate(first, target, [2], {"max_tokens": 1})).result()
            with pytest.raises(UserError, match=limit):
                await generate(other, target, [2], {"max_tokens": 1})
            assert await (await generate(of(BOB), target, [2], {"max_tokens": 1})).result()

    asyncio.run(scene())


def test_stream_of_a_failed_request_does_not_begin(
    journal: Journal, engine: Engine, lettered: ModelCard, settings_for: Callable[..., Settings]
) -> None:
    engine.next_outcome = lambda request: request.failed(ServerError("the devices are gone"))

    async def scene() -> None:
        async with calls(journal, settings_for()) as of:
            call = of(ANN)
            failed = await generate(call, await resolve(call, BASE), [2, 3], {"max_tokens": 6}, stream=True)
            await until(lambda: journal.results.get(failed.id, "ann"))
            with pytest.raises(ServerError, match="the devices are gone"):
                await failed.begin()

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("params", "tokens", "message"),
    [
        ({"max_tokens": 0}, [2], "max_tokens is 0"),
        ({"max_tokens": 99}, [2], "max_tokens is 99"),
        ({"top_p": 0.0}, [2], "top_p is 0.0"),
        ({"temperature": "warm"}, [2], "temperature is 'warm'"),
        ({"stop_token_ids": [16]}, [2], r"stop_token_ids\[0\] is 16"),
        ({}, [], "prompt has 0 tokens"),
        ({}, [99], r"prompt.chunks\[0\].tokens\[0\] is 99"),
    ],
)
def test_invalid_content_is_refused_before_it_is_stored(
    params: dict[str, Any],
    tokens: list[int],
    message: str,
    journal: Journal,
    lettered: ModelCard,
    settings_for: Callable[..., Settings],
) -> None:
    async def scene() -> None:
        async with calls(journal, settings_for()) as of:
            call = of(ANN)
            with pytest.raises(UserError, match=f"^{message}"):
                await generate(call, await resolve(call, BASE), tokens, params)
            assert journal.sessions.ids("ann", limit=9, offset=0) == []

    asyncio.run(scene())


def test_client_disconnect_cancels_the_request(
    journal: Journal, lettered: ModelCard, settings_for: Callable[..., Settings]
) -> None:
    """No engine runs, so the request is not answered."""

    async def scene() -> None:
        async with calls(journal, settings_for(max_sampling_requests=1)) as of:
            call = of(ANN)
            target = await resolve(call, BASE)
            gone = asyncio.Event()

            async def receive() -> dict[str, str]:
                await gone.wait()
                return {"type": "http.disconnect"}

            generation = await generate(call, target, [2], {})
            with pytest.raises(TooManyError, match="max_sampling_requests"):
                await generate(call, target, [2], {})
            asyncio.get_running_loop().call_later(0.05, gone.set)
            request: Any = SimpleNamespace(receive=receive)
            with pytest.raises(ClientDisconnect):
                await until_gone(request, generation.result())
            with pytest.raises(UserError, match=r"^cancelled by the client$"):
                await generation.result()

    asyncio.run(scene())
