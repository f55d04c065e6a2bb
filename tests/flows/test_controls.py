"""The buttons of Prefect's UI during failures, on a fake server. test_prefect.py presses them on a real server."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelling, Paused, Running, Scheduled, State

from tinkerflow.backend.core.errors import JournalBusyError
from tinkerflow.flows.prefect import controls
from tinkerflow.flows.prefect.connection import PrefectConnection
from tinkerflow.flows.prefect.controls import ControlsWatch


def run_of(model_id: str, state: State[Any]) -> Any:
    return SimpleNamespace(id=uuid4(), name="run", state=state, parameters={"model_id": model_id})


class Server:
    """A fake of Prefect's client with flow runs, whose list has pages of two. `run` is the first one."""

    def __init__(self, state: State[Any], *others: State[Any]) -> None:
        self.runs = [run_of("model", state), *(run_of(f"model {i}", one) for i, one in enumerate(others))]
        self.run, self.exists = self.runs[0], True

    async def __aenter__(self) -> Server:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def read_flow_runs(self, offset: int = 0, **_: object) -> list[Any]:
        asked = [run for run in self.runs if self.exists and not run.state.is_final()]
        return asked[offset : offset + 2]

    async def read_flow_run(self, _: UUID) -> Any:
        raise ObjectNotFound(Exception("deleted"))

    async def set_flow_run_state(self, changed: UUID, state: State[Any], **_: object) -> None:
        next(run for run in self.runs if run.id == changed).state = state


class Controls:
    """Records its calls. errors: raised by the next calls of `cancel` and `pause`."""

    def __init__(self, shown: UUID | None = None) -> None:
        self.shown = shown
        self.asked: list[tuple[str, str | None]] = []
        self.errors: list[Exception] = []

    def shown_in(self, model_id: str) -> UUID | None:
        return self.shown

    async def pause(self, model_id: str, why: str | None) -> None:
        self.asked.append(("pause", why))
        if self.errors:
            raise self.errors.pop()

    async def cancel(self, model_id: str, why: str) -> None:
        self.asked.append(("cancel", why))
        if self.errors:
            raise self.errors.pop()

    async def retry(self, model_id: str, flow_run: UUID) -> None:
        self.asked.append(("retry", str(flow_run)))


async def test_unavailable_button_action_is_applied_later(
    monkeypatch: pytest.MonkeyPatch, running: Any, until: Any
) -> None:
    server, asked = Server(Cancelling()), Controls()
    asked.errors = [ValueError("an answer that cannot be read")]
    monkeypatch.setattr(controls, "get_client", lambda: server)
    monkeypatch.setattr(controls, "POLL_SECONDS", 0.001)
    async with running(ControlsWatch(PrefectConnection("http://prefect/api"), asked).watch()):
        await until(lambda: server.run.state.is_cancelled())
    assert [what for what, _ in asked.asked] == ["cancel", "cancel"]


@pytest.mark.parametrize("resumed", [Running(), Scheduled(), Paused(timeout_seconds=-1)])
async def test_suspend_and_resume_during_an_outage_of_the_database_are_applied_later(resumed: State[Any]) -> None:
    server = Server(Paused(timeout_seconds=3600))
    asked = Controls(server.run.id)
    watch = ControlsWatch(PrefectConnection("http://prefect/api"), asked)
    for state in (server.run.state, resumed):
        server.run.state, asked.errors, asked.asked = state, [JournalBusyError("away")], []
        with pytest.raises(JournalBusyError):
            await watch.obey_all(server)  # type: ignore[arg-type]
        for _ in range(2):
            await watch.obey_all(server)  # type: ignore[arg-type]
        assert len(asked.asked) == 2, "the call that failed was repeated once"
    assert asked.asked == [("pause", None)] * 2
    assert server.run.state.is_running()


async def test_repeated_retry_state_is_applied_once() -> None:
    server, asked = Server(Scheduled()), Controls()
    watch = ControlsWatch(PrefectConnection("http://prefect/api"), asked)
    for state in (server.run.state, server.run.state, Scheduled()):
        server.run.state = state
        await watch.obey_all(server)  # type: ignore[arg-type]
    assert len(asked.asked) == 2


async def test_buttons_of_all_pages_of_runs_have_an_effect() -> None:
    server, asked = Server(*[Paused(timeout_seconds=3600)] * 4, Cancelling()), Controls()
    await ControlsWatch(PrefectConnection("http://prefect/api"), asked).obey_all(server)  # type: ignore[arg-type]
    assert [what for what, _ in asked.asked] == ["cancel"] and server.runs[-1].state.is_cancelled()


async def test_model_continues_after_its_paused_flow_run_was_deleted() -> None:
    server = Server(Paused(timeout_seconds=3600))
    asked = Controls(server.run.id)
    watch = ControlsWatch(PrefectConnection("http://prefect/api"), asked)
    await watch.obey_all(server)  # type: ignore[arg-type]
    server.exists = False
    for _ in range(2):
        await watch.obey_all(server)  # type: ignore[arg-type]
        await asyncio.sleep(0)
    assert [why is not None for _, why in asked.asked] == [True, False]
