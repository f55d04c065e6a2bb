"""`tinkerflow cassette record` and `serve`: run programs against a recorder or a replay, or record a run's history."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path

from tinkerflow.backend.core.errors import UserError, broken
from tinkerflow.deployments.cassettes.file import CassetteWriter
from tinkerflow.deployments.cassettes.server import API_KEY, RECORDING, serving
from tinkerflow.deployments.overview import STOPPED

Report = Callable[[str], None]


def record_program(command: Sequence[str], output: Path, server: str, *, report: Report) -> int:
    """Run a program against a recorder. Returns its exit status.

    command: the program and its arguments. output: the file. server: URL of the service; "" = TINKER_BASE_URL, or the
    service of the data dir. report: gets lines for people.
    UserError: no service answers, the file cannot be written, or the program made no request.
    """
    from tinkerflow.backend.settings import Settings
    from tinkerflow.deployments.cassettes.record import Recorder, answers, is_http
    from tinkerflow.tasks.pipelines.server_address import server_from_environment

    url, _ = server_from_environment(Settings(), server)
    if not is_http(url):
        raise broken("the URL of the service", url, "an http or https URL")
    if not asyncio.run(answers(url)):
        raise UserError(f"no service answers at {url}: start it with `tinkerflow up`, or give --server")
    with CassetteWriter(output) as writer:
        recorder = Recorder(url, writer)
        with serving(recorder.app()) as own:
            status = _run(command, {"TINKER_BASE_URL": own, RECORDING: str(output.resolve())})
        if not recorder.requests:
            writer.discard()
            raise UserError(
                f"{command[0]} ended with status {status} and made no request through TINKER_BASE_URL: a program that "
                "gives the SDK a base_url must take it from there"
            )
        if status == STOPPED:
            report(f"interrupted: {writer.part} contains {recorder.requests} requests")
            return status
        digest = writer.close()
    report(_recorded(recorder.requests, output, digest))
    if recorder.unanswered:
        report(f"{recorder.unanswered} of them had no result when the program ended")
    if status:
        report(f"the program ended with status {status}, as its replay will")
    return status


def record_run(run_id: str, output: Path, server: str, *, report: Report) -> None:
    """Make the cassette of a run from its history (from_history.py).

    run_id: the run. output: the file. server: URL of the service; "" = TINKER_BASE_URL, or the service of the data dir.
    report: gets lines for people.
    NotFoundError: there is no such run, or it has no history. UserError: a result differs from the recorded one, or the
    file cannot be written.
    """
    from tinkerflow.deployments.cassettes.from_history import write_run
    from tinkerflow.deployments.options import settings_with
    from tinkerflow.deployments.recorded_run import Api, RecordedRun
    from tinkerflow.tasks.pipelines.server_address import server_from_environment

    with Api(*server_from_environment(settings_with(), server)) as api, CassetteWriter(output) as writer:
        try:
            recorded = write_run(RecordedRun.find(api, run_id), writer)
        except BaseException:
            writer.discard()
            raise
        digest = writer.close()
    report(_recorded(recorded.requests, output, digest))
    for text in recorded.missing:
        report(text)


def serve_cassette(
    file: Path, command: Sequence[str], *, port: int, ignore: Collection[str], partial: bool, report: Report
) -> int:
    """Answer from a cassette while a program runs, or until Ctrl-C. Returns the exit status.

    file: the cassette. command: the program and its arguments; empty = serve programs that are started elsewhere.
    port: the port on 127.0.0.1; 0 = a free port. ignore: fields that may differ. partial: accept an interrupted
    recording. report: gets lines for people.
    UserError: the file cannot be replayed, or the port is taken.
    """
    from tinkerflow.deployments.cassettes.play import open_replay

    replay = open_replay(file, ignore, partial=partial)
    with serving(replay.app(), port) as url:
        report(f"serving: {url}  ({len(replay.recording.compared)} requests of {file})")
        variables = {"TINKER_BASE_URL": url, "TINKER_API_KEY": API_KEY}
        status = _run(command, variables) if command else _wait()
    differences = replay.script.report()
    for text in differences:
        report(text)
    if not differences:
        report(f"replayed all requests of {file}")
    return status or (1 if differences else 0)


def _recorded(requests: int, output: Path, digest: str) -> str:
    size = output.stat().st_size
    return f"recorded {requests} requests in {output}: {size:,} bytes, SHA-256 {digest[:16]}"


def _wait() -> int:
    """Wait for Ctrl-C or SIGTERM."""
    with suppress(KeyboardInterrupt, SystemExit):
        threading.Event().wait()
    return 0


def _run(command: Sequence[str], variables: dict[str, str]) -> int:
    """Run a program with additional environment variables. Returns its exit status, 130 after Ctrl-C or SIGTERM.

    The program gets the same signal, and may take as long as it needs to end. The third signal kills it.
    """
    try:
        process = subprocess.Popen(command, env=os.environ | variables)
    except OSError as error:
        raise UserError(f"{command[0]} cannot be started: {error.strerror}") from error
    signals = 0
    while True:
        try:
            status = process.wait()
            break
        except KeyboardInterrupt:
            number = None if _in_terminal() else signal.SIGINT  # the terminal has sent it to the program, too
        except SystemExit:
            number = signal.SIGTERM
        signals += 1
        if signals > 2:
            number = signal.SIGKILL
        if number is not None:
            process.send_signal(number)
    if signals:
        return STOPPED
    return status if status >= 0 else 128 - status  # the shell's status for a signal


def _in_terminal() -> bool:
    """Whether Ctrl-C in a terminal goes to this process and to the programs that it starts."""
    with suppress(OSError), Path("/dev/tty").open("rb") as terminal:
        return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    return False
