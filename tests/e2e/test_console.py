"""The console of the whole service in a real browser: a run during training, and a chat with its weights."""

from __future__ import annotations

import threading
import time
import urllib.parse

import httpx
import pytest
import tinker.lib.console_urls
from tests.waiting import wait_for
from tinker import types

from tinkerflow.backend.core.ids import EMBEDDED

pytestmark = pytest.mark.thorough

STEPS = "return Number((document.body.innerText.match(/(\\d+) steps? measured/) || [0, 0])[1])"
LINE = "return document.querySelector('path.line-0')?.getAttribute('d') || ''"


def test_the_curve_of_a_run_moves_while_it_trains_and_its_weights_answer(server, make_datum, page, monkeypatch):
    monkeypatch.setattr(tinker.lib.console_urls, "_CONSOLE_BASE_URL", server.api_url)
    page.look()
    with server.client() as service:
        client = service.create_lora_training_client(base_model=server.base_model, rank=4).result()
        assert client.get_console_url() == f"{server.api_url}/training_runs/{client.model_id}"
        page.open(client.get_console_url())
        page.shows("No steps yet", "live")
        stop = threading.Event()

        def train() -> None:
            while not stop.is_set():
                client.forward_backward([make_datum([3, 1, 4, 1, 5, 9])], "cross_entropy").result()
                client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
                time.sleep(0.2)

        training = threading.Thread(target=train)
        training.start()
        try:
            wait_for(lambda: page.run(STEPS) >= 2)
            before, steps = page.run(LINE), page.run(STEPS)
            wait_for(lambda: page.run(STEPS) > steps)
            assert page.run(LINE) != before != ""
        finally:
            stop.set()
            training.join()
        saved = client.save_weights_for_sampler("seen").result()
        page.open(saved.get_console_url())
        page.shows("Lineage", client.model_id, "sampler_weights/seen")
        page.open(service.get_console_url())
        page.shows(client.model_id)

    curve = httpx.get(f"{server.api_url}/training_runs/{client.model_id}").text
    for title in ("Loss per weight", "Gradient norm", "Learning rate", "Tokens per second"):
        assert f"<figcaption>{title}" in curve
    talk(page, server, saved.path)
    page.open(f"{server.api_url}/pool")
    page.shows("alive", EMBEDDED, "Memory of each device", "weights", "kv cache", "tokens")
    assert page.complaints() == []


def talk(page, server, path: str) -> None:
    """Send one prompt to the base model and the checkpoint, side by side."""
    query = urllib.parse.urlencode({"checkpoint": path, "other": server.base_model})
    page.open(f"{server.api_url}/playground?mode=checkpoint&{query}")
    page.fill("#max_tokens", "24")
    page.fill("#say", "English: the apple\nPig Latin: ")
    page.press("Send")
    wait_for(lambda: page.run("return document.querySelectorAll('.turns small').length") == 2)
    assert page.run("return document.querySelectorAll('.turn.model span[data-p]').length") >= 2
    assert page.run("return [...document.querySelectorAll('[role=alert]')].map((one) => one.textContent)") == []
