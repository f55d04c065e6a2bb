"""The tutorials, followed as a reader does: each file is saved, each command executed, and each output compared."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from approving import answer
from reader import TUTORIALS, Reader
from tests.waiting import wait_for

PLAIN = ("publish-and-call.md", "move-to-your-own-service.md", "debug-a-run.md", "from-a-laptop-to-a-gpu-box.md")


@pytest.fixture(scope="module")
def reader(server, tmp_path_factory) -> Iterator[Reader]:
    """One reader for all pages, because pages use files of earlier pages."""
    with Reader(tmp_path_factory.mktemp("reader"), server.api_url, server.data_dir) as reader:
        yield reader


def test_every_tutorial_has_a_test() -> None:
    assert {path.name for path in Path(TUTORIALS).glob("*")} == set(
        re.findall(r'"([\w-]+\.md)"', Path(__file__).read_text())
    )


def test_a_first_fine_tune_and_one_on_own_data(reader) -> None:
    for page in ("first-fine-tune.md", "your-own-data.md"):
        for _ in reader.follow(page):
            pass


def test_the_row_that_broke_a_run_is_found(reader) -> None:
    for _ in reader.follow("which-batch-broke-my-run.md"):
        pass


def test_auditor_sees_the_data_of_a_checkpoint(reader) -> None:
    for _ in reader.follow("which-data-is-in-this-checkpoint.md"):
        pass


def test_custom_reward_rises(reader) -> None:
    rises = []
    for block in reader.follow("rl-with-your-own-reward.md"):
        if block.text.startswith("tinkerflow run rl"):
            first, last = (
                float(re.search(rf"{name} tenth +reward ([\d.]+)", reader.said)[1]) for name in ("first", "last")
            )
            rises.append((first, last))
    assert len(rises) == 2
    assert all(last > 4 * first for first, last in rises), rises


def test_nightly_run_waits_for_approval_and_promotes(reader, pipelines) -> None:
    mine = {"flow_runs": {"name": {"any_": ["nightly plants"]}}}
    for block in reader.follow("nightly-with-approval.md"):
        if block.text.startswith("tinkerflow prefect --page"):  # the reader opens it, and presses Resume
            question = asyncio.run(answer("plants", approve=True, reason="short answers"))
            assert "Promote to champion `plants`: loss" in question
            wait_for(lambda: pipelines.server.ask_prefect("/flow_runs/filter", mine)[0]["state_type"] == "COMPLETED")


def test_a_loop_is_tested_without_a_model(reader) -> None:
    for _ in reader.follow("test-without-a-model.md"):
        pass


@pytest.mark.parametrize("page", PLAIN)
def test_model_is_served_moved_and_repaired(reader, page) -> None:
    for _ in reader.follow(page):
        pass


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl")
def test_manifests_are_rendered(reader) -> None:
    for _ in reader.follow("production-on-kubernetes.md"):
        pass
