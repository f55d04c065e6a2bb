"""A run with history and a poisoned step: any step can be restored, even after kills, and blame finds the bad row."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import product
from typing import Any

import httpx
import pytest
import tinker
from family import make_family, png
from tests.client_environment import make_environment, tinkerflow
from tinker import types
from typer.testing import CliRunner

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.store import Store
from tinkerflow.deployments.commands import every_command

POISONED = 5  # the step whose row 2 has a huge weight


def rows(make_datum: Any, step: int) -> list[tinker.Datum]:
    draw = random.Random(step)
    texts = [[draw.randrange(1, 150) for _ in range(draw.randrange(6, 12))] for _ in range(4)]
    return [
        make_datum(text, [80.0] * (len(text) - 1) if (step, row) == (POISONED, 2) else None)
        for row, text in enumerate(texts)
    ]


@pytest.fixture(scope="module")
def run(server: Any, make_datum: Any) -> Iterator[str]:
    """A run of eight steps, each saved; its workers are killed during step 4."""
    with server.client() as service:
        trainer = service.create_lora_training_client(
            server.base_model, rank=8, user_metadata={"history": "true", "name": "questioned"}
        ).result()
        for step in range(1, 9):
            forward = trainer.forward_backward(rows(make_datum, step), "cross_entropy")
            made = trainer.optim_step(types.AdamParams(learning_rate=1e-3))
            if step == 4:
                server.kill()
            saved = trainer.save_state(f"step-{step}")
            for future in (forward, made, saved):
                future.result()
        yield trainer.model_id


@pytest.fixture
def command(server: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """command(*words) runs `tinkerflow` and returns its output and exit status."""
    monkeypatch.setenv("TINKER_BASE_URL", server.api_url)
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")

    def call(*words: str) -> tuple[str, int]:
        done = CliRunner().invoke(every_command(), words)
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return done.output, done.exit_code

    return call


def weights(pipelines: Any, path: str) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in pipelines.weights(path).items()}


def test_the_sdk_and_other_clients_use_a_step_as_a_checkpoint(
    run: str, server: Any, service: Any, pipelines: Any
) -> None:
    path = f"tinker://{run}/weights/@5"
    trainer = service.create_training_client_from_state_with_optimizer(path).result()
    trainer.save_state("copy").result()
    wanted = weights(pipelines, f"tinker://{run}/weights/step-5")
    assert weights(pipelines, f"tinker://{trainer.model_id}/weights/copy") == weights(pipelines, path) == wanted
    ask = {"model": f"tinker://{run}/weights/@3", "prompt": "a", "max_tokens": 4, "temperature": 0, "logprobs": 1}
    answers = []
    for model in (ask["model"], f"tinker://{run}/weights/step-3"):
        headers = {"Authorization": "Bearer tml-test"}
        answer = httpx.post(
            f"{server.api_url}/v1/completions", json={**ask, "model": model}, headers=headers, timeout=120
        )
        (choice,) = answer.raise_for_status().json()["choices"]
        answers.append((choice["text"], choice["logprobs"]))
    assert answers[0] == answers[1]


def test_a_rerun_is_equal_and_blame_finds_the_row_that_is_then_left_out(
    run: str, command: Any, make_datum: Any, service: Any, server: Any, pipelines: Any
) -> None:
    said, status = command("rerun", run, "--save", "end")
    assert status == 0 and "8 steps in the new run" in said and "16 results are equal to the recorded ones" in said
    again = said.split("saved: ")[1].split()[0]
    assert weights(pipelines, again) == weights(pipelines, f"tinker://{run}/weights/step-8")

    said, status = command("blame", run, "--step", str(POISONED))
    assert status == 0 and said.splitlines()[3].split()[1] == "2" and "weight 80, 9" in said, said
    page = said.splitlines()[-2].split(": ", 1)[1]
    assert page == f"{server.api_url}/training_runs/{run}" and "Rows of step 5" in httpx.get(page).text
    fix = said.splitlines()[-1].split(": ", 1)[1]
    assert fix == f"tinkerflow rerun {run} --from {POISONED} --without {POISONED}:2"

    said, status = command(*fix.split()[1:], "--save", "fixed")
    assert status == 0 and "4 steps in the new run" in said
    trainer = service.create_training_client_from_state_with_optimizer(f"tinker://{run}/weights/step-4").result()
    for step in range(POISONED, 9):
        data = rows(make_datum, step)
        if step == POISONED:
            del data[2]
        trainer.forward_backward(data, "cross_entropy").result()
        trainer.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    undisturbed = trainer.save_state("undisturbed").result().path
    assert weights(pipelines, said.split("saved: ")[1].split()[0]) == weights(pipelines, undisturbed)


def test_a_step_that_spoiled_the_weights_is_found_by_bisection(
    command: Any, make_datum: Any, service: Any, server: Any
) -> None:
    trainer = service.create_lora_training_client(
        server.base_model, rank=8, seed=1, user_metadata={"history": "true"}
    ).result()
    for step in range(1, 11):
        trainer.forward_backward(rows(make_datum, 20 + step), "cross_entropy")
        trainer.optim_step(types.AdamParams(learning_rate=1.0 if step == 4 else 1e-4)).result()
    said, status = command("blame", trainer.model_id, "--step", "9")
    assert status == 0 and said.startswith("step 4 made the data of step 9 unlikely; these are the rows of step 4"), (
        said
    )
    assert "no row of step 4 is unlike the others" in said and "--from 4 --without 4:" in said
    said, _ = command("blame", trainer.model_id, "--step", "9", "--back", "3")
    assert said.startswith("no row of step 9 is unlike the others"), "the steps after the fourth did nothing"


def test_steps_that_a_run_has_made_twice_are_those_of_the_last_time(
    command: Any, make_datum: Any, service: Any, server: Any, tmp_path: Any
) -> None:
    trainer = service.create_lora_training_client(server.base_model, rank=8, user_metadata={"history": "true"}).result()

    def train(*numbers: int) -> None:
        for number in numbers:
            trainer.forward_backward(rows(make_datum, number)[: number - 9], "cross_entropy")
            trainer.optim_step(types.AdamParams(learning_rate=1e-3)).result()

    train(10)
    back = trainer.save_state("one").result().path
    train(11, 12, 13)
    with pytest.warns(FutureWarning, match="load_state"):
        trainer.load_state_with_optimizer(back).result()
    train(10, 11)
    run = trainer.model_id
    assert command("receipt", run, "-o", str(tmp_path / "r.json"))[1] == 0
    said, status = command("verify", str(tmp_path / "r.json"), "--sample", "9")
    assert status == 0 and said.count("equal when computed again") == 3, "the state before step 4 was made again"
    said, status = command("rerun", run, "--from", "3")
    assert status == 0 and "1 steps in the new run" in said and "2 results are equal" in said, said
    said, _ = command("blame", run, "--step", "3")
    assert sorted(line.split()[1] for line in said.splitlines() if line.startswith("│")) == ["0", "1"], said
    assert "trained on 3 rows" in command("explain", f"tinker://{run}/weights/@3")[0].split("began with")[0]
    for words, text in (["--without", "9"], "its steps are 1 to 4"), (["--without", "3:2"], "has 2 rows"):
        with pytest.raises(UserError, match=text):
            command("rerun", run, *words)


def test_history_commands_report_changes_and_invalid_words(run: str, command: Any) -> None:
    said, _ = command("rerun", run, "--from", "6", "--to", "7", "--set", "learning_rate=*0.5")
    assert "2 steps in the new run" in said and "1 results are equal" in said, "the first forward_backward"
    said, _ = command("fork", run, "--step", "2", "--name", "second")
    assert said.startswith("tinker://") and said.endswith("/weights/second\n")
    wrong = {
        ("rerun", run, "--set", "learning_rat=1"): "adamw has no parameter 'learning_rat' (did you mean",
        ("rerun", run, "--set", "beta1=half"): "must be beta1=NUMBER",
        ("rerun", run, "--without", "5:x"): "must be STEP, or STEP:ROW",
        ("rerun", run, "--without", "5:" + "9" * 5000): "must be STEP, or STEP:ROW",
        ("rerun", run, "--from", "5", "--to", "3"): "--to 3: must be at least 5, the first step",
        ("rerun", "sess-0:train:0"): "'sess-0:train:0' does not exist",
        ("fork", run, "--step", "99"): "its run is at step 8",
        ("blame", run, "--step", "99"): "its history has no forward_backward of step 99",
    }
    for words, text in wrong.items():
        with pytest.raises(Exception, match=text.replace("(", r"\(")):
            command(*words)


def test_checkpoint_is_explained_with_its_ancestors(run: str, command: Any, service: Any, make_datum: Any) -> None:
    first = service.create_training_client_from_state(
        f"tinker://{run}/weights/step-4", user_metadata={"history": "true"}
    ).result()
    for _ in range(2):
        first.forward_backward(rows(make_datum, 9)[:3], "cross_entropy").result()
        first.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    path = first.save_weights_for_sampler("last").result().path
    sampler = service.create_sampling_client(path).result()
    for _ in range(2):
        sampler.sample(types.ModelInput.from_ints([1, 2]), 1, types.SamplingParams(max_tokens=1)).result()
    said, _ = command("explain", path)
    assert "no champion\n  answered 2 requests, the first at 20" in said
    later, earlier = said.split(f"tinker://{run}/weights/step-4\n  request")
    assert later.startswith(f"{path}\n  request 5 of {first.model_id} made it, after 2 steps\n")
    assert "trained on 6 rows, 3 of them different" in later and f"began with tinker://{run}/weights/step-4" in later
    assert "after 4 steps" in earlier and "trained on 16 rows, 16 of them different" in earlier
    assert "began with a fresh adapter" in earlier
    said, _ = command("explain", f"tinker://{run}/weights/@4")
    digests = [line for line in (earlier + said).splitlines() if "digest of the rows" in line]
    assert len(digests) == 2 and digests[0] == digests[1]
    with pytest.raises(Exception, match="the history of its run has no request that made it"):
        command("explain", f"tinker://{run}/weights/none")


def test_trained_rows_are_found_in_other_data(command: Any, service: Any, server: Any, tmp_path: Any) -> None:
    texts = [f"The {thing} of the garden is older than all of its trees." for thing in ("gate", "wall", "well", "path")]
    first = service.create_lora_training_client(server.base_model, rank=8, user_metadata={"history": "true"}).result()
    tokenizer = first.get_tokenizer()
    for text in texts[:2]:
        tokens = [*tokenizer.encode(text), tokenizer.eos_token_id]
        datum = tinker.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
        )
        first.forward_backward([datum], "cross_entropy").result()
        first.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    path = first.save_state("trained").result().path
    later = service.create_training_client_from_state(path, user_metadata={"history": "true"}).result()
    later.forward_backward([datum], "cross_entropy").result()
    later.optim_step(types.AdamParams(learning_rate=1e-3)).result()

    file = tmp_path / "held-out.jsonl"
    file.write_text("\n".join(json.dumps({"text": text}) for text in (texts[1], "Something else.", texts[0])))
    words = ("data", "check", str(file), "--format", "text", "--show", "0", "--against")
    said, status = command(*words, later.model_id)
    assert status == 1 and "was trained on 2 different rows" in said
    assert "2 of 3 rows are identical to one of them; 0 others" in said
    assert f"1:0 of {later.model_id}" in said and f"1:0 of {first.model_id}" in said
    said, status = command(*words, f"tinker://{first.model_id}/weights/@1")
    assert "was trained on 1 different rows" in said and "1 of 3 rows are identical to one of them; 1 others" in said
    file.write_text(json.dumps({"text": "Something else."}))
    said, status = command(*words, path)
    assert status == 0 and "0 of 1 rows are identical to one of them" in said


def test_a_receipt_is_verified_and_damage_is_named(run: str, command: Any, server: Any, tmp_path: Any) -> None:
    file = tmp_path / "receipt.json"
    said, _ = command("receipt", run, "-o", str(file))
    assert "25 requests up to step 8, signed by" in said
    assert file.stat().st_size < 4000
    said, status = command("verify", str(file))
    assert status == 0 and "steps 1 to 8: 16 results are equal when computed again" in said
    said, status = command("verify", str(file), "--sample", "2")
    assert status == 0 and said.count("results are equal when computed again") == 2

    issued = json.loads(file.read_text())
    for damage, text in (
        ({"signature": "00" * 64}, "the signature does not match"),
        ({"marks": [{**issued["marks"][0], "inputs": "ab"}]}, "the signature does not match"),
        ({"format": "other"}, "it is not a tinkerflow-receipt-1"),
    ):
        file.write_text(json.dumps({**issued, **damage}))
        with pytest.raises(UserError, match=text):
            command("verify", str(file))


def test_a_client_without_the_server_examines_a_run(
    run: str, server: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", server.api_url)
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")
    client = make_environment(tmp_path / "venv")
    for words, text in (
        (("blame", run, "--step", str(POISONED)), "weight 80"),
        (("fork", run, "--step", "2", "--name", "by-client"), "/weights/by-client"),
        (("explain", f"tinker://{run}/weights/@4"), "answered no requests"),
        (("receipt", run), "receipt.json: "),
        (("verify", "receipt.json"), "signed by "),
        (("cassette", "record", run, "-o", "run.cassette"), "in run.cassette"),
    ):
        assert text in tinkerflow(client, *words, folder=tmp_path)


@pytest.mark.thorough
def test_every_kind_of_model_is_forked_bit_for_bit(tmp_path: Any, start_server: Any, make_datum: Any) -> None:
    """One of two equal runs is saved at step 3, and the other is forked there. Rank 0 trains all parameters."""
    folders = [make_family(tmp_path / name, name) for name in ("qwen3_moe", "qwen3_5", "qwen3_vl")]
    (data_dir := tmp_path / "data").mkdir()
    options = [word for folder in folders for word in ("--base-model", str(folder))]
    store = Store.open(f"file://{data_dir / 'store'}")

    def train(folder: Any, rank: int, *, save: bool) -> str:
        chosen = {"history": "true"}
        trainer = service.create_lora_training_client(str(folder), rank=rank, seed=3, user_metadata=chosen).result()
        for step in range(1, 5):
            data = [*rows(make_datum, step), *([pictured(step)] if "vl" in folder.name else [])]
            trainer.forward_backward(data, "cross_entropy").result()
            trainer.optim_step(types.AdamParams(learning_rate=1e-3)).result()
            if save and step == 3:
                trainer.save_state("three").result()
        return str(trainer.model_id)

    with start_server(data_dir, *options, prefect="off") as server, server.client() as service:
        for folder, rank in product(folders, (8, 0)):
            saved, forked = (train(folder, rank, save=save) for save in (True, False))
            service.create_training_client_from_state_with_optimizer(f"tinker://{forked}/weights/@3").result()
            found = [store.find(f"tinker://{saved}/weights/three"), store.find(f"tinker://{forked}/weights/@3")]
            assert found[0].step == 3 and found[0].files == found[1].files, (folder, rank)


def pictured(step: int) -> tinker.Datum:
    image = types.ImageChunk(data=png(step), format="png", expected_tokens=6)
    text = types.EncodedTextChunk(tokens=[5, 6, 7])
    inputs = {"target_tokens": [*range(1, 7), 6, 7, 8], "weights": [0.0] * 6 + [1.0] * 3}
    return tinker.Datum(model_input=types.ModelInput(chunks=[image, text]), loss_fn_inputs=inputs)
