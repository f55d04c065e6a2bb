"""Tasks of Harbor (https://www.harborframework.com): work in a terminal that a program checks at the end.

    data: {url: "harbor:///data/tasks"}
    environment: harbor:/data/tasks

The folder is a task, or each of its subfolders is a task: `task.toml`, `instruction.md`, `environment/Dockerfile` and
`tests/test.sh`. Each conversation gets its own sandbox. The model calls the tool `bash`, and sees the output. Its first
answer without a command ends the conversation. Then the tests replace /tests and are executed. They write the reward
to /logs/verifier/reward.txt, or to reward.json with the reward's parts.

If PIPELINES_SANDBOX contains {image}, sandboxes are made from the task's image. All other sandboxes contain the
machine's own programs, so a Dockerfile may only copy files.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from types import MappingProxyType

from tinkerflow.backend.core.errors import UserError
from tinkerflow.tasks.pipelines.environments import (
    EnvironmentMaker,
    EnvironmentUnavailableError,
    Facts,
    Reply,
    called_tools,
    checked_reward,
    refuse_code,
)
from tinkerflow.tasks.pipelines.rows import Json, Message
from tinkerflow.tasks.pipelines.sandbox import COMMAND, IMAGE, Ran, Sandbox

_SCHEME = "harbor://"
_ENTRY = "harbor"  # the field of a row that contains its task's folder
_FENCED = re.compile(r"```(?:bash|sh)\n(.*?)```", re.DOTALL)
_SECONDS = 60.0  # seconds of CPU time for each process of a command
_SHOWN = 4_000  # characters of an output
_REWARD = "/logs/verifier/reward"
_SYSTEM = {"bin", "dev", "etc", "lib", "lib32", "lib64", "libx32", "proc", "sbin", "sys", "tmp", "usr"}
_BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Execute commands in the terminal. Files stay, running programs do not.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


@dataclass(frozen=True)
class Task:
    """A task. instruction: for the model. workdir: where its commands run. files: the sandbox's, by absolute path.
    tests: the files in /tests. variables: for all commands. test_variables: for the tests only. test_seconds: CPU time
    of the tests.
    """

    name: str
    instruction: str
    image: str
    workdir: str
    files: Mapping[str, bytes]
    tests: Mapping[str, bytes]
    variables: Mapping[str, str]
    test_variables: Mapping[str, str]
    test_seconds: float
    megabytes: int


def read_rows(url: str, split: str) -> Iterator[Json]:
    """The tasks below a folder, by name. UserError: there are no tasks, or one of them cannot be used."""
    if split:
        raise UserError(f"data.split {split!r}: {url} has no splits; name another folder of tasks")
    folder = Path(url.removeprefix(_SCHEME))
    refuse_code("data.url", f"harbor:{folder}")
    tasks = [folder] if (folder / "task.toml").is_file() else sorted(path.parent for path in folder.glob("*/task.toml"))
    if not folder.is_absolute() or not tasks:
        raise UserError(f"data.url {url!r}: must be {_SCHEME}/PATH, a folder of Harbor tasks; {folder} has none")
    for task in tasks:
        yield {"prompt": read_task(task).instruction, "tools": [_BASH], _ENTRY: str(task)}


def environment_maker(name: str) -> EnvironmentMaker:
    """Conversations about the tasks of the folder `name`. UserError: a row does not come from this folder."""
    refuse_code("environment", f"harbor:{name}")

    def make(facts: Facts) -> _Terminal:
        task = Path(facts.get(_ENTRY, ""))
        if Path(name) not in (task, task.parent):
            raise UserError(f"environment 'harbor:{name}': data.url must be {_SCHEME}{name}")
        return _Terminal(read_task(task), facts)

    return make


class _NoRewardError(EnvironmentUnavailableError):
    """The tests wrote no reward, although the sandbox works."""


class _Terminal:
    """A conversation with a model that works in a sandbox."""

    def __init__(self, task: Task, facts: Facts) -> None:
        self._task, self._facts = task, facts
        self._open = AsyncExitStack()

    async def begin(self) -> Sequence[Message]:
        await self._start()
        return tuple(self._facts["prompt"])

    async def answered(self, text: str) -> Reply:
        calls, role = called_tools(text)[1], "tool"
        if not calls:
            calls, role = [_call(command) for command in _FENCED.findall(text)], "user"
        if not calls:
            return await self.stopped()
        outputs = [await self._output(call) for call in calls]
        if role == "user":  # many chat templates refuse two messages of a user
            outputs = ["\n\n".join(outputs)]
        return Reply(0.0, [Message(role=role, content=output) for output in outputs])

    async def stopped(self) -> Reply:
        """Execute the tests, and return their reward.

        The model may have changed the sandbox so that the tests write no reward. If they write a reward in a new
        sandbox, it counts as at most 0. EnvironmentUnavailableError: the tests write no reward there either, they take
        too long, or the sandbox failed.
        """
        try:
            return await self._tested()
        except _NoRewardError:
            await self.close()
            await self._start()
            return Reply(min(0.0, (await self._tested()).reward))

    async def _start(self) -> None:
        """Start a sandbox with the task's files."""
        task = self._task
        folders = [task.workdir, "/tests", "/logs/verifier", "/logs/agent"]
        self._sandbox = await self._open.enter_async_context(Sandbox(task.megabytes, folders, task.image))
        ran = await self._execute("true", task.files)
        if ran.status:
            raise EnvironmentUnavailableError(f"task {task.name}: its files cannot be written: {ran.errors}")

    async def _tested(self) -> Reply:
        """The reward that the tests write. _NoRewardError: they wrote no reward."""
        task, log = self._task, "/logs/verifier/test-stdout.txt"
        cleared = await self._execute("rm -rf /tests")  # the model may have left a conftest.py there
        if cleared.status:
            raise _NoRewardError(f"task {task.name}: /tests cannot be cleared: {cleared.errors}")
        command = f"mkdir -p /logs/verifier; rm -f {_REWARD}.*; bash /tests/test.sh > {log} 2>&1; "
        command += f"tail -c 300 {log} >&2; cat {_REWARD}.json 2> /dev/null || cat {_REWARD}.txt"
        ran = await self._execute(command, task.tests, task.test_seconds, task.test_variables)
        try:
            return _reply(ran.output)
        except (ValueError, KeyError, UserError) as error:
            wrote = f"task {task.name}: the tests wrote {ran.output[:300]!r} as the reward"
            if ran.timed_out:
                raise EnvironmentUnavailableError(f"{wrote}: after the time limit: {ran.errors}") from error
            raise _NoRewardError(f"{wrote}: {ran.errors}") from error

    async def close(self) -> None:
        """End the sandbox."""
        await self._open.aclose()

    async def _output(self, call: Json) -> str:
        """Execute a call of the model. Returns the output as the model sees it."""
        if call["name"] != "bash":
            return f"tool {call['name']!r}: must be bash"
        command = call["arguments"].get("command") if isinstance(call["arguments"], dict) else None
        if not isinstance(command, str):
            return f"arguments {call['arguments']!r}: must have the string `command`"
        ran = await self._execute(command)
        text = ran.output + ran.errors
        if len(text) > _SHOWN:
            left_out = f"\n[{len(text) - _SHOWN} characters are left out]\n"
            text = text[: _SHOWN // 2] + left_out + text[-_SHOWN // 2 :]
        if ran.timed_out:
            return f"{text}\n[the command took too long]"
        return f"{text}\n[exit status {ran.status}]" if ran.status else text

    async def _execute(
        self,
        command: str,
        files: Mapping[str, bytes] = MappingProxyType({}),
        seconds: float = 0.0,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> Ran:
        task, shell = self._task, ["bash", "-c", command]
        return await self._sandbox.execute(
            shell, files, seconds or _SECONDS, folder=task.workdir, variables={**task.variables, **variables}
        )


def _call(command: str) -> Json:
    return {"name": "bash", "arguments": {"command": command}}


def _reply(written: str) -> Reply:
    """The reward in reward.txt or reward.json. ValueError, KeyError or UserError: it contains no reward."""
    with suppress(ValueError):
        return Reply(checked_reward(float(written)))
    parts = dict(json.loads(written))
    reward = next(iter(parts.values())) if len(parts) == 1 else parts.pop("reward")
    return Reply(checked_reward(reward), (), {name: checked_reward(part) for name, part in parts.items()})


@lru_cache(1024)
def read_task(folder: Path) -> Task:
    """The task in a folder. UserError: the folder is not a valid task, or needs an unsupported feature."""
    try:
        config = tomllib.loads((folder / "task.toml").read_text())
        instruction = (folder / "instruction.md").read_text()
        tests = _files(folder / "tests", ".", PurePosixPath("/tests"))
        files, workdir = _built(folder / "environment")
    except (OSError, ValueError) as error:
        raise UserError(f"task {folder}: {error}") from error
    place, verifier = config.get("environment", {}), config.get("verifier", {})
    variables, test_variables = place.get("env", {}), verifier.get("env", {})
    compose = (folder / "environment" / "docker-compose.yaml").exists()
    from_outside = [value for value in [*variables.values(), *test_variables.values()] if value.startswith("${")]
    for field, value, rule in (
        ("steps", config.get("steps"), "tasks of several steps are not supported"),
        ("environment.os", place.get("os", "linux").replace("linux", ""), "must be linux"),
        ("environment.mcp_servers", place.get("mcp_servers"), "tool servers are not supported"),
        ("environment", compose and "docker-compose.yaml", "several containers are not supported"),
        ("environment.env, verifier.env", from_outside, "variables of the flow are not passed to a sandbox"),
        ("verifier.environment_mode", verifier.get("environment_mode", "").replace("shared", ""), "must be shared"),
        ("tests", "" if "/tests/test.sh" in tests else str([*tests]), "must have test.sh"),
    ):
        if value:
            raise UserError(f"task {folder}: {field} {value!r}: {rule}")
    return Task(
        name=folder.name,
        instruction=instruction,
        image=place.get("docker_image") or folder.name.lower(),
        workdir=place.get("workdir") or workdir,
        files=files,
        tests=tests,
        variables=variables,
        test_variables=test_variables,
        test_seconds=float(verifier.get("timeout_sec", 600)),
        megabytes=int(place.get("memory_mb") or 2048),
    )


def _built(context: Path) -> tuple[dict[str, bytes], str]:
    """The files that a Dockerfile copies, unless an image contains them, and its last WORKDIR.

    ValueError: the Dockerfile needs more, or its WORKDIR is a folder of the system.
    """
    dockerfile = context / "Dockerfile"
    lines = dockerfile.read_text().replace("\\\n", " ").splitlines() if dockerfile.exists() else []
    has_image = IMAGE in os.environ.get(COMMAND, "")
    files: dict[str, bytes] = {}
    workdir = PurePosixPath("/app")
    for line in lines:
        match shlex.split(line, comments=True):
            case [] | ["FROM", *_]:
                pass
            case ["WORKDIR", path]:
                workdir /= path
            case _ if has_image:
                pass
            case ["COPY", source, target] if not source.startswith("--"):
                inside = target.endswith(("/", ".")) or workdir / target == workdir
                files |= _files(context, source, workdir / target, inside=inside)
            case _:
                rule = f"needs the task's image: build it, and set {COMMAND} to a command with {IMAGE}"
                raise ValueError(f"Dockerfile: {line.strip()[:80]!r} {rule}")
    if not has_image and workdir.parts[1] in _SYSTEM:
        raise ValueError(f"Dockerfile: WORKDIR {str(workdir)!r}: must not be a folder of the system")
    return files, str(workdir)


def _files(root: Path, name: str, target: PurePosixPath, *, inside: bool = True) -> dict[str, bytes]:
    """A file, or all files of a folder, by their paths in the sandbox.

    inside: `target` is the folder of a file, else its path. OSError: no such file. ValueError: a path leaves `root`.
    """
    source = root / name
    found = {target / source.name if inside else target: source}
    if source.is_dir():
        paths = [path for path in sorted(source.rglob("*")) if path.is_file() and path.name != "Dockerfile"]
        found = {target / path.relative_to(source).as_posix(): path for path in paths}
    for path in found.values():
        if not path.resolve().is_relative_to(root.resolve()):
            raise ValueError(f"{path}: must not lead to {path.resolve()}")
    return {str(name): path.read_bytes() for name, path in found.items()}
