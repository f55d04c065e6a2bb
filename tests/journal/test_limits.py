"""What one project may have at a time: nobody gets past it, and it costs one look at an index."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import sqlalchemy as sa

from tinkerflow.backend.core.errors import TooManyError
from tinkerflow.backend.core.ids import model_id
from tinkerflow.backend.journal import CheckpointKind, CheckpointSaved, Journal, Kind, Limits, NewModel, NewRequest


def a_sample(sampler: str, seq: int, owner: str = "local") -> NewRequest:
    return NewRequest(Kind.SAMPLE, owner, b"{}", f"sample {seq}", sampler_id=sampler, seq_id=seq)


def store(scene, name: str, size: int) -> None:
    """Save a checkpoint of `size` bytes."""
    model = scene.model()
    scene.submit(model, 1)
    (save,) = scene.journal.requests.ready(model)
    saved = CheckpointSaved(
        name, model, CheckpointKind.WEIGHTS, name[-1], scene.owner, "tiny", 8, True, True, True, 0, size
    )
    scene.journal.results.finish([save.done(b"{}", "json", saved)])


def test_samples_beyond_the_limit_are_not_stored(scene, as_owner):
    limits, sampler = Limits(sampling_requests=2), scene.sampler(scene.session())
    first, _ = (scene.journal.requests.submit(a_sample(sampler, seq), limits) for seq in range(2))
    with pytest.raises(TooManyError, match="2 sampling requests waiting"):
        scene.journal.requests.submit(a_sample(sampler, 2), limits)
    them = as_owner("them")
    theirs = them.sampler(them.session())
    assert them.journal.requests.submit(a_sample(theirs, 0, "them"), limits)  # another project has its own
    scene.journal.requests.cancel(first, "local")
    assert scene.journal.requests.submit(a_sample(sampler, 2), limits)  # the same sequence id: it was not used up
    with pytest.raises(TooManyError):
        scene.journal.requests.submit(a_sample(sampler, 3), limits)


@pytest.mark.parametrize("most", [1, 7])
def test_a_crowd_gets_no_more_in_than_may(scene, url, most):
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


def test_training_tokens_wait_up_to_the_limit_and_more_fail_by_name(scene):
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
    # what was refused is refused again when it is sent again
    repeated = replace(scene.operation(model, 2), tokens=41)
    assert scene.journal.requests.submit(repeated, limits) == requests[1]


def create(scene, session: str, n: int, limits: Limits) -> str:
    name = model_id(session, n)
    new = NewModel(name, session, "local", "tiny", rank=8)
    request = scene.journal.models.create(new, scene.creation(name), limits)
    failed = scene.journal.results.get(request, "local")
    return "" if failed is None else str(failed.error)


def test_models_beyond_the_limit_fail_by_name_and_ended_ones_make_room(scene):
    limits, session = Limits(live_models=2), scene.session()
    assert create(scene, session, 0, limits) == create(scene, session, 1, limits) == ""
    assert "has 2 models: must be at most 2 (max_live_models)" in create(scene, session, 2, limits)
    assert create(scene, session, 1, limits) == ""  # repeated
    (creation,) = scene.journal.requests.ready(model_id(session, 0))
    scene.journal.results.finish([creation.failed("no", "user")])
    assert create(scene, session, 3, limits) == ""
    assert "max_live_models" in create(scene, session, 4, limits)


def test_nothing_is_saved_once_the_limit_is_reached(scene, as_owner):
    limits, model = Limits(stored_bytes=100), scene.model()
    store(scene, "tinker://a/weights/1", 99)
    store(as_owner("them"), "tinker://b/weights/1", 1000)

    def save(seq: int, stores: bool = True) -> str | None:
        request = replace(scene.operation(model, seq), kind=Kind.SAVE_WEIGHTS, stores=stores)
        failed = scene.journal.results.get(scene.journal.requests.submit(request, limits), "local")
        return None if failed is None else failed.error

    assert save(1) is None
    store(scene, "tinker://a/weights/2", 1)
    assert "checkpoints and images have 100 bytes: nothing is saved from 100 on (max_stored_bytes)" in str(save(2))
    assert save(3, stores=False) is None
    scene.journal.checkpoints.delete("tinker://a/weights/2", "local")
    assert save(4) is None


def test_an_optimizer_step_costs_no_statement_more(scene, statements):
    model, every = scene.model(), Limits(1, 1, 1, 1)
    step = replace(scene.operation(model, 1), kind=Kind.OPTIM_STEP)
    with statements() as plain:
        scene.journal.requests.submit(step)
    with statements() as limited:
        scene.journal.requests.submit(replace(step, seq_id=2, content_hash="2"), every)
    assert limited == plain


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_each_limit_is_one_look_at_an_index(scene, url, statements):
    session = scene.session()
    model, sampler = scene.model(), scene.sampler(session)
    every = Limits(10, 1000, 10, 1000)
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
