"""Tasks in Harbor's form, worked on with given answers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tests.tasks.pipelines.test_rollouts import Saying
from tests.tasks.pipelines.test_sandbox import kill_sandbox, needs_namespaces, new_mark

from tinkerflow.backend.core.errors import UserError
from tinkerflow.tasks.pipelines import Renderer, Row
from tinkerflow.tasks.pipelines.adapters import environment_maker, harbor
from tinkerflow.tasks.pipelines.data import read_source
from tinkerflow.tasks.pipelines.environments import MAY_IMPORT, EnvironmentUnavailableError, facts_of
from tinkerflow.tasks.pipelines.parameters import RlParameters
from tinkerflow.tasks.pipelines.rollouts import Episode, Lost, Rollouts
from tinkerflow.tasks.pipelines.sandbox import COMMAND, run_python

TASK = {
    "task.toml": """
schema_version = "1.4"
[task]
name = "tinkerflow/count-lines"
[verifier]
timeout_sec = 60
[verifier.env]
RIGHT = "3"
[environment]
memory_mb = 512
[environment.env]
GREETING = "Hello"
""",
    "instruction.md": "Write the number of lines of poem.txt to lines.txt.",
    "environment/Dockerfile": "FROM ubuntu:24.04\n# the poem\nWORKDIR /work\nCOPY poem.txt /work/\nCOPY . copies\n",
    "environment/poem.txt": "One\nTwo\nThree\n",
    "tests/test.sh": """#!/bin/bash
