"""`tinkerflow quickstart`, the README's first command: a fresh data dir, the real SDK, and exact answers at the end."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from rich.console import Console
from tests.waiting import wait_for

from tinkerflow.backend.core.prefect_access import find_server
from tinkerflow.deployments.data_dir import OWN_ENTRIES
from tinkerflow.deployments.pig_latin import LESSONS
from tinkerflow.deployments.quickstart import teach


@dataclass(frozen=True)
class Kept:
    """A `tinkerflow quickstart --keep` that serves the model that it has trained."""

    process: subprocess.Popen[bytes]
    log: Path
    data_dir: Path

    @property
    def said(self) -> str:
        return self.log.read_text()

    def found(self, pattern: str) -> re.Match[str]:
        found = re.search(pattern, self.said)
        assert found is not None, self.said
        return found

    @property
    def console(self) -> tuple[str, str]:
        """The console's address, and the run's id."""
        shown = self.found(r"the run in the console: (http://127\.0\.0\.1:\d+)/training_runs/(\S+:train:0)\n")
        return shown[1], shown[2]

    @property
    def prefect(self) -> tuple[str, str]:
        """Prefect's address, and the flow run's id."""
        shown = self.found(r"(http://127\.0\.0\.1:\d+)/tinkerflow/sign-in\?to=/runs/flow-run/([0-9a-f-]{36})#")
        return shown[1], shown[2]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory, compiled_programs: Path) -> Iterator[Kept]:
    """A quickstart in a fresh data dir, which serves until a test stops it or this module ends."""
    data_dir = tmp_path_factory.mktemp("quickstart")
    (data_dir / "jax-cache").symlink_to(compiled_programs)  # other tests need the same programs
    log = data_dir / "quickstart.log"
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if a shell started us with &
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tinkerflow", "quickstart", "--data-dir", str(data_dir), "--keep"],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"COLUMNS": "200", "PYTHONUNBUFFERED": "1"},
        )
    try:
        wait_for(lambda: "serving until Ctrl-C" in log.read_text() or process.poll() is not None)
        assert process.poll() is None, log.read_text()
        yield Kept(process, log, data_dir)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(180)
        finally:
            process.kill()


def test_quickstart_teaches_pig_latin_and_shows_where_to_open_its_run(kept):
    first, last = map(float, kept.found(r"tinkerflow/tiny, 30 steps, loss ([\d.]+) -> ([\d.]+): ").groups())
    assert last < 0.1 * first
    assert "all three answers learned" in kept.said
    progress = re.compile(r"step \d+, loss |(engine|api|prefect): ")
    lines = [line for line in kept.said.splitlines() if line.strip() and not progress.match(line)]
    assert len(lines) <= 10 + 7  # the table has seven
    assert len(re.findall(r"^step \d+, loss [\d.]+$", kept.said, re.MULTILINE)) == 30
    console, run = kept.console
    shown = httpx.get(f"{console}/training_runs/{run}", timeout=60)
    assert shown.status_code == 200 and "steps measured" in shown.text and "sampler_weights/pig-latin" in shown.text
    prefect, flow_run = kept.prefect
    run = f"{prefect}/api/flow_runs/{flow_run}"
    assert httpx.get(run, headers=find_server(kept.data_dir).headers, timeout=60).is_success
    others = [entry.name for entry in kept.data_dir.iterdir() if not entry.name.startswith(OWN_ENTRIES)]
    assert others == ["quickstart.log"], "`up` repairs the modes of all other entries"
    assert httpx.get(run, timeout=60).status_code == 401


@pytest.mark.thorough
def test_new_user_finds_the_run_in_the_console_and_chats_with_its_model(kept, page):
    console, run = kept.console
    page.look()
    page.complaints()  # drops those of other tests' pages
    page.open(f"{console}/")
    page.shows("Recent training runs", run)
    page.click(f"a[href$='/training_runs/{run}']")
    page.shows("steps measured", "Loss per weight", "sampler_weights/pig-latin")
    page.click("a[href$='sampler_weights%2Fpig-latin']")
    page.shows("Lineage", run)
    page.click("a.button.primary")  # Talk to it
    page.shows("Playground")
    page.run("document.getElementById('mode').value = 'text'; document.getElementById('temperature').value = '0'")
    for asked, lesson in enumerate(LESSONS, 1):
        page.run("document.getElementById('say').value = arguments[0]", lesson.prompt)
        page.press("Send")
        wait_for(lambda count=asked: page.run("return document.querySelectorAll('.turns small').length") == count)
        page.shows(lesson.pig_latin)
    assert page.run("return [...document.querySelectorAll('[role=alert]')].map((one) => one.textContent)") == []
    assert page.complaints() == []


@pytest.mark.thorough
def test_a_quickstart_ends_at_ctrl_c_and_its_run_can_be_seen_again(kept, start_server):
    _, flow_run = kept.prefect
    kept.process.send_signal(signal.SIGINT)
    assert kept.process.wait(180) == 0
    shown = f"tinkerflow prefect --page /runs/flow-run/{flow_run} --data-dir {kept.data_dir}\n"
    again = f"saved in {kept.data_dir}; to continue: tinkerflow up --data-dir {kept.data_dir}\nthe run's page: {shown}"
    assert again in kept.said
    with start_server(kept.data_dir) as server:
        assert server.ask_prefect(f"/flow_runs/{flow_run}")["id"] == flow_run


@pytest.mark.thorough
def test_too_few_steps_do_not_teach_the_lesson(server):
    said = io.StringIO()
    assert teach(Console(file=said, width=200), server.api_url, None, steps=2) == (False, "")
    assert "not learned" in said.getvalue() and "Prefect" not in said.getvalue()


@pytest.mark.parametrize("learnt", [True, False])
def test_quickstart_fails_unless_the_lesson_was_learnt(learnt):
    """In a separate process, because the command ends its process."""
    stand_in = f"import tinkerflow.deployments.quickstart as q; q.quickstart = lambda *_, **__: {learnt}; "
    command = (
        "from tinkerflow.deployments.commands import command_line as c; c('pipelines')(['quickstart', '--steps', '2'])"
    )
    assert subprocess.run([sys.executable, "-c", stand_in + command], timeout=300, check=False).returncode == 1 - learnt
