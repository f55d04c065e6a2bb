"""Follow the fenced blocks of a tutorial in order, as its reader does.

- A block whose first line is a comment with a file's name is saved to that file.
- `bash` is executed. Exported variables persist. A command with the comment `# fails` must fail.
- `text` is compared with the output of the previous command, which must contain its lines in this order. Numbers and
  ids may differ, and `…` matches any text.
- A `bash` block after a paragraph that begins with “On your machine” is skipped.

In commands and files, `tinker://…` stands for the newest path of sampler weights that a command has printed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.docs.pages import DOCS, ROOT, without_code_blocks

TUTORIALS = DOCS / "tutorials"
ADDRESS = "http://127.0.0.1:8000"  # address of the reader's service
NUMBER = r"-?\d[\d.e-]*"
CRASHED = (134, 139)  # the statuses that bash reports for SIGABRT and SIGSEGV
END = "--- the end of a block, with status"


@dataclass(frozen=True)
class Block:
    """A fenced block of a page. kind: its language. aside: whether the test skips it. name: its file's name, or ""."""

    kind: str
    text: str
    name: str
    aside: bool


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text()
    found = list(re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S))
    assert not re.search(r"^ {4}\S", without_code_blocks(text), re.M), f"{page.name}: indented code is not executed"
    for block in found:
        named = re.match(r"# ([\w-]+\.\w+)\n", block[2])
        before = text[: block.start()].rstrip().rsplit("\n\n", 1)[-1]
        yield Block(block[1], block[2], named[1] if named else "", before.startswith("On your machine"))


class Reader:
    """A person at a terminal in `folder`. `tinkerflow up` has started a service at `address`."""

    def __init__(self, folder: Path, address: str, data_dir: Path) -> None:
        """data_dir: the service's data dir."""
        self._folder, self._address, self._data_dir = folder, address, data_dir
        self.said = ""  # output of the last command
        self._weights = ""

    def __enter__(self) -> Self:
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        mine = {"PATH": path, "TINKERFLOW_DATA_DIR": str(self._data_dir), "COLUMNS": "200", "CLONE": str(ROOT)}
        self._bash = subprocess.Popen(
            ["bash"], cwd=self._folder, env=os.environ | mine, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bash.communicate("kill $(jobs -p) 2>/dev/null; wait\n", 180)

    def follow(self, page: str) -> Iterator[Block]:
        """Follow each block of a page, and yield it."""
        for block in blocks(TUTORIALS / page):
            if block.name:
                save = f"cat > {block.name} <<'--END--'\n{self._mine(block.text)}--END--"
                assert self._execute(save) == 0
            elif block.kind == "text":
                self._compare(block.text)
            elif not block.aside:
                assert block.kind == "bash", f"{page}: no comment names the file: {block.text}"
                self._type(self._mine(block.text))
            yield block

    def _mine(self, text: str) -> str:
        return text.replace(ADDRESS, self._address).replace("tinker://…", self._weights)

    def _type(self, command: str) -> None:
        if command == "tinkerflow up\n":
            self.said = (self._data_dir / "up.log").read_text()
        elif command.startswith("tinkerflow serve"):
            served = "until grep '^serving' serve.log || ! jobs %% >/dev/null; do sleep 0.2; done; cat serve.log"
            self._execute(f"{command.strip()} > serve.log 2>&1 &\n{served}")
        else:
            status = self._execute(command)
            client = {"tinker", "python"} & set(command.splitlines()[-1].split())
            if client and status in CRASHED and "Traceback" not in self.said:
                status = 0  # threads of the SDK may crash the interpreter at its shutdown, after all of its output
            assert (status != 0) is ("# fails" in command), f"{command}ended with {status}:\n{self.said}"
        self._weights = [self._weights, *re.findall(r"tinker://\S+/sampler_weights/[\w.-]+", self.said)][-1]

    def _execute(self, command: str) -> int:
        """Execute a command, store its output in `said`, and return its exit status."""
        assert self._bash.stdin and self._bash.stdout
        self._bash.stdin.write(f"{{\n{command}\n}} </dev/null\nprintf '\\n%s %s\\n' '{END}' $?\n")
        self._bash.stdin.flush()
        lines = []
        for line in self._bash.stdout:
            if line.startswith(END):
                self.said = "".join(lines)
                return int(line.removeprefix(END))
            lines.append(line)
        raise AssertionError("".join(lines))

    def _compare(self, shown: str) -> None:
        """Fail unless the last command printed the lines of `shown`, in this order."""
        rest = self.said
        for line in shown.splitlines():
            found = re.search(_pattern(line), rest)
            assert found, f"not printed: {line}\n{self.said}"
            rest = rest[found.end() :]


def _pattern(line: str) -> str:
    """A pattern that ignores differences in numbers, session ids and spaces, and whose `…` matches any text."""
    parts = re.split(rf"(…|sess-\w+|{NUMBER}|\s+)", line.strip())
    wild = {"…": ".*", "s": r"sess-\w+", " ": r"\s+"}
    return "".join(
        re.escape(part) if i % 2 == 0 else wild.get(part[0], r"\s+" if part.isspace() else NUMBER)
        for i, part in enumerate(parts)
    )