echo 7 > /tests/own.txt
if [ "$(cat /work/lines.txt)" = "$RIGHT" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
""",
}


def write_task(folder: Path, **changes: str) -> Path:
    """Write the task into a folder. changes: texts of files, with __ for / and _ for a dot."""
    named = {name.replace("__", "/").replace("_", "."): text for name, text in changes.items()}
    for name, text in {**TASK, **named}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def bash(command: str) -> str:
    """An answer that calls the tool."""
    return f"<tool_call>{json.dumps({'name': 'bash', 'arguments': {'command': command}})}</tool_call>"


def rows_of(folder: Path) -> list[Row]:
    source = {"url": f"harbor://{folder}"}
    parameters = RlParameters.model_validate({"data": source, "environment": f"harbor:{folder}"})
    return [row for _, row in read_source(parameters.data, parameters.use()).good]


async def worked(
    tokenizer: Any, renderer: Renderer, folder: Path, *answers: str, max_turns: int = 9, lost: list[Lost] | None = None
) -> tuple[Episode, list[str]]:
    """The conversation about the folder's first task with these answers, and its prompts."""
    sampler = Saying(tokenizer, *answers)
    maker = environment_maker("", f"harbor:{folder}")
    rollouts = Rollouts(renderer, maker, 1, 256, max_turns, environment_retries=0)
    ((episode,),) = await rollouts.groups(sampler, rows_of(folder)[:1], [1], lost)  # type: ignore[arg-type]
    return episode, sampler.asked


def contents(episode: Episode, role: str) -> list[str]:
    return [message["content"] for message in episode.messages if message["role"] == role]


@needs_namespaces
async def test_a_task_is_solved_in_a_terminal(tokenizer: Any, renderer: Renderer, tmp_path: Path) -> None:
    answers = (
        bash("cat poem.txt; ls copies; echo $GREETING $RIGHT"),
        f"Now I count. {bash('wc -l < poem.txt > lines.txt')}",
        "Done.",
    )
    episode, asked = await worked(tokenizer, renderer, write_task(tmp_path), *answers)
    assert (episode.reward, episode.ended, episode.parts) == (1.0, True, {})
    assert [message["role"] for message in episode.messages] == ["user", *["assistant", "tool"] * 2, "assistant"]
    assert contents(episode, "tool") == ["One\nTwo\nThree\npoem.txt\nHello\n", ""]
    assert [len(one.turns) for one in episode.trajectories()] == [3], "all turns are one sequence"
    assert "number of lines" in asked[0] and '"bash"' in asked[0]
    assert not Path("/work/lines.txt").exists() and not Path("/logs").exists()
    nothing, _ = await worked(tokenizer, renderer, tmp_path, "I give up.")
    assert nothing.reward == 0.0, "each conversation has files of its own"


@needs_namespaces
async def test_plain_commands_and_invalid_calls_are_handled(tokenizer: Any, renderer: Renderer, tmp_path: Path) -> None:
    wrong = bash("ls").replace('"bash"', '"python"'), bash("ls").replace('"command"', '"code"')
    fenced = "```bash\necho 3 > lines.txt\n```\nand\n```sh\nls /missing\n```"
    episode, _ = await worked(tokenizer, renderer, write_task(tmp_path), *wrong, fenced, "Done.")
    assert contents(episode, "tool") == [
        "tool 'python': must be bash",
        "arguments {'code': 'ls'}: must have the string `command`",
    ]
    shown = contents(episode, "user")[1]
    assert "No such file" in shown and shown.endswith("[exit status 2]") and episode.reward == 1.0


@needs_namespaces
async def test_outputs_are_truncated_and_time_is_limited(
    tokenizer: Any, renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harbor, "_SECONDS", 0.5)
    answers = bash("head -c 5000 /dev/zero | tr '\\0' x"), bash("sleep 1000")
    episode, _ = await worked(tokenizer, renderer, write_task(tmp_path), *answers, max_turns=2)
    long, late = contents(episode, "tool")
    assert "\n[1000 characters are left out]\n" in long and len(long) < 4100
    assert late == "\n[the command took too long]"
    assert (episode.reward, episode.ended) == (0.0, False), "the tests run where the conversation is cut off"


@needs_namespaces
@pytest.mark.parametrize(
    ("written", "reward", "parts"),
    [
        ("echo .25 > /logs/verifier/reward.txt", 0.25, {}),
        ("""echo '{"reward": 0.5, "style": 1}' > /logs/verifier/reward.json""", 0.5, {"style": 1.0}),
        ("""echo '{"accuracy": 0.75}' > /logs/verifier/reward.json""", 0.75, {"accuracy": 0.75}),
    ],
)
async def test_rewards_are_written_as_text_or_json(
    tokenizer: Any, renderer: Renderer, tmp_path: Path, written: str, reward: float, parts: dict[str, float]
) -> None:
    write_task(tmp_path, tests__test_sh=written)
    episode, _ = await worked(tokenizer, renderer, tmp_path, "Done.")
    assert (episode.reward, episode.parts) == (reward, parts)


@needs_namespaces
@pytest.mark.parametrize(
    ("written", "why"), [("echo no curl >&2; exit 1", "no curl"), ("echo nan > /logs/verifier/reward.txt", "nan")]
)
async def test_tests_without_a_reward_count_as_lost(
    tokenizer: Any, renderer: Renderer, tmp_path: Path, written: str, why: str
) -> None:
    write_task(tmp_path, tests__test_sh=written)
    lost = list[Lost]()
    cheat = bash("mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt")
    with pytest.raises(EnvironmentUnavailableError):
        await worked(tokenizer, renderer, tmp_path, cheat, "Done.", lost=lost)
    assert "the tests wrote" in lost[0].reason and why in lost[0].reason


@needs_namespaces
@pytest.mark.parametrize("broken", ["rm -rf /logs", "rm -rf /logs/verifier; echo > /logs/verifier"])
async def test_model_that_breaks_the_tests_earns_nothing(
    tokenizer: Any, renderer: Renderer, tmp_path: Path, broken: str
) -> None:
    episode, _ = await worked(tokenizer, renderer, write_task(tmp_path), bash(broken), "Done.")
    assert (episode.reward, episode.interrupted) == (0.0, "")


@needs_namespaces
async def test_files_that_the_model_left_among_the_tests_are_removed(
    tokenizer: Any, renderer: Renderer, tmp_path: Path
) -> None:
    write_task(tmp_path, tests__test_sh="ls -A /tests | wc -l > /logs/verifier/reward.txt")
    plants = bash("touch /tests/conftest.py /tests/.hidden"), bash("rmdir /tests; ln -s /work /tests")
    for plant in plants:
        episode, _ = await worked(tokenizer, renderer, tmp_path, plant, "Done.")
        assert episode.reward == 1.0, "only test.sh is there"


@needs_namespaces
async def test_killed_sandbox_counts_as_lost(tokenizer: Any, renderer: Renderer, tmp_path: Path) -> None:
    killing = asyncio.create_task(kill_sandbox(mark := new_mark()))
    lost = list[Lost]()
    with pytest.raises(EnvironmentUnavailableError):
        await worked(
            tokenizer,
            renderer,
            write_task(tmp_path),
            bash(f"python3 -c 'import time; time.sleep(60)' {mark}"),
            lost=lost,
        )
    await killing
    assert "the sandbox ended before its program" in lost[0].reason


def test_a_folder_has_many_tasks(tmp_path: Path) -> None:
    for name in ("second", "first"):
        write_task(tmp_path / name, instruction_md=name)
    assert [row.prompt[0]["content"] for row in rows_of(tmp_path)] == ["first", "second"]
    (only,) = rows_of(tmp_path / "second")
    assert only.tools[0]["function"]["name"] == "bash" and only.extra["harbor"] == str(tmp_path / "second")
    maker = environment_maker("", f"harbor:{tmp_path / 'first'}")
    with pytest.raises(UserError, match=rf"data\.url must be harbor://{tmp_path / 'first'}"):
        maker(facts_of(only))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task_toml": "[environment"}, r"Expected ']'"),
        ({"task_toml": '[[steps]]\nname = "one"'}, r"steps \[.*\]: tasks of several steps are not supported"),
        ({"task_toml": '[environment]\nos = "windows"'}, r"environment\.os 'windows': must be linux"),
        ({"task_toml": '[environment.env]\nKEY = "${KEY}"'}, r"\['\$\{KEY\}'\]: variables of the flow are not passed"),
        ({"task_toml": '[verifier]\nenvironment_mode = "separate"'}, r"environment_mode 'separate': must be shared"),
        ({"environment__docker-compose_yaml": "x"}, r"'docker-compose.yaml': several containers"),
        ({"environment__Dockerfile": "RUN apt-get install -y curl"}, r"'RUN apt-get install -y curl' needs the task's"),
        ({"environment__Dockerfile": "COPY ../../secret /app/"}, r"must not lead to"),
        ({"environment__Dockerfile": "COPY missing /app/"}, r"No such file"),
        ({"environment__Dockerfile": "WORKDIR /usr/src"}, r"WORKDIR '/usr/src': must not be a folder of the system"),
    ],
)
def test_unusable_task_is_named(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    (tmp_path.parent / "secret").write_text("secret")
    with pytest.raises(UserError, match=message) as error:
        rows_of(write_task(tmp_path, **changes))
    assert str(error.value).startswith(f"task {tmp_path}: ")


def test_an_image_has_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMMAND, "docker run --rm -i {image} python3")
    harbor.read_task.cache_clear()
    write_task(tmp_path / "Built", environment__Dockerfile="FROM x\nRUN make\nWORKDIR /usr/src\nWORKDIR game\nCOPY . .")
    write_task(tmp_path / "named", task_toml='[environment]\ndocker_image = "one/two:3"\nworkdir = "/there"')
    built, named = (harbor.read_task(tmp_path / name) for name in ("Built", "named"))
    assert (built.image, built.workdir, built.files) == ("built", "/usr/src/game", {})
    assert (named.image, named.workdir) == ("one/two:3", "/there")


async def test_image_placeholder_is_refused_for_plain_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMMAND, "docker run --rm -i {image} python3")
    with pytest.raises(UserError, match=r"\{image\} works only for tasks that name an image"):
        await run_python("")


def test_invalid_folders_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"must be harbor:///PATH, a folder of Harbor tasks; .* has none"):
        rows_of(tmp_path)
    with pytest.raises(UserError, match=r"data\.split 'eval': "):
        [*harbor.read_rows(f"harbor://{write_task(tmp_path)}", "eval")]
    monkeypatch.setenv(MAY_IMPORT, "harbor:/other")
    with pytest.raises(UserError, match="imports only the rewards and environments"):
        environment_maker("", f"harbor:{tmp_path}")
