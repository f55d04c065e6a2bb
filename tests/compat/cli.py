"""The SDK's command line against our server, configured by environment variables as users configure it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from click.testing import CliRunner
from tests.compat.registry import commands
from tinker.cli.__main__ import main

# Skips interpreter shutdown: the SDK's event loop runs in a daemon thread. Before Python 3.14, a daemon thread that
# wakes during shutdown may abort the process (SIGABRT), although the command has succeeded.
_MAIN = """
import os, sys
from tinker.cli.__main__ import main
try:
    main()
except SystemExit as end:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(end.code or 0)
"""


@dataclass
class Cli:
    """Runs `tinker ...` against one server. home: holds the credentials. ran: the commands that have run.

    Commands run in this process, by the function that the `tinker` script calls, because a new process needs five
    CPU-seconds to import the SDK. own_process: runs each command in a new process nevertheless.
    """

    url: str
    home: Path
    key: str = "tml-test"
    own_process: bool = False
    more: dict[str, str] = field(default_factory=dict)  # further environment variables
    ran: set[str] = field(default_factory=set)

    def __call__(self, *words: str, fails: bool = False, stdin: str | None = None) -> str:
        """Run a command and return its output. It must exit with 0 unless `fails`."""
        code, said = self._in_a_process(words) if self.own_process else self._here(words, stdin)
        assert (code != 0) is fails, f"tinker {' '.join(words)} exited with {code}: {said}"
        self.ran.update(name for name in commands() if _is_run_by(name, words))
        return said

    def json(self, *words: str) -> Any:
        """Run a command and return its JSON output."""
        said = self("-f", "json", *words)
        return json.loads(said[said.index("{") : said.rindex("}") + 1])

    def _here(self, words: tuple[str, ...], stdin: str | None) -> tuple[int, str]:
        runner = CliRunner()
        with self._surroundings(), patch.object(sys, "argv", ["tinker", *words]), runner.isolation(stdin) as streams:
            try:
                main()
                code = 0
            except SystemExit as end:
                code = int(end.code or 0)
            sys.stdout.flush()
            sys.stderr.flush()
            return code, streams[0].getvalue().decode() + streams[1].getvalue().decode()

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        with patch.dict(os.environ, self._environment(), clear=True), chdir(self.home):
            yield

    def _in_a_process(self, words: tuple[str, ...]) -> tuple[int, str]:
        ended = subprocess.run(
            [sys.executable, "-c", _MAIN, *words],
            env=self._environment(),
            cwd=self.home,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        return ended.returncode, ended.stdout + ended.stderr

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TINKER_")}
        ours = {"TINKER_BASE_URL": self.url, "TINKER_TELEMETRY": "0", "HOME": str(self.home), "COLUMNS": "300"}
        return kept | ours | ({"TINKER_API_KEY": self.key} if self.key else {}) | self.more


def _is_run_by(name: str, words: tuple[str, ...]) -> bool:
    said = [word for word in words if word not in {"-f", "json"}]
    wanted = name.split()[1:]
    return said[: len(wanted)] == wanted
