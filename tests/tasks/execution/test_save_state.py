"""The states of saves, changed by hand."""

from __future__ import annotations

import asyncio

import pytest

from tinkerflow.tasks.execution.sequencer import Saves, SaveState

DETACHED = (SaveState.STORING, SaveState.RETRYING)


@pytest.mark.parametrize("state", DETACHED)
def test_a_detached_save_is_listed_until_it_ends(state: SaveState) -> None:
    saves = Saves()
    save = saves.begin("request", "model", 1)
    assert saves.detached("model") == [] and not saves.is_being_stored("request")
    save.state = state
    assert saves.detached("model") == [save] and saves.is_being_stored("request")
    assert saves.detached("another") == []
    saves.end(save, SaveState.STORED, answered=True)
    assert saves.detached("model") == [] and save.ended.is_set()


@pytest.mark.parametrize(
    ("end", "answered", "unstored"),
    [
        (SaveState.STORED, True, False),
        (SaveState.FAILED, False, False),  # its client has the error, and no sampler uses it
        (SaveState.FAILED, True, True),  # its weights must stay in the worker group
        (SaveState.LOST, False, False),  # it starts over
        (SaveState.LOST, True, True),
    ],
)
def test_answered_save_is_unstored_until_the_store_has_it(end: SaveState, answered: bool, unstored: bool) -> None:
    saves = Saves()
    saves.end(saves.begin("request", "model", 1), end, answered=answered)
    assert saves.is_unstored("request") is unstored
    saves.forget("model")
    assert not saves.is_unstored("request")


def test_restarted_save_is_not_ended_by_its_first_attempt() -> None:
    saves = Saves()
    first = saves.begin("request", "model", 1)
    second = saves.begin("request", "model", 2)
    saves.end(first, SaveState.STORED, answered=True)
    assert saves.is_unstored("request")
    saves.end(second, SaveState.STORED, answered=True)
    assert not saves.is_unstored("request")


def test_store_counts_as_failing_for_a_model_until_it_stores_a_save() -> None:
    saves = Saves()
    for number, name in enumerate("ab"):
        saves.begin(name, "model", number).state = SaveState.STORING
    assert not saves.store_fails("model")
    saves.store_failed("a")
    assert saves.store_fails("model") and not saves.store_fails("another")
    saves.store_works("model")
    assert not saves.store_fails("model")
    assert [save.request_id for save in saves.detached("model")] == ["a", "b"]


async def test_the_oldest_detached_save_comes_first_and_its_end_can_be_awaited() -> None:
    saves = Saves()
    for name, number in {"newer": 7, "older": 3}.items():
        saves.begin(name, "model", number).state = SaveState.STORING
    older, newer = saves.detached("model")
    assert (older.number, newer.number) == (3, 7)
    waiting = asyncio.create_task(older.ended.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    saves.end(older, SaveState.FAILED, answered=False)
    assert await asyncio.wait_for(waiting, 60)
