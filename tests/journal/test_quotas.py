"""Quotas of a project: exact under concurrency, with errors that name the setting and one index lookup per check."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from datetime import timedelta

import pytest
import sqlalchemy as sa
from tests.journal.conftest import checkpoint

from tinkerflow.backend.core.errors import TooManyError, UserError
from tinkerflow.backend.core.ids import model_id
from tinkerflow.backend.journal import (
    Journal,
    Kind,
    Limits,
    NewCustomLoss,
    NewModel,
    NewRequest,
    NewSampler,
    NewSession,
    NewUpload,
)
from tinkerflow.backend.journal.database import CutText, Json, Table, Text, UtcDateTime
from tinkerflow.backend.journal.feedback import NewFeedback
from tinkerflow.backend.journal.quotas import KEPT, ROW_BYTES
from tinkerflow.backend.journal.requests import FAILED_PAYLOAD
from tinkerflow.backend.settings import Settings


def a_sample(sampler: str, seq: int, owner: str = "local") -> NewRequest:
    return NewRequest(Kind.SAMPLE, owner, b"{}", f"sample {seq}", sampler_id=sampler, seq_id=seq)


def store(scene, name: str, size: int) -> None:
    """Save a checkpoint of `size` bytes."""
    save = scene.taken(model := scene.model(), 1)
    saved = checkpoint(name, run_id=model, owner=scene.owner, step=0, size_bytes=size)
    scene.journal.results.finish([save.done(b"{}", "json", saved)])


def test_samples_beyond_the_limit_are_not_stored(scene, as_owner):
    limits, sampler = Limits(sampling_requests=2), scene.sampler(scene.session())
    first, _ = (scene.journal.requests.submit(a_sample(sampler, seq), limits) for seq in range(2))
    with pytest.raises(TooManyError, match="2 waiting sampling requests"):
        scene.journal.requests.submit(a_sample(sampler, 2), limits)
    them = as_owner("them")
    theirs = them.sampler(them.session())
    assert them.journal.requests.submit(a_sample(theirs, 0, "them"), limits)  # another project has its own limit
    scene.journal.requests.cancel(first, "local")
    assert scene.journal.requests.submit(a_sample(sampler, 2), limits)  # its sequence id is still free
    with pytest.raises(TooManyError):
        scene.journal.requests.submit(a_sample(sampler, 3), limits)


@pytest.mark.parametrize("most", [1, 7])
def test_concurrent_samples_do_not_exceed_the_limit(scene, url, most):
    limits, sampler = Limits(sampling_requests=most), scene.sampler(scene.session())
    journals = [Journal.open(url) for _ in range(4)]

    def enter(n: int) -> bool:
        try:
            journals[n % 4].requests.submit(a_sample(sampler, n), limits)
        except TooManyError:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        entered = list(threads.map(enter, range(32)))
    for journal in journals:
        journal.close()
    assert sum(entered) == most == len(scene.journal.requests.pending_samples(100))


def test_training_tokens_over_the_limit_fail(scene):
    limits, model = Limits(queued_tokens=100), scene.model()
    requests = [
        scene.journal.requests.submit(replace(scene.operation(model, seq), tokens=tokens), limits)
        for seq, tokens in ((1, 60), (2, 41), (3, 40), (4, 1))
    ]
    for refused, text in ((requests[1], "41 tokens, and this project has 60 waiting"), (requests[3], "1 tokens")):
        failed = scene.journal.results.get(refused, "local")
        assert failed.category == "user"
        assert text in failed.error and "at most 100 (max_queued_tokens)" in failed.error
    assert scene.ready(model) == [1, 3]
    scene.execute(model)
    assert scene.journal.results.get(requests[2], "local").error is None
    again = scene.journal.requests.submit(replace(scene.operation(model, 5), tokens=60), limits)
    assert scene.journal.results.get(again, "local") is None
    # a repeated request gets its stored refusal
    repeated = replace(scene.operation(model, 2), tokens=41)
    assert scene.journal.requests.submit(repeated, limits) == requests[1]


def create(scene, session: str, n: int, limits: Limits) -> str:
    name = model_id(session, n)
    new = NewModel(name, session, "local", "tiny", rank=8)
    request = scene.journal.models.create(new, scene.creation(name), limits)
    failed = scene.journal.results.get(request, "local")
    return "" if failed is None else str(failed.error)


def test_models_over_the_limit_fail_and_ended_ones_make_room(scene):
    limits, session = Limits(live_models=2), scene.session()
    assert create(scene, session, 0, limits) == create(scene, session, 1, limits) == ""
    error = create(scene, session, 2, limits)
    assert "would have 3 models: must be at most 2 (max_live_models)" in error
    assert '`service.close("success").result()`' in error and "limit set PROJECT max_live_models=N" in error
    assert create(scene, session, 1, limits) == ""  # repeated
    (creation,) = scene.journal.requests.ready(model_id(session, 0))
    scene.journal.results.finish([creation.failed("no", "user")])
    assert create(scene, session, 3, limits) == ""
    assert "max_live_models" in create(scene, session, 4, limits)


def test_saves_over_the_storage_limit_are_refused(scene, as_owner):
    limits, model = Limits(stored_bytes=100), scene.model()
    store(scene, "tinker://a/weights/1", 99)
    store(as_owner("them"), "tinker://b/weights/1", 1000)

    def save(seq: int, stores: bool = True) -> str | None:
        request = replace(scene.operation(model, seq), kind=Kind.SAVE_WEIGHTS, stores=stores)
        failed = scene.journal.results.get(scene.journal.requests.submit(request, limits), "local")
        return None if failed is None else failed.error

    assert save(1) is None
    store(scene, "tinker://a/weights/2", 1)
    assert "checkpoints and images have 100 bytes: must be below 100 to save more (max_stored_bytes)" in str(save(2))
    assert save(3, stores=False) is None
    scene.journal.checkpoints.delete("tinker://a/weights/2", "local")
    assert save(4) is None


def test_optimizer_step_costs_no_extra_statement(scene, statements):
    model, every = scene.model(), Limits(1, 1, 2**33, 1, 1)
    step = replace(scene.operation(model, 1), kind=Kind.OPTIM_STEP)
    with statements() as plain:
        scene.journal.requests.submit(step)
    with statements() as limited:
        scene.journal.requests.submit(replace(step, seq_id=2, content_hash="2"), every)
    assert limited == plain


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_each_limit_costs_one_index_lookup(scene, url, statements):
    session = scene.session()
    model, sampler = scene.model(), scene.sampler(session)
    every = Limits(10, 1000, 0, 10, 1000)
    calls = {
        "ix_request_pending_of_owner": lambda: scene.journal.requests.submit(a_sample(sampler, 0), every),
        "ix_request_pending_of_owner ": lambda: scene.journal.requests.submit(
            replace(scene.operation(model, 1), tokens=5), every
        ),
        "ix_model_owner_state": lambda: create(scene, session, 9, every),
        "ix_checkpoint_stored_by_owner": lambda: scene.journal.requests.submit(
            replace(scene.operation(model, 2), stores=True), every
        ),
    }
    engine = sa.create_engine(url)
    for index, call in calls.items():
        with statements() as made:
            call()
        looks = [one for one in made if "count(" in one or "sum(" in one]
        assert len(looks) == 1
        with engine.connect() as connection:
            values = (1,) * looks[0].count("?")
            plan = " ".join(row.detail for row in connection.exec_driver_sql("EXPLAIN QUERY PLAN " + looks[0], values))
        assert f"COVERING INDEX {index.strip()}" in plan, plan
    engine.dispose()


# ------------------------------------------------------------------ kept rows
def kept_rows(scene):
    """For each kind of kept row, a function that creates the n-th row."""
    run = scene.model()
    session, sampler_session = scene.session(), scene.session()

    def model(n: int, limits: Limits) -> None:
        name = model_id(session, n)
        new = NewModel(name, session, "local", "tiny", rank=8, user_metadata={"k": "v" * 50})
        scene.journal.models.create(new, scene.creation(name), limits)

    def feedback(n: int, limits: Limits) -> None:
        new = NewFeedback("local", "", "req-a-0", 0.5, None, "t" * 50, "base", None, "prompt", "answer", b"", b"")
        scene.journal.feedback.add(new, limits)

    def loss(n: int, limits: Limits) -> None:
        scene.journal.custom_losses.submit(
            NewCustomLoss(session, "local", n, "mine", "{" + " " * 50 + "}", str(n)), limits
        )

    def sampler(n: int, limits: Limits) -> None:
        new = NewSampler(f"{sampler_session}:sample:{n}", sampler_session, "local", "tiny", "tinker://" + "m" * 50)
        scene.journal.samplers.open(new, limits)

    def metric(n: int, limits: Limits) -> None:
        scene.journal.run_metrics.record(run, "local", {n: {"m" * 60: 0.5}}, limits)

    return {
        "sessions": lambda n, limits: scene.journal.sessions.create(NewSession("local", "0", ("t" * 50,)), limits),
        "training_runs": model,
        "samplers": sampler,
        "custom_losses": loss,
        "images": lambda n, limits: scene.journal.assets.begin(f"asset-{n}", "local", 10, limits),
        "feedback": feedback,
        "metrics": metric,
    }


def total(scene, kept: str, owner: str = "local") -> int:
    with scene.journal._database.read() as connection:
        row = connection.execute(sa.text(f"SELECT {kept} FROM project_total WHERE owner = '{owner}'")).one_or_none()
    return 0 if row is None else int(row[0])


def test_rows_of_every_kind_are_kept_up_to_a_limit(scene):
    make = kept_rows(scene)
    assert set(make) == set(KEPT)
    for kept, create in make.items():
        limits = Limits(**{kept: total(scene, kept) + 2})
        create(0, limits)
        create(1, limits)
        before = total(scene, kept), total(scene, "kept_bytes")
        with pytest.raises(UserError, match=rf"keeps {limits.__dict__[kept]} .* and this adds 1: .* \(max_{kept}\)"):
            create(2, limits)
        assert (total(scene, kept), total(scene, "kept_bytes")) == before  # the refused row was rolled back
        create(2, Limits())


def test_texts_of_every_kind_count_against_the_kept_bytes(scene):
    for kept, create in kept_rows(scene).items():
        before = total(scene, "kept_bytes")
        create(0, Limits())
        texts = total(scene, "kept_bytes") - before
        assert texts == ROW_BYTES if kept == "images" else texts > ROW_BYTES + 50
        with pytest.raises(UserError, match=rf"this adds {texts}: together .* at most .* \(max_kept_bytes"):
            create(1, Limits(kept_bytes=before + texts * 2 - 1))
        create(1, Limits(kept_bytes=before + texts * 2))


def test_a_repeated_request_counts_once_and_a_deletion_gives_back(scene):
    make = kept_rows(scene)
    for kept in ("training_runs", "samplers", "custom_losses", "images"):
        most = total(scene, kept) + 1
        for _ in range(2):
            make[kept](0, Limits(**{kept: most}))
        assert total(scene, kept) == most
    before = total(scene, "kept_bytes")
    scene.journal.assets.withdraw("asset-0", "local")
    scene.journal.assets.forget("asset-0", "local")
    assert (total(scene, "images"), total(scene, "kept_bytes")) == (0, before - ROW_BYTES)


def test_copies_and_uploads_are_refused_before_their_files_are_written(scene, clock):
    scene.model()
    limits = Limits(training_runs=1)
    with pytest.raises(UserError, match="would keep at least 2 training runs: must be at most 1"):
        scene.journal.checkpoints.check_storage("local", limits)
    new = NewUpload(
        id="u",
        owner="local",
        key_id="",
        project_id=None,
        base_model="tiny",
        rank=8,
        train_attn=True,
        train_mlp=True,
        train_unembed=True,
        max_bytes=1,
        expires_at=clock.now() + timedelta(hours=1),
    )
    with pytest.raises(UserError, match="would keep at least 2 training runs: must be at most 1"):
        scene.journal.uploads.start(new, limits)


def test_unnamed_save_fails_where_no_sampler_can_be_kept(scene):
    model = scene.model()
    scene.sampler(scene.session())
    save = replace(scene.operation(model, 1), kind=Kind.SAVE_FOR_SAMPLER)
    failed = scene.journal.results.get(scene.journal.requests.submit(save, Limits(samplers=1)), "local")
    assert failed.error == (
        "this project would keep at least 2 samplers: must be at most 1 (max_samplers); "
        "ask the operator (`tinkerflow limit set PROJECT max_samplers=N`)"
    )


def test_bytes_of_waiting_requests_have_a_limit(scene):
    model, sampler = scene.model(), scene.sampler(scene.session())
    large, limits = b"x" * 10_000, Limits(queued_bytes=15_000)
    scene.journal.requests.submit(replace(scene.operation(model, 1), payload=large), limits)
    second = scene.journal.requests.submit(replace(scene.operation(model, 2), payload=large), limits)
    assert "has 10000 bytes, and this project's waiting requests have 10000" in (
        scene.journal.results.get(second, "local").error
    )
    with pytest.raises(TooManyError, match=r"at most 15000 \(max_queued_bytes\)"):
        scene.journal.requests.submit(replace(a_sample(sampler, 0), payload=large), limits)
    scene.execute(model)
    assert scene.journal.requests.submit(replace(a_sample(sampler, 0), payload=large), limits)


def test_long_failed_request_is_not_kept(scene, url):
    model, long = scene.model(), b"x" * (FAILED_PAYLOAD + 1)
    failed = replace(scene.operation(model, 1, error="wrong"), payload=long)
    request_id = scene.journal.requests.submit(failed)
    assert scene.journal.requests.submit(failed) == request_id  # the hash of its content is kept
    with scene.journal._database.read() as connection:
        assert connection.execute(sa.text("SELECT length(payload) FROM request WHERE seq_id = 1")).scalar() == 0


# ------------------------------------------------------------------ every column and every table has a bound
# The bound on the rows of each table. The test fails for a new table without a line here.
BOUNDS = {
    "api_key": "admins alone make keys",
    "audit_event": "an entry for each change of something that is bounded; refused keys: 1,000 an hour",
    "base_model": "the engine's list",
    "service_secret": "one for each name that the code has, and for each store",
    "session": "max_sessions",
    "model": "max_training_runs",
    "sampler": "max_samplers",
    "request": "max_sampling_requests, max_queued_bytes, and work on the devices",
    "checkpoint": "max_stored_bytes",
    "upload": "uploads.MOST_OPEN; finished ones go when they expire",
    "asset": "max_images",
    "custom_loss": "max_custom_losses",
    "stability_info": "tokens that were sampled, and their experts and supports; a day",
    "weights_share": "made on the command line alone",
    "streamed_tokens": "streams.KEPT_SECONDS",
    "feedback": "max_feedback",
    "usage_bucket": "one an hour for each session",
    "training_step": "steps that were trained",
    "history_segment": "max_history_bytes",
    "run_event": "run_events.MOST_EVENTS for each run",
    "run_metric": "run_metrics.MOST_NAMES for each run",
    "run_metric_value": "max_metrics",
    "recovery_snapshot": "two for each live model, one for each live sampler",
    "suspect": "requests that wait",
    "process": "parts of the service",
    "project_total": "one for each project that has a key",
    "project_limit": "made on the command line alone",
    "ended_token": "a sign-out each; they go when the token expires",
}


def test_every_table_has_a_bound():
    assert set(BOUNDS) == set(Table.metadata.tables)
    settings = {word.strip(",;") for reason in BOUNDS.values() for word in reason.split() if word.startswith("max_")}
    assert settings <= set(Settings.model_fields)
    assert {f"max_{limit.name}" for limit in fields(Limits)} <= set(Settings.model_fields)


def test_every_text_and_json_column_has_a_limit():
    numbers = (sa.Integer, sa.BigInteger, sa.Boolean, sa.Float, UtcDateTime)
    payloads = sa.LargeBinary  # requests, results and tokens: limited by max_body_bytes and the size of an answer
    limited = {
        f"{table.name}.{column.name}": column.type.most
        for table in Table.metadata.tables.values()
        for column in table.columns
        if not isinstance(column.type, (*numbers, payloads))
    }
    assert len(limited) > 100
    long = {name: most for name, most in limited.items() if most > 2**16}
    assert {name.partition(".")[0] for name in long if long[name] > 2**20} == {"feedback"}


def test_oversized_texts_are_refused_and_messages_are_truncated(scene):
    assert Text(4).process_bind_param("abcd", None) == "abcd"
    with pytest.raises(UserError, match="a string has 6 bytes: must have at most 4"):
        Text(4).process_bind_param("äöü", None)
    assert CutText(4).process_bind_param("äöü", None) == "äö"
    assert CutText(5).process_bind_param("äöü", None) == "äö"
    with pytest.raises(UserError, match="has 13 bytes as JSON: must have at most 10"):
        Json(10).process_bind_param({"a": "bcde"}, None)
    with pytest.raises(UserError, match="a string has 5000 bytes: must have at most 4096 to be stored"):
        scene.session(display_name="x" * 5000)  # the limit holds for every caller
    assert Text().process_bind_param(None, None) is Json().process_bind_param(None, None) is None
