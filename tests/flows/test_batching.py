from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tinkerflow.backend.journal import Kind, Pending
from tinkerflow.flows.observers import Batch
from tinkerflow.flows.prefect.mirror import last_part, run_name, shared_name, short_name
from tinkerflow.flows.runner import batches

MODEL = "sess-abcdefgh1234ab12:train:0"
KINDS = [kind for kind in Kind if kind is not Kind.SAMPLE]


def pending(*kinds: Kind) -> list[Pending]:
    return [Pending(f"req-{i}", kind, "o", "s", MODEL, None, i, b"") for i, kind in enumerate(kinds)]


def test_chunks_of_one_call_are_one_batch_and_share_a_step_with_their_optim_step() -> None:
    found = batches(
        pending(*[Kind.FORWARD_BACKWARD] * 3, Kind.OPTIM_STEP, Kind.FORWARD_BACKWARD, Kind.FORWARD, Kind.OPTIM_STEP), 16
    )
    assert [(b.kind, len(b.requests), b.step) for b in found] == [
        (Kind.FORWARD_BACKWARD, 3, 17),
        (Kind.OPTIM_STEP, 1, 17),
        (Kind.FORWARD_BACKWARD, 1, 18),
        (Kind.FORWARD, 1, 18),
        (Kind.OPTIM_STEP, 1, 18),
    ]
    assert [b.ends_step for b in found] == [False, True, False, False, True]


@given(st.lists(st.sampled_from(KINDS), max_size=40))
def test_batches_keep_request_order_and_kinds_separate(kinds: list[Kind]) -> None:
    rows = pending(*kinds)
    found = batches(rows, 0)
    assert [request for batch in found for request in batch.requests] == rows
    assert all({request.kind for request in batch.requests} == {batch.kind} for batch in found)
    assert [batch.step for batch in found] == sorted(batch.step for batch in found)


def test_batch_names_are_readable() -> None:
    batch, short = Batch(Kind.FORWARD_BACKWARD, (), 17), short_name(MODEL)
    assert short == "model-ab12-0"
    assert run_name(short, batch) == "model-ab12-0/step-000017/forward_backward"
    assert run_name(short, Batch(Kind.SAVE_FOR_SAMPLER, (), 3)).endswith("/step-000003/save_weights_for_sampler")
    assert shared_name(short, 17) == "model-ab12-0/steps-000017-onwards"
    assert shared_name(short, 17, 21) == "model-ab12-0/steps-000017-000021"


def test_a_short_name_is_the_last_part_of_a_folder_or_a_hub_id() -> None:
    assert last_part("/data/models/tiny/") == "tiny"
    assert last_part("Qwen/Qwen3-0.6B") == "Qwen3-0.6B"
