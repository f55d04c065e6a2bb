"""The `tinkerflow` command: its overview, which loads nothing, and the start of a command."""

from __future__ import annotations

import os
import sys
from urllib.parse import urlsplit

from tinkerflow import __version__
from tinkerflow.backend.core.suggest import did_you_mean

ABOUT = "Self-hosted fine-tuning with the tinker SDK: JAX workers on your machines, shown in Prefect."
# Group -> command -> its module in `commands`, and a summary. Tests compare it with the commands of these modules.
OVERVIEW = {
    "Start here": {
        "quickstart": ("pipelines", "teach the embedded model three phrases, and go on serving"),
        "run": ("pipelines", "run a fine-tuning pipeline now"),
        "data": ("data", "check data before training, without a server"),
    },
    "Serve": {
        "up": ("service", "start the API, the engine, the workers and Prefect"),
        "status": ("service", "show what is running"),
        "doctor": ("service", "check this machine and the settings, and name fixes"),
        "plan": ("service", "tell whether a model fits a machine, and how fast it can be"),
        "prefect": ("service", "print a link that signs a browser in to Prefect"),
        "serve": ("pipelines", "run scheduled pipelines on this machine"),
        "backup": ("backups", "copy the data dir into one file, also while the service runs"),
        "restore": ("backups", "unpack a backup into a new data dir"),
    },
    "Manage": {
        "key": ("key", "create, list and revoke API keys"),
        "checkpoint": ("checkpoint", "list, verify, import, merge and share checkpoints"),
        "champion": ("champion", "list the best weights of pipelines, and roll one back"),
        "models": ("models", "make or download base models"),
    },
    "Parts, for several hosts": {
        "api": ("service", "run the API alone"),
        "engine": ("service", "run the engine alone"),
        "worker": ("service", "run worker processes for an engine on another host"),
    },
}
MODULES = {name: module for commands in OVERVIEW.values() for name, (module, _) in commands.items()}


def main() -> None:
    """Run the command line."""
    words = sys.argv[1:]
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
        from tinkerflow.deployments.commands import run

        run(MODULES[words[0]])


def overview() -> str:
    """The help of the command itself."""
    lines = ["Usage: tinkerflow COMMAND [OPTIONS]", "", ABOUT]
    for group, commands in OVERVIEW.items():
        lines += ["", f"{group}:", *(f"  {name:12}{summary}" for name, (_, summary) in commands.items())]
    end = "`tinkerflow COMMAND --help` explains a command. `tinkerflow --version` prints the version."
    return "\n".join([*lines, "", end])


def hide_password(words: list[str]) -> None:
    """Start this command again without a database password among its arguments, which every local user could read.

    The URL goes into the environment, which only the same user can read.
    """
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
        return True  # no URL at all: it is refused later, and must not be visible until then
    return parts.password is not None or "password=" in parts.query


if __name__ == "__main__":
    main()
