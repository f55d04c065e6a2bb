"""Effects of Prefect's buttons, by the states that they set, and of signals on a pipeline's run."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest
from prefect.exceptions import Pause
from prefect.states import Cancelling, Paused, Running, Suspended

from tinkerflow.backend.core.errors import ServerError
from tinkerflow.tasks.pipelines import control as module
from tinkerflow.tasks.pipelines.control import Control, StoppedError, controlled, obey, stoppable
from tinkerflow.tasks.pipelines.user_code import InterruptedCodeError, call_in_loop


def test_cancel_stops_the_run() -> None:
    control = Control()
    obey(control, [Running(), Cancelling()])
    assert control.stopping
    with pytest.raises(StoppedError, match="after step 3"):
        control.stopped("stopped after step 3")


async def test_pause_holds_the_run_until_it_is_resumed() -> None:
    control = Control()
    obey(control, [Paused(timeout_seconds=60)])
    assert control.paused and not control.stopping
    obey(control, [Running()])
    assert await control.may_go_on()


async def test_suspend_ends_the_process_so_that_another_one_continues() -> None:
    control, state = Control(), Suspended(timeout_seconds=60)
    obey(control, [Running(), state])
    assert not await control.may_go_on()
    with pytest.raises(Pause) as raised:
        control.stopped("stopped after step 3")
    assert raised.value.state is state


async def test_a_signal_stops_a_run_and_its_parts() -> None:
    before = signal.getsignal(signal.SIGTERM)

    async def part(begun: asyncio.Event) -> bool:
        async with controlled() as control:
            control.pause()
            begun.set()
            return await control.may_go_on()  # waits until the run is stopped

    async with controlled() as outer:
        events = [asyncio.Event(), asyncio.Event()]
        parts = [asyncio.create_task(part(event)) for event in events]
        for event in events:
            await event.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.gather(*parts) == [False, False]
        assert outer.stopping
        async with controlled() as late:
            assert late.stopping
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_part_can_be_stopped_alone() -> None:
    outer, part = Control(), Control()
    with outer.over(part):
        part.stop()
    assert (part.stopping, outer.stopping) == (True, False)
    outer.stop()  # nothing is left to stop


async def test_work_before_the_first_step_is_interrupted_unless_it_ends_itself() -> None:
    steps = []
    with pytest.raises(StoppedError, match="nothing is saved"):
        async with stoppable("nothing is saved"):
            async with controlled() as control:
                os.kill(os.getpid(), signal.SIGTERM)
                assert not await asyncio.wait_for(_asked(control), 60)
                steps.append("saved")
            await asyncio.Event().wait()
    assert steps == ["saved"]


async def test_a_stopped_run_releases_its_model_and_names_its_last_step() -> None:
    released = []
    with pytest.raises(StoppedError, match="after step 3"):
        async with stoppable("no step was running"):
            try:
                async with controlled() as control:
                    control.stop()
                    control.stopped("stopped after step 3")
            finally:
                control.stop()  # the run reads its state again
                await asyncio.sleep(0.05)
                released.append("model")
    assert released == ["model"]


async def test_a_stop_does_not_replace_the_error_of_a_step() -> None:
    with pytest.raises(ServerError, match="step 3 failed"):
        async with stoppable("no step was running"):
            try:
                async with controlled() as control:
                    control.stop()
                    raise ServerError("step 3 failed")
            finally:
                control.stop()
                await asyncio.sleep(0.05)


async def _asked(control: Control) -> bool:
    control.pause()
    return await control.may_go_on()


def block() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(3600)


async def test_code_that_blocks_the_event_loop_is_interrupted_after_a_signal(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "STUCK_SECONDS", 0.05)
    place = rf"block \({__file__}:\d+\) blocked the event loop, and was interrupted"
    with pytest.raises(StoppedError, match=f"stopped: {place}"):
        async with stoppable("stopped"):
            await call_in_loop(block)
    assert "blocked the event loop" in caplog.text
    async with controlled() as control:
        with pytest.raises(InterruptedCodeError, match=place):
            await call_in_loop(block)
        with pytest.raises(InterruptedCodeError, match=place):
            module.refuse_after_interruption()
        assert not await control.may_go_on()
