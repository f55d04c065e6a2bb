"""The commands of `tinkerflow` with their modules and summaries. The top-level help loads nothing else."""

from __future__ import annotations

from pathlib import Path

ABOUT = "Self-hosted fine-tuning with the tinker SDK: JAX workers on your machines, shown in Prefect."
STOPPED, TERMINATED = 130, 143  # the exit statuses of a command after Ctrl-C and after SIGTERM
# Group -> command -> its module in `commands`, and a summary. Tests compare it with the commands of these modules.
OVERVIEW = {
    "Start here": {
        "quickstart": ("pipelines", "teach the embedded model three phrases, and keep serving"),
        "run": ("pipelines", "run a fine-tuning pipeline now"),
        "data": ("data", "check data before training, without a server"),
        "cassette": ("cassette", "record a program's requests, and replay them without a model"),
    },
    "Serve": {
        "up": ("service", "start the API, the engine, the workers and Prefect"),
        "status": ("service", "show what is running"),
        "doctor": ("service", "check this machine and the settings, and name fixes"),
        "plan": ("service", "show whether a model fits a machine, and its speed"),
        "prefect": ("service", "print a link that signs a browser in to Prefect"),
        "serve": ("pipelines", "run scheduled pipelines on this machine"),
        "backup": ("backups", "copy the data dir into one file, also while the service runs"),
        "restore": ("backups", "unpack a backup into a new data dir"),
    },
    "Examine a run": {
        "rerun": ("history", "train a run again, unchanged or with changes"),
        "blame": ("history", "find the rows that spoiled a step"),
        "fork": ("history", "save the state of a run after one of its steps"),
        "explain": ("history", "show the data and the checkpoints behind a checkpoint"),
        "receipt": ("history", "write a signed statement of a run's inputs and results"),
        "verify": ("history", "compare a run with its receipt, and execute it again"),
    },
    "Manage": {
        "key": ("key", "create, list and revoke API keys"),
        "limit": ("limit", "set limits of single projects"),
        "checkpoint": ("checkpoint", "list, verify, import, merge and share checkpoints"),
        "champion": ("champion", "list the best weights of pipelines, and roll one back"),
        "models": ("models", "create or download base models"),
    },
    "Parts, for several hosts": {
        "api": ("service", "run the API alone"),
        "engine": ("service", "run the engine alone"),
        "worker": ("service", "run worker processes for an engine on another host"),
        "track": ("service", "mirror training runs to trackers such as wandb or mlflow"),
    },
}
# The package itself is a client. These commands need no extra; PREFECT's need `pipelines`, and all others `server`.
CLIENT = {"data", "cassette", "rerun", "blame", "fork", "explain", "receipt", "verify"}
PREFECT = {"run", "serve"}
MODULES = {name: module for commands in OVERVIEW.values() for name, (module, _) in commands.items()}
# Every pipeline has an example that is named after it.
PIPELINES = sorted(path.stem for path in Path(__file__).with_name("examples").glob("*.yaml"))


def overview() -> str:
    """The top-level help."""
    lines = ["Usage: tinkerflow COMMAND [OPTIONS]", "", ABOUT]
    for group, commands in OVERVIEW.items():
        lines += ["", f"{group}:", *(f"  {name:12}{summary}" for name, (_, summary) in commands.items())]
    end = "`tinkerflow COMMAND --help` explains a command. `tinkerflow --version` prints the version."
    return "\n".join([*lines, "", end])
