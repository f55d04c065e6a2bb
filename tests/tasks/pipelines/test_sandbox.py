"""Programs in sandboxes: their limits, their isolation, and killed sandboxes."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.tasks.pipelines.conftest import parse
from tests.tasks.pipelines.test_rollouts import Echo

from tinkerflow.backend.core.errors import UserError
from tinkerflow.tasks.pipelines import Renderer, sandbox
from tinkerflow.tasks.pipelines.environments import Asked, EnvironmentUnavailableError, Facts
from tinkerflow.tasks.pipelines.rollouts import Lost, Rollouts
from tinkerflow.tasks.pipelines.sandbox import COMMAND, Ran, run_program, run_python

needs_namespaces = pytest.mark.skipif(bool(sandbox._refusal()), reason=f"no namespaces: {sandbox._refusal()}")


SLEEP = ["python", "-c", "import sys, time; time.sleep(60 * int(sys.argv[1])); print(1.5)"]
numbers = itertools.count()


def new_mark() -> str:
    """An argument that no other program on this machine has."""
    return f"mark-{os.getpid()}-{next(numbers)}"


@pytest.fixture(params=["namespaces", "container"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """This machine's sandbox, or a configured command, which does not isolate here."""
    monkeypatch.setenv(COMMAND, "" if request.param == "namespaces" else f"env {sys.executable}")
    if request.param == "namespaces" and sandbox._refusal():
        pytest.skip(f"no namespaces: {sandbox._refusal()}")
    return str(request.param)


async def test_a_program_runs_with_its_files_and_input(kind: str) -> None:
    assert await run_python("print(input())", stdin="Hello") == Ran(0, False, "Hello\n", "")
    ran = await run_program(["python", "tests/one.py"], {"tests/one.py": "import sys; sys.exit(len(open('a').read()))",
                                                         "a": "four"})  # fmt: skip
    assert (ran.status, ran.timed_out) == (4, False)
    ran = await run_python("import os; os.kill(os.getpid(), 9)")
    assert (ran.status, ran.timed_out) == (-signal.SIGKILL, False)


async def test_a_program_has_no_more_than_its_limits(kind: str) -> None:
    ran = await run_python("x = bytearray(2**30)", megabytes=512)
    assert ran.status == 1 and "MemoryError" in ran.errors
    ran = await run_python("while True: pass", seconds=1)
    assert ran.timed_out and ran.status in (-signal.SIGXCPU, -signal.SIGKILL)
    ran = await run_python("import time; print('before', flush=True); time.sleep(600)", seconds=0.5)
    assert ran == Ran(-signal.SIGKILL, True, "before\n", "")
    ran = await run_python("print('x' * 2**22)")
    assert len(ran.output) == 2**20
    ran = await run_python("open('large', 'wb').write(bytes(2**25))")
    assert ran.status != 0


@pytest.mark.parametrize("command", [["no-such-program"], ["python", "-c", "a\0b"], ["python", "-c", "#" * 2**18]])
async def test_unstartable_program_ends_with_status_127(kind: str, command: list[str]) -> None:
    ran = await run_program(command)
    assert (ran.status, ran.timed_out, ran.output) == (127, False, "") and ran.errors


async def test_files_and_input_that_a_sandbox_cannot_write_are_errors_of_the_program(kind: str) -> None:
    async with sandbox.Sandbox() as box:
        ran = await box.execute(["true"], {"a" * 300: ""})
        assert (ran.status, ran.timed_out) == (127, False) and "File name too long" in ran.errors
        half = "\ud800"  # half of a surrogate pair, as a model may write it in JSON
        ran = await box.execute(["python", "main.py"], {"main.py": f"print('{half}')"})
        assert ran.status == 1 and "SyntaxError" in ran.errors
        ran = await box.execute(["wc", "-c"], stdin=half)
        assert (ran.status, ran.output.strip()) == (0, "3")


async def test_commands_of_a_sandbox_share_its_files(kind: str) -> None:
    async with sandbox.Sandbox() as box:
        await box.execute(["python", "-c", "open('a', 'w').write('one')"], {"b": b"\xff"})
        ran = await box.execute(["python", "-c", "print(open('a').read(), open('b', 'rb').read())"])
        assert ran.output == "one b'\\xff'\n"
        ran = await box.execute(["python", "-c", "import os; print(os.getcwd(), os.environ['X'])"], folder="/",
                                variables={"X": "1"})  # fmt: skip
        assert ran.output == "/ 1\n"


