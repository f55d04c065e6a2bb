"""The most common uses of the SDK, in code that every SDK from 0.25 to the newest can run.

`python lesson.py URL BASE_MODEL` prints the results as JSON. It imports none of our modules, because older SDKs run it
in their own processes (test_versions.py).
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import tinker
from tinker import types

TOKENS = [11, 22, 33, 44, 55, 66]


def lesson(url: str, base_model: str) -> dict[str, Any]:
    """Train, save, load, sample, score and list with fixed seeds, and return the results, which are always the same."""
    service = tinker.ServiceClient(base_url=url, api_key="tml-test", user_metadata={"purpose": "lesson"})
    trainer = done(service.create_lora_training_client(base_model, rank=4, seed=9, user_metadata={"by": "lesson"}))
    run = trainer.get_info().model_id
    losses = []
    for _ in range(3):
        step = trainer.forward_backward([datum()], "cross_entropy")
        trainer.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        losses.append(step.result().metrics["loss:sum"])
    trained = scored(trainer)
    saved = trainer.save_state("kept").result().path
    resumed = done(service.create_training_client_from_state_with_optimizer(saved))
    prompt = types.ModelInput.from_ints(TOKENS)
    sampler = done(trainer.save_weights_and_get_sampling_client())
    params = types.SamplingParams(max_tokens=6, seed=5, temperature=1.0)
    sampled = sampler.sample(prompt=prompt, num_samples=2, sampling_params=params).result()
    named = trainer.save_weights_for_sampler("named").result().path
    again = done(service.create_sampling_client(model_path=named))
    rest = service.create_rest_client()
    info = rest.get_training_run(run).result()
    return {
        "version": tinker.__version__,
        "served": [model.model_name for model in service.get_server_capabilities().supported_models],
        "losses": losses,
        "trained": trained,
        "resumed": scored(resumed),
        "next_step": resumed.optim_step(types.AdamParams(learning_rate=0.0)).result().metrics["optimizer_step"],
        "sampled": [(sequence.tokens, sequence.logprobs, sequence.stop_reason) for sequence in sampled.sequences],
        "scored": sampler.compute_logprobs(prompt).result(),
        "scored_again": again.compute_logprobs(prompt).result(),
        "run": [info.base_model, info.lora_rank, info.user_metadata],
        "listed": run in [each.training_run_id for each in rest.list_training_runs(limit=1000).result().training_runs],
        "in_session": run in rest.get_session(run.split(":")[0]).result().training_run_ids,
        "checkpoints": sorted(each.checkpoint_id for each in rest.list_checkpoints(run).result().checkpoints),
        "paths": [path.removeprefix(f"tinker://{run}/") for path in (saved, named)],
    }


def done(made: Any) -> Any:
    """The created client. Newer SDKs return a future of it."""
    return made.result() if hasattr(made, "result") else made


def datum() -> types.Datum:
    """Each token predicts the next."""
    inputs: Any = {"target_tokens": [*TOKENS[1:], 1], "weights": [1.0] * len(TOKENS)}
    return types.Datum(model_input=types.ModelInput.from_ints(TOKENS), loss_fn_inputs=inputs)


def scored(trainer: Any) -> list[float]:
    """The log probabilities of the datum's targets."""
    logprobs = trainer.forward([datum()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"]
    return [float(value) for value in logprobs.tolist()]


if __name__ == "__main__":
    print(json.dumps(lesson(*sys.argv[1:])), flush=True)
    os._exit(0)  # running threads of the SDK's transport may abort the interpreter at its shutdown
