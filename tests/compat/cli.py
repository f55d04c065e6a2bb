"""The SDK's command line as users run it: a process of its own, told by its environment where our server is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.compat.registry import commands


@dataclass
class Cli:
    """Runs `tinker ...` against one server; `home` holds its credentials. `ran` is which commands have been run."""

    url: str
    home: Path
    key: str = "tml-test"
    ran: set[str] = field(default_factory=set)

    def __call__(self, *words: str, fails: bool = False, stdin: str | None = None) -> str:
        """What the command prints; it must exit with 0, or not with 0 when it `fails`."""
        ended = subprocess.run(
            [sys.executable, "-m", "tinker.cli", *words],
            env=self._environment(),
            cwd=self.home,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        said = ended.stdout + ended.stderr
        assert (ended.returncode != 0) is fails, f"tinker {' '.join(words)} exited with {ended.returncode}: {said}"
        self.ran.update(name for name in commands() if _is_run_by(name, words))
        return said

    def json(self, *words: str) -> Any:
        """What the command prints as JSON."""
        said = self("-f", "json", *words)
        return json.loads(said[said.index("{") : said.rindex("}") + 1])

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TINKER_")}
        ours = {"TINKER_BASE_URL": self.url, "TINKER_TELEMETRY": "0", "HOME": str(self.home), "COLUMNS": "300"}
        return kept | ours | ({"TINKER_API_KEY": self.key} if self.key else {})


def _is_run_by(name: str, words: tuple[str, ...]) -> bool:
    said = [word for word in words if word not in {"-f", "json"}]
    wanted = name.split()[1:]
    return said[: len(wanted)] == wanted


MakeCli = Callable[..., Cli]
