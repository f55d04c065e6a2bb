"""Each page of the console, empty and with objects, and its forms."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape
from typing import Any

import numpy as np
import pytest
from tests.api.conftest import KEY, card_json
from tests.api.console.conftest import of_checkpoint

from tinkerflow.backend.catalog.champions import champion_key
from tinkerflow.backend.catalog.model_card import ModelCard
from tinkerflow.backend.journal import RunEvent, database
from tinkerflow.backend.journal.run_events import MOST_EVENTS
from tinkerflow.backend.spec.commands import CompileStatus, GroupInfo
from tinkerflow.backend.store.blobs import open_blobs
from tinkerflow.backend.wire import tinker_pb2 as pb

EMPTY = {
    "/": "Next steps",
    "/sessions": "No session yet",
    "/training_runs": "No training run yet",
    "/compare": "Select two to",
    "/samples": "No samples yet",
    "/checkpoints": "No checkpoints yet",
    "/pool": "No engine has run on this database yet",
    "/usage": "No usage yet",
    "/keys": "No key exists",
}


@pytest.mark.parametrize(("path", "text"), EMPTY.items())
def test_empty_page_shows_the_next_step(browser: Any, path: str, text: str) -> None:
    page = browser.get(path)
    assert page.status_code == 200 and text in page.text
    assert "script-src 'self'" in page.headers["content-security-policy"]
    assert "<script>" not in page.text and "style=" not in page.text and " onclick" not in page.text


def test_lists_link_to_their_items(browser: Any, furnish: Any, lettered: Any) -> None:
    things = furnish()
    checkpoint = of_checkpoint(things.sampler_weights)
    for path, link in {
        "/": f"/training_runs/{things.run}",
        "/sessions": f"/sessions/{things.session}",
        f"/sessions/{things.session}": f"/training_runs/{things.run}",
        "/training_runs": f"/training_runs/{things.run}",
        f"/training_runs/{things.run}": checkpoint,
        "/checkpoints": checkpoint,
        checkpoint: f"/training_runs/{things.run}",
        "/samples": f"/samples/{things.sample}",
    }.items():
        page = browser.get(path)
        assert page.status_code == 200, (path, page.text)
        assert f'href="{link}"' in page.text, path
        assert browser.get(link).status_code == 200, link


def test_page_limited_by_bytes_links_to_the_remaining_rows(
    browser: Any, furnish: Any, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    things = furnish()
    with server.journal.models._write() as connection:
        copy_rows(connection, "model", things.run, [f"{things.run}again"])
        copy_rows(connection, "checkpoint", things.weights, [f"{things.weights}again"], "path")
    monkeypatch.setattr(database, "PAGE_BYTES", 10)  # less than a row
    for path in ("/training_runs", "/checkpoints"):
        page = browser.get(path).text
        assert "1 to 1 of" in page and f"{path}?offset=1" in page, path


def test_a_sample_is_shown_as_text_until_its_bytes_are_dropped(browser: Any, furnish: Any, lettered: Any) -> None:
    things = furnish()
    page = browser.get(f"/samples/{things.sample}").text
    assert "<pre>bc</pre>" in page and things.sampler_weights in page
    assert "bc" in browser.get(f"/training_runs/{things.run}").text
    for _ in range(2):
        browser.server.journal.results.expire(-1)
    assert "its text was deleted" in browser.get(f"/samples/{things.sample}").text


def test_the_rows_of_examined_steps_are_on_the_page_of_their_run(
    browser: Any, server: Any, engine: Any, lettered: Any
) -> None:
    run = server.model(history="true")
    rows = [
        {"number": 3, "tokens": 8, "loss": 96.0, "grad_norm": 812.5, "worst": [[1, 2, -9.5]], "repeated": [4, 6]},
        {"number": 0, "tokens": 8, "loss": 16.0, "grad_norm": None},
    ]
    server.post(f"training_runs/{run}/blames", {"step": 12, "rows": rows})
    page = unescape(browser.get(f"/training_runs/{run}").text)
    assert "<h2>Rows of step 12</h2>" in page and "'b' at 1: -9.50" in page and "not finite" in page
    assert f"tinkerflow rerun {run} --from 12 --without 12:4 --without 12:6" in page
    cells = re.findall(r"<td class=.n.>(.*?)</td>", page.split("Rows of step 12")[-1].split("</table>")[0])
    assert cells == ["3", "8", "12", "812.5", "0", "8", "2", "not finite"]


def test_prompt_images_are_placeholders_in_lists_and_shown_with_their_sample(
    browser: Any, server: Any, lettered: Any
) -> None:
    opening = {"session_id": server.session(), "sampling_session_seq_id": 0, "base_model": lettered.name}
    sampler = server.post("create_sampling_session", opening).json()["sampling_session_id"]
    texts = [{"type": "encoded_text", "tokens": tokens} for tokens in ([2, 3], [4], [5])]
    images = [{"type": "image", "format": form, "data": data} for form, data in (("png", "AAAA"), ("jpeg", "BB=="))]
    prompt = {"chunks": [texts[0], images[0], texts[1], texts[2], images[1]]}
    body = {"sampling_session_id": sampler, "seq_id": 0, "prompt": prompt, "sampling_params": {"max_tokens": 4}}
    sample = server.post("asample", body).json()["request_id"]
    assert "bc[image]de[image]" in browser.get("/samples").text
    page = browser.get(f"/samples/{sample}").text
    assert "<pre>bc[image]de[image]</pre>" in page
    for url in ("data:image/png;base64,AAAA", "data:image/jpeg;base64,BB=="):
        assert f'src="{url}"' in page and url not in browser.get("/samples").text


def test_lists_do_not_read_large_samples(browser: Any, furnish: Any, lettered: Any, monkeypatch: Any) -> None:
    things = furnish()
    monkeypatch.setattr("tinkerflow.api.console.samples._READ_IN_LIST", 10)
    assert "too large to show here" in browser.get("/samples").text
    assert "<pre>bc</pre>" in browser.get(f"/samples/{things.sample}").text


def test_curves_change_only_with_new_steps(browser: Any, server: Any, engine: Any, put_steps: Any) -> None:
    run = server.model()
    assert "No steps yet" in browser.get(f"/training_runs/{run}").text
    put_steps(run, 5)
    page = browser.get(f"/training_runs/{run}").text
    for title in ("Loss per weight", "Gradient norm", "Learning rate", "KL(sampler, trainer)", "Tokens per second"):
        assert f"<figcaption>{title}" in page
    seen = page.split('data-seen="')[1].split('"')[0]
    assert browser.get("/curves", params={"run": run, "seen": seen}).status_code == 204
    put_steps(run, 1, first=6)
    part = browser.get("/curves", params={"run": run, "seen": seen})
    assert part.status_code == 200 and "6 steps measured" in part.text and "<html" not in part.text


def test_runs_are_compared_in_the_same_charts(browser: Any, server: Any, engine: Any, put_steps: Any) -> None:
    runs = [server.model(name=name, parent="", corpus="b", step="0") for name in ("one", "twin", "twin")]
    for run in runs:
        put_steps(run, 3)
    twins = browser.get("/compare", params={"run": runs}).text
    assert all(f"twin ({run})" in twins for run in runs[1:]) and f"one ({runs[0]})" not in twins
    runs = runs[:2]
    page = browser.get("/compare", params={"run": runs}).text
    equal = page.partition("Equal in all runs")[2]
    assert "<dt>corpus</dt><dd>b</dd>" in equal and "<dt>parent" not in equal and "<dt>step" not in equal
    assert page.count("<figure") == 5 and page.count('class="line line-1"') == 5
    assert all(f"/training_runs/{run}" in page for run in runs)
    assert browser.get("/compare", params={"run": [f"r{n}" for n in range(9)]}).status_code == 404


def test_checkpoint_page_shows_lineage_and_available_actions(browser: Any, server: Any, furnish: Any) -> None:
    things = furnish()
    where = of_checkpoint(things.sampler_weights)
    open_blobs(server.settings.pipelines_url).create(
        champion_key("helpdesk", 1), b'{"weights": "%s"}' % things.sampler_weights.encode()
    )
    page = browser.get(where).text
    assert "after 3 steps" in page and "helpdesk" in page and things.run in page
    answers = page.partition("<small>answers</small>1 request<br>")[2].partition("</li>")[0]
    assert answers.count("<time") == 1, "the first answer is also the last"
    asked = f"{server.url}/api/v1/training_runs/{things.run}/checkpoints/sampler_weights/best/answers"
    answers = server.http.get(asked, headers={"X-API-Key": KEY}).json()
    assert (answers["champions"], answers["number"]) == ({"helpdesk": ""}, 1)
    assert answers["first_at"] == answers["last_at"] is not None
    assert browser.send(f"{where}/publish", {"public": "yes"}, page=where).status_code == 303
    assert server.journal.checkpoints.get(things.sampler_weights, "stranger").public
    assert browser.send(f"{where}/publish", {"public": "no"}, page=where).status_code == 303
    assert not server.journal.checkpoints.get(things.sampler_weights, None).public
    assert browser.send(f"{where}/ttl", {"ttl": "12 h"}, page=where).status_code == 303
    assert server.journal.checkpoints.get(things.sampler_weights, None).expires_at is not None
    for wrong in ("soon", "0 h", "1e9 d"):
        refused = browser.send(f"{where}/ttl", {"ttl": wrong}, page=where)
        assert refused.status_code == 400 and "must be hours or days" in refused.text
    assert browser.send(f"{where}/ttl", {"ttl": ""}, page=where).status_code == 303
    assert server.journal.checkpoints.get(things.sampler_weights, None).expires_at is None
    link = browser.get(f"{where}/download")
    assert link.status_code == 302
    assert browser.http.get(link.headers["location"]).content[257:262] == b"ustar"
    confirm = browser.get(f"{where}/delete").text
    assert "cannot be undone" in confirm and "the champion helpdesk" in confirm
    assert browser.get(where).status_code == 200, "asking deletes nothing"
    assert browser.send(f"{where}/delete", page=where).status_code == 303
    assert browser.get(where).status_code == 404


def test_the_lineage_of_a_run_with_a_history_has_its_data_and_the_checkpoint_before_it(
    browser: Any, server: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(run: str) -> str:
        message = pb.ForwardBackwardRequest(model_id=run, seq_id=1, loss_fn="cross_entropy")
        for tokens in ([1, 2], [1, 2], [3]):
            datum = message.data.add()
            datum.model_input.add().encoded_text.tokens = np.array(tokens, np.int32).tobytes()
            for name, kind, values in (
                ("target_tokens", pb.DTYPE_INT64, np.array(tokens, np.int64)),
                ("weights", pb.DTYPE_FLOAT32, np.ones(len(tokens), np.float32)),
            ):
                tensor = datum.loss_fn_inputs[name]
                tensor.dense, tensor.dtype = values.tobytes(), kind
                tensor.shape.append(len(tokens))
        url, headers = f"{server.url}/api/v1/forward_backward", {"X-API-Key": KEY}
        sent = [server.http.post(url, content=message.SerializeToString(), headers=headers)]
        sent.append(server.post("optim_step", {"model_id": run, "seq_id": 2, "adam_params": {"learning_rate": 0.5}}))
        sent.append(server.post("save_weights", {"model_id": run, "seq_id": 3, "path": "after"}))
        assert [server.result(one.json()["request_id"]).status_code for one in sent] == [200] * 3
        return f"tinker://{run}/weights/after"

    first = trained(server.model(history="true"))
    page = browser.get(of_checkpoint(first)).text
    assert "2 different rows, 5 tokens" in page and "began from" not in page
    body = {"session_id": server.session(), "model_seq_id": 0, "path": first, "user_metadata": {"history": "true"}}
    second = trained(str(server.post("load_weights", body).json()["model_id"]))
    page = browser.get(of_checkpoint(second)).text
    assert "2 different rows, 5 tokens" in page and f'href="{of_checkpoint(first)}"' in page
    monkeypatch.setattr("tinkerflow.api.console.pages.checkpoints._MOST_STEPS", 0)
    assert f"<code>tinkerflow explain {second}</code>" in browser.get(of_checkpoint(second)).text


def test_pool_page_shows_parts_groups_memory_and_waiting_requests(browser: Any, server: Any, furnish: Any) -> None:
    furnish()
    journal = server.journal
    journal.leases.beat()
    journal.base_models.note_worker_group(
        "tiny/bigram", GroupInfo(("cpu:0",), 7, 32, 1, 64, 128, "", 2, memory={"weights": 3 * 10**9, "kv_cache": 10**9})
    )
    journal.base_models.note_compile_status("tiny/bigram", CompileStatus(9, 4, 1, 2, 0))
    journal.base_models.note_progress("tiny/bigram", "the group starts again")
    for path in ("/pool", "/pool/now"):
        page = browser.get(path).text
        for text in ("alive", "cpu:0", "3 GB", "kv cache", "4 of 9 programs ready, 1 failed", "the group starts again"):
            assert text in page, (path, text)
    journal.base_models.note_compile_status("tiny/bigram", CompileStatus(0, 0, 0, 9, 6, kv_pages=512, kv_pages_used=7))
    page = browser.get("/pool").text
    assert "No warm-up: 15 programs" in page and "7 of 512 pages in use" in page


def test_usage_page_draws_and_sums_usage(browser: Any, server: Any, furnish: Any) -> None:
    from tinkerflow.backend.journal import UsageKind, Used

    things = furnish()
    server.post("optim_step", {"model_id": things.run, "seq_id": 99, "adam_params": {}})
    engine_answers = [
        Used(things.session, "tiny/bigram", kind, 1234) for kind in (UsageKind.TRAINING, UsageKind.SAMPLE)
    ]
    from tinkerflow.backend.journal.results import _add_usage

    with server.journal.results._write() as connection:
        _add_usage(connection, engine_answers, server.clock.now())
    server.journal.project_limits.set("local", {"max_live_models": 7, "max_feedback_per_day": 5, "max_sessions": 0})
    server.journal.project_limits.set("search", {"max_stored_bytes": 10**9})
    page = browser.get("/usage").text
    limit = '<tr><td>{}</td><td><code>{}</code></td><td class="n">{}</td><td class="n">{}</td><td>for {}</td></tr>'
    for shown in (
        ("local", "max_live_models", 1, 7, "this project"),
        ("local", "max_feedback_per_day", 0, 5, "this project"),
        ("local", "max_training_runs", 1, "100,000", "all projects"),
        ("search", "max_stored_bytes", "0 B", "1 GB", "this project"),
    ):
        assert limit.format(*shown) in page, shown
    assert "max_sessions</code>" not in page.split("<td>search")[0], "no limit"
    assert "1,234" in page and "Tokens by day" in page and "Stored now" in page
    assert "Tokens by hour" in browser.get("/samples").text
    assert "local: 100 %" in browser.get("/pool").text


def test_keys_are_created_shown_once_and_revoked(browser: Any, server: Any, browse: Any) -> None:
    made = browser.send("/keys", {"name": "first", "project": "ops", "admin": "yes"})
    secret = made.text.split('<pre id="secret">')[1].split("<")[0]
    assert secret.startswith("tml-") and "needs a key" in made.text
    server.clock.advance(2.0)
    assert browser.get("/keys").status_code == 401, "the door is closed now"
    assert browser.sign_in(secret).status_code == 303
    page = browser.get("/keys").text
    assert secret not in page and "first (admin)" in page
    assert browser.send("/keys", {"name": "ann", "project": "team"}).status_code == 200
    (ann,) = [key for key in server.journal.keys.all() if key.name == "ann"]
    assert (ann.project, ann.admin) == ("team", False)
    assert "Revoke for good" in browser.get(f"/keys/{ann.id}/revoke").text
    assert browser.send(f"/keys/{ann.id}/revoke").status_code == 303
    assert [key.id for key in server.journal.keys.all() if key.revoked_at] == [ann.id]
    assert browser.send("/keys", {"name": "", "project": "x"}).status_code == 400
    number = server.get("auth/apikey/me", secret).json()["key_id"]
    assert "first (admin)" in browser.get(f"/keys/{number}").text, "as the SDK's link names it"
    assert 'value="laptop"' in browser.get("/keys?new_key=true&key_name=laptop").text
    assert browser.get("/keys/none").status_code == 404


def test_a_page_shows_fifty_keys(browser: Any, server: Any) -> None:
    secrets = [server.journal.keys.create(f"key-{n}", "team", admin=True)[1] for n in range(53)]
    server.clock.advance(2.0)
    assert browser.sign_in(secrets[0]).status_code == 303
    first, second, beyond = (browser.get(f"/keys?offset={offset}").text for offset in (0, 50, 100))
    assert [page.count("Revoke…") for page in (first, second, beyond)] == [50, 3, 0]
    assert "1 to 50 of 53" in first and "/keys?offset=50" in first and "51 to 53 of 53" in second
    assert "No key exists" not in beyond


def test_large_pages_take_few_statements_and_read_few_rows(
    browser: Any, server: Any, engine: Any, furnish: Any, lettered: Any, put_steps: Any
) -> None:
    """Reads are counted in SQLite's instructions (10 to 90 per row), because time depends on the machine."""
    import sqlalchemy as sa

    things = furnish()
    engine.paused = True
    news = [RunEvent(server.clock.now(), 20, "news " * 20) for _ in range(MOST_EVENTS)]
    for _ in range(10):
        server.journal.run_events.add(things.run, news)
    with server.journal.models._write() as connection:
        copy_rows(connection, "model", things.run, [f"{things.run}{n:04d}" for n in range(1000)])
        copy_rows(connection, "checkpoint", things.weights, [f"{things.weights}{n:04d}" for n in range(1000)], "path")
    other = f"{things.run}0000"
    put_steps(things.run, 100_000 - 3, first=4)
    put_steps(other, 1000)
    made: list[str] = []
    work = 0

    def note(connection: Any, _cursor: object, statement: str, *_: object) -> None:
        made.append(statement)
        connection.connection.dbapi_connection.set_progress_handler(tick, 1000)

    def tick() -> int:
        nonlocal work
        work += 1
        return 0

    sa.event.listen(sa.Engine, "before_cursor_execute", note)
    try:
        for path, most, instructions in (
            ("/", 30, 100),
            ("/training_runs", 10, 100),
            ("/sessions", 10, 100),
            (f"/sessions/{things.session}", 10, 130),
            ("/checkpoints", 10, 100),
            ("/samples", 30, 100),
            ("/usage", 10, 100),
            ("/pool", 30, 100),
            ("/keys", 10, 100),
            ("/playground", 20, 100),
            (f"/training_runs/{things.run}", 30, 15_000),
            (f"/compare?run={things.run}&run={other}", 30, 15_000),
            (of_checkpoint(things.weights), 20, 100),
            (f"/curves?run={things.run}&seen=", 20, 15_000),
            (f"/training_runs/{things.run}/events", 4, 1),
        ):
            made.clear()
            work = 0
            page = browser.get(path)
            took = f"{1000 * page.elapsed.total_seconds():.0f} ms"
            print(f"{path}: {took}, {len(page.content)} bytes, {len(made)} statements, {work} thousand instructions")
            assert page.status_code == 200
            assert len(made) <= most, (path, made)
            assert work <= instructions, path
            assert len(page.content) < 600_000, path
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", note)
    assert "1 to 50 of 1,001" in browser.get("/training_runs").text
    assert "1,001 to 1,001 of 1,001" in browser.get("/training_runs?offset=1000").text


