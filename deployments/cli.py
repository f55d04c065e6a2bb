"""The `tinkerflow` command, which prints the overview or starts a command."""

from __future__ import annotations

import errno
import os
import signal
import sys
from types import FrameType
from urllib.parse import urlsplit

from tinkerflow import __version__
from tinkerflow.backend.core.suggest import did_you_mean
from tinkerflow.deployments.overview import MODULES, STOPPED, TERMINATED, overview


def main() -> None:
    """Run the command line. Ctrl-C ends it with status 130, SIGTERM with 143, and a closed output with 1.

    A signal ends the command like an error, so a file or folder that is half written is removed. No case prints a
    traceback.
    """
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        try:
            _run(sys.argv[1:])
        finally:
            sys.stdout.flush()  # at exit, Python would print an error of its own
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        closed = error.errno == errno.EPIPE  # the reader has ended, as `head -1` does
        sys.exit(1 if closed else f"tinkerflow: the output cannot be written ({error.strerror})")
    except KeyboardInterrupt:
        sys.exit(STOPPED)
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminate(number: int, frame: FrameType | None) -> None:
    sys.exit(TERMINATED)


def _run(words: list[str]) -> None:
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
    elif words[0] == "--version":
        print(f"tinkerflow {__version__}")
    elif words[0] not in MODULES:
        suggestion = did_you_mean(words[0], MODULES)
        print(f"tinkerflow: no command {words[0]!r}{suggestion}; `tinkerflow --help` lists them", file=sys.stderr)
        sys.exit(2)
    else:
        hide_password(words)
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # transformers does not need PyTorch here
        os.environ.setdefault("DO_NOT_TRACK", "1")  # otherwise Prefect's client sends usage data
        from tinkerflow.deployments.commands import run

        run(MODULES[words[0]])


def hide_password(words: list[str]) -> None:
    """Restart this command without a database password in its arguments, which every local user could read.

    The URL moves to the environment, which only the same user can read. The arguments of `cassette` stay, because they
    contain the command line of another program.
    """
    if words[0] == "cassette":
        return
    for i, word in enumerate(words):
        name, given, value = word.partition("=")
        url = value if given else "".join(words[i + 1 : i + 2])
        if name == "--database-url" and has_password(url):
            rest = words[:i] + words[i + (1 if given else 2) :]
            hint = "its password would be visible in the process list; set TINKERFLOW_DATABASE_URL instead"
            print(f"tinkerflow: --database-url is moved to the environment: {hint}", file=sys.stderr, flush=True)
            command = [sys.executable, "-m", "tinkerflow", *rest]
            os.execve(sys.executable, command, os.environ | {"TINKERFLOW_DATABASE_URL": url})


def has_password(url: str) -> bool:
    """Whether a database URL contains a password, in its address or among its options."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return True  # not a URL: it is refused later, and must be hidden until then
    return parts.password is not None or "password=" in parts.query


if __name__ == "__main__":
    main()
