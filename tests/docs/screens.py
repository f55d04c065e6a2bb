"""The pictures of docs/console.md: `python -m tests.docs.screens` starts a service, trains a model and takes them.

It needs chromium and chromedriver, and a minute or two. The pictures show a live service, so they differ every time.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from urllib.parse import quote

import tinker
from rich.console import Console
from tests.e2e.browser import Page, open_page

from tinkerflow.backend.core.ids import EMBEDDED
from tinkerflow.deployments.local import API_KEY, running_stack
from tinkerflow.deployments.pig_latin import LESSONS
from tinkerflow.deployments.quickstart import teach
from tinkerflow.deployments.run import dim_lines

IMAGES = Path(__file__).parents[2] / "docs" / "images"
PROMPT = LESSONS[0].prompt


def main() -> None:
    console = Console(emoji=False)
    with (
        tempfile.TemporaryDirectory() as folder,
        running_stack(Path(folder) / "data", dim_lines(console), warm_up=False) as stack,
    ):
        for steps in (20, 40):
            teach(console, stack.api_url, None, steps)
        rest = tinker.RestClient(base_url=stack.api_url, api_key=API_KEY)
        runs = [run.training_run_id for run in rest.list_training_runs(limit=2).result().training_runs]
        checkpoint = f"tinker://{runs[0]}/sampler_weights/pig-latin"
        with open_page(Path(folder) / "browser") as page:
            shoot(page, "run", f"{stack.api_url}/training_runs/{runs[0]}")
            shoot(page, "runs", f"{stack.api_url}/training_runs")
            shoot(page, "compare", f"{stack.api_url}/compare?run={runs[0]}&run={runs[1]}", dark=True)
            path = f"/checkpoints/{quote(runs[0], safe='')}/{quote('sampler_weights/pig-latin', safe='')}"
            shoot(page, "checkpoint", stack.api_url + path)
            shoot(page, "pool", f"{stack.api_url}/pool")
            base = quote(EMBEDDED, safe="")
            talk(page, f"{stack.api_url}/playground?checkpoint={quote(checkpoint, safe='')}&other={base}")


def shoot(page: Page, name: str, url: str, *, dark: bool = False) -> None:
    """Save a picture of the upper part of a page."""
    page.look(width=1200, height=820, dark=dark)
    page.open(url)
    page.save(IMAGES / f"console-{name}.png")


def talk(page: Page, url: str) -> None:
    """Save a picture of two answers in the playground."""
    page.look(width=1200, height=820)
    page.open(url)
    page.run("document.getElementById('mode').value = 'text'")
    page.fill("#max_tokens", "10")
    page.fill("#temperature", "0")
    page.run("document.getElementById('say').value = arguments[0]", PROMPT)  # a typed newline would send it
    page.press("Send")
    while page.run("return document.querySelectorAll('.turns small').length") < 2:
        time.sleep(0.2)
    page.point_at(".turn.model span")
    page.save(IMAGES / "console-playground.png")


if __name__ == "__main__":
    main()
