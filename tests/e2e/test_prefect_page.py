"""A training run is a flow run, each batch one readable task run: asked from Prefect, and seen in a real browser."""

from __future__ import annotations

import shutil
import time

import httpx
import pytest
from tinker import types

CHROMIUM = shutil.which("chromium") or ""
DRIVER = shutil.which("chromedriver") or ""


def flow_run(server, model_id: str) -> dict:
    return httpx.post(
        f"{server.prefect_url}/api/flow_runs/filter", json={"flow_runs": {"name": {"any_": [model_id]}}}
    ).json()[0]


def task_runs(server, run: dict) -> list[str]:
    body = {"flow_runs": {"id": {"any_": [run["id"]]}}, "sort": "EXPECTED_START_TIME_ASC"}
    return [t["name"] for t in httpx.post(f"{server.prefect_url}/api/task_runs/filter", json=body).json()]


@pytest.fixture(scope="module")
def trained(server, make_datum) -> str:
    """Three steps at an unhurried pace; returns the model's id."""
    time.sleep(6)  # after a flood, task runs are shared for a while; a person's run begins in a calm
    service = server.client()
    client = service.create_lora_training_client(base_model=server.base_model, rank=4).result()
    for _ in range(3):
        client.forward_backward([make_datum([3, 1, 4, 1, 5, 9])], "cross_entropy").result()
        time.sleep(0.4)
        client.optim_step(types.AdamParams()).result()
        time.sleep(0.4)
    client.save_state(name="seen").result()
    return client.model_id


def test_one_readable_task_run_per_batch(server, trained):
    run = flow_run(server, trained)
    assert run["state_type"] == "RUNNING"
    assert trained in run["name"]
    deadline = time.monotonic() + 120
    while len(names := task_runs(server, run)) < 8 and time.monotonic() < deadline:
        time.sleep(0.5)
    operations = [name.rsplit("/", 1)[-1] for name in names]
    assert operations == ["create_model", *["forward_backward", "optim_step"] * 3, "save_weights"]
    assert len(set(names)) == 8
    assert all("step-00000" in name for name in names[1:])


@pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no chromium and chromedriver on this machine")
def test_the_page_of_the_run_shows_its_batches(server, trained, tmp_path):
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service
    from selenium.webdriver.common.by import By

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--window-size=1400,1000",
        f"--user-data-dir={tmp_path}",
    ):
        options.add_argument(flag)
    browser = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        browser.get(f"{server.prefect_url}/runs/flow-run/{flow_run(server, trained)['id']}")
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            text = browser.find_element(By.TAG_NAME, "body").text
            if "forward_backward" in text and "optim_step" in text:
                break
            for tab in browser.find_elements(By.ID, "task-runs"):
                tab.click()
            time.sleep(0.5)
        else:
            pytest.fail(f"the page never showed the batches; it says:\n{text}")
        assert trained in text
    finally:
        browser.quit()