async def test_program_does_not_see_the_environment_of_the_engine(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-secret")
    ran = await run_python("import os; print(sorted(os.environ))")
    assert ran.output == "['HOME', 'LANG', 'PATH', 'TMPDIR']\n"


@needs_namespaces
async def test_program_cannot_reach_network_processes_or_files() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        ran = await run_python(f"import socket; socket.create_connection(('127.0.0.1', {port}), 5)")
    assert "ConnectionRefusedError" in ran.errors or "unreachable" in ran.errors
    for family in ("AF_UNIX", "AF_VSOCK", "AF_NETLINK"):
        ran = await run_python(f"import socket; socket.socket(socket.{family}, socket.SOCK_STREAM)")
        assert ran.status == 1 and "PermissionError" in ran.errors
    assert (await run_python("import asyncio; asyncio.run(asyncio.sleep(0))")).status == 0
    ran = await run_python("import os; print(sorted(filter(str.isdigit, os.listdir('/proc'))))")
    assert ran.output == "['1', '2']\n"
    ran = await run_python(f"open({str(Path(__file__).with_name('no.txt'))!r}, 'w')")
    assert "Read-only file system" in ran.errors
    ran = await run_python("open('/tmp/mine', 'x'); import os; print(len(os.listdir('/tmp')))")
    assert ran.output == "2\n" and not Path("/tmp/mine").exists()
    ran = await run_python("open('large', 'wb').write(bytes(2**23))", megabytes=4)
    assert ran.status != 0, "the folder is not larger than the memory"


@needs_namespaces
async def test_a_program_cannot_write_its_own_result() -> None:
    ran = await run_python("import os; os.kill(1, 9); open('/proc/1/fd/1', 'w').write('{}')")
    assert ran.status == 1 and "PermissionError" in ran.errors


@needs_namespaces
async def test_sandbox_ends_all_processes_of_its_program() -> None:
    code = f"import os; os.fork() or (os.setsid(), os.execlp('sleep', {(mark := new_mark())!r}, '600'))"
    assert (await run_python(code)).status == 0
    assert not [each for each in psutil.process_iter(["cmdline"]) if mark in (each.info["cmdline"] or ())]


async def marked(mark: str) -> psutil.Process:
    """Wait for the program with this argument, and return its process."""
    while True:
        for each in psutil.process_iter(["cmdline"]):
            if mark in (each.info["cmdline"] or ()):
                return each
        await asyncio.sleep(0.02)


async def kill_sandbox(mark: str) -> None:
    """Kill a program's sandbox and the program, as the end of a container does."""
    program = await marked(mark)
    parent = program.parent()
    assert parent is not None
    parent.kill()
    with suppress(psutil.NoSuchProcess):
        program.kill()


async def test_killed_sandbox_is_not_a_program_error(kind: str) -> None:
    killing = asyncio.create_task(kill_sandbox(mark := new_mark()))
    with pytest.raises(EnvironmentUnavailableError, match="the sandbox ended before its program"):
        await run_program([*SLEEP, "1", mark], {})
    await killing


@needs_namespaces
async def test_a_cancelled_program_is_ended() -> None:
    running = asyncio.create_task(run_program([*SLEEP, "1", mark := new_mark()], {}))
    program = await marked(mark)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await asyncio.to_thread(program.wait, 60)


@needs_namespaces
@pytest.mark.parametrize("kills", [2, 99])
async def test_conversation_with_a_killed_sandbox_is_restarted(tokenizer: Any, renderer: Renderer, kills: int) -> None:
    """A group of three survives two kills. If each attempt is killed, there is no group, instead of rewards of 0."""
    killing = list[asyncio.Task[None]]()

    async def reward(facts: Facts, text: str) -> float:
        mark, killed = new_mark(), len(killing) < kills
        if killed:
            killing.append(asyncio.create_task(kill_sandbox(mark)))
        return float((await run_program([*SLEEP, str(int(killed)), mark], {})).output)

    lost = list[Lost]()
    rollouts = Rollouts(renderer, lambda facts: Asked(facts, reward), 3, 4, environment_retries=1)
    conversations = rollouts.groups(Echo(tokenizer), [parse({"prompt": "Go"})], [1], lost)
    if kills == 2:
        (group,) = await conversations
        assert [(each.reward, each.attempt) for each in group] == [(1.5, 0), (1.5, 1), (1.5, 1)]
        assert [each.repeated for each in lost] == [True, True]
    else:
        with pytest.raises(
            EnvironmentUnavailableError, match="conversations of this step were interrupted; the last one: "
        ):
            await conversations
        assert [each.repeated for each in lost] == [True] * 3 + [False] * 3
    assert all("the sandbox ended before its program" in each.reason for each in lost) and not rollouts.failures
    await asyncio.gather(*killing)


async def test_machine_without_isolation_refuses_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(COMMAND, raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    sandbox._refusal.cache_clear()
    with pytest.raises(UserError, match=r"PIPELINES_SANDBOX is empty, and this machine cannot .* No such file"):
        await run_python("")
    monkeypatch.setenv(COMMAND, "no-such-container")
    with pytest.raises(EnvironmentUnavailableError, match="cannot be started"):
        await run_python("")
    sandbox._refusal.cache_clear()