def copy_rows(connection: Any, name: str, key: str, keys: list[str], column: str = "id") -> None:
    import sqlalchemy as sa

    table = sa.Table(name, sa.MetaData(), autoload_with=connection)
    row = dict(connection.execute(table.select().where(table.c[column] == key)).one()._mapping)
    connection.execute(table.insert(), [row | {column: one} for one in keys])


def test_every_page_shows_the_alias_of_the_embedded_model(server: Any, browser: Any, journal: Any) -> None:
    folder = "/data/models/tinkerflow/tiny-qwen3"
    card = replace(ModelCard.from_json(card_json()), name=folder)
    journal.base_models.register([(folder, card.to_json())])
    journal.base_models.note_worker_group(
        folder, GroupInfo(("cpu:0",), 7, 32, 1, 64, 128, "", 1, memory={"weights": 8})
    )
    journal.leases.acquire("an engine")
    for path in ("/", "/pool", "/playground"):
        text = unescape(browser.get(path).text)
        assert "tinkerflow/tiny" in text and folder not in text, path


def test_the_page_of_a_pipeline_folds_parameters_with_default_values(server: Any, browser: Any) -> None:
    settings = {"pipeline": "rl", "loss": "gspo", "training.beta1": "0.9", "training.beta2": "0.95"}
    run = server.model(**settings, default_parameters="training.beta1 training.beta2")
    shown, folded = browser.get(f"/training_runs/{run}").text.split("<details>")
    assert "<dt>loss</dt><dd>gspo</dd>" in shown and "training.beta" not in shown
    assert "2 parameters with default values" in folded and "<dt>training.beta2</dt><dd>0.95</dd>" in folded
    assert "default_parameters" not in shown + folded + browser.get(f"/compare?run={run}").text
    assert "<details>" not in browser.get(f"/training_runs/{server.model(pipeline='rl')}").text
