"""Every family against Hugging Face transformers and PEFT in torch. A new family needs a row in `FAMILY_SHAPE`.

The tests compare logprobs, an adapter's effect, gradients and steps, tokens of the real sampler, and packed rows. CI
runs them for one family of each kind of layer (the sampler's for three families), and for up to three families whose
file has changed. `pytest --families tests/compute/test_parity.py` runs them for all families.
"""

from __future__ import annotations

import contextlib
import functools
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch
from tests.compiled import forget_programs
from tests.compute.closeness import close, close_logprobs
from tests.compute.conftest import (
    FAMILY_SHAPE,
    SEEING,
    VOCAB,
    add_adapter,
    ask,
    build,
    examples,
    forward,
    gradients,
    inputs_of,
    result_of,
    seeing,
)

from tinkerflow.backend.catalog.merging import merge
from tinkerflow.backend.catalog.peft_import import import_adapter
from tinkerflow.backend.compute.models.families import load_config, registered
from tinkerflow.backend.spec.checkpoint import Digest
from tinkerflow.backend.spec.commands import (
    CreateAdapter,
    Example,
    ExportAdapter,
    FetchState,
    ImportAdapter,
    LoraSpec,
    OptimStep,
    PublishSnapshot,
    StoredState,
    WriteState,
)
from tinkerflow.backend.spec.optimizers.adamw import AdamParams
from tinkerflow.backend.store.peft import ADAPTER, ADAPTER_CONFIG, adapter_config

LENGTHS = (1, 7, 33, 60)
# A family that adds a tower to another family's decoder differs from it only in names and images.
DECODERS = [name for name in registered() if SEEING.get(name) not in registered() or name in FAMILY_SHAPE]
ADAM = AdamParams(learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-6, weight_decay=0.1)
# One family of each kind of layer; `test_representative_families_cover_every_kind_of_layer` pins this.
REPRESENTATIVES = {
    "qwen3",
    "olmo2",
    "phi3",
    "qwen3_moe",
    "gpt_oss",
    "qwen3_next",
    "deepseek_v3",
    "gemma4",
    "gemma4_text",
    "qwen3_vl",
    "qwen3_5",
}
# Latent attention and shared keys are other kinds of cached state: only `--families` compares their tokens.
SAMPLED = {"qwen3", "gpt_oss", "qwen3_next"}
FAMILY_FILES = "backend/compute/models/families"
MOST_CHANGED = 3


@functools.cache
def changed_families():
    """The families whose file differs from the branch `main`, or from the last commit.

    Empty if more than `MOST_CHANGED` differ: the representatives test a change of all families.
    """
    root = Path(__file__).parents[2]
    changed = set()
    for base in ("main...", "HEAD~1"):
        command = ["git", "-C", str(root), "diff", "--name-only", base, "--", FAMILY_FILES]
        listed = subprocess.run(command, capture_output=True, text=True, check=False)
        changed |= {Path(line).stem for line in listed.stdout.splitlines()}  # empty outside a repository
    return changed if len(changed) <= MOST_CHANGED else set()


def skip_unless(usual, family, config):
    if not config.getoption("--families") and family not in usual | changed_families():
        pytest.skip("runs with --families, or when the family's file changes")


@pytest.fixture
def sampled(request):
    """Skip the test for most representatives."""
    skip_unless(SAMPLED, request.node.callspec.params["family"], request.config)


@pytest.fixture(scope="module", params=registered())
def family(request, tmp_path_factory):
    """A model of each family, its executor, and the parts that PEFT adapts module by module.

    Tests are skipped for a family that is not a representative, unless its file has changed. PEFT adapts fused experts
    in its own way: tests/compute/test_experts.py tests them.
    """
    thorough = {"qwen3_vl_moe"} if request.config.getoption("--thorough") else set()  # a test of images
    skip_unless(REPRESENTATIVES | thorough, request.param, request.config)
    model = build(tmp_path_factory.mktemp(request.param), request.param, tied=False)
    yield model, model.executor(), {"train_mlp": not load_config(model.folder).experts}
    forget_programs()  # no other family needs them


def layer_kinds(config):
    """The kinds of layers and their options, as text: classes, norms, routers, and parts that a layer may lack."""
    kinds = {"tower"} if config.vision else set()
    for layer in config.decoder_layers:
        mlp = layer.feed_forward
        kinds |= {type(layer.attention).__name__, type(mlp).__name__, str(layer.places)}
        kinds |= {type(part).__name__ for part in (getattr(mlp, "router", None), layer.layer_input) if part}
        kinds |= {
            option for option in ("sinks", "gated", "value_norm", "biases") if getattr(layer.attention, option, None)
        }
        kinds |= {f"fused {type(part).__name__}" for part in (layer.attention, mlp) if getattr(part, "fused", False)}
        kinds |= {f"qk_norm of {layer.attention.qk_norm}"} if hasattr(layer.attention, "qk_norm") else set()
    return kinds


def test_representative_families_cover_every_kind_of_layer(tmp_path_factory):
    kinds = {
        name: layer_kinds(load_config(build(tmp_path_factory.mktemp(name), name, tied=False).folder))
        for name in registered()
    }
    assert set().union(*kinds.values()) == set().union(*(kinds[name] for name in REPRESENTATIVES))


@contextlib.contextmanager
def in_peft(model, executor, adapter_id, folder):
    """The adapter in torch. The base model is restored at the end."""
    import peft  # here, because the import takes seconds in each process that collects tests

    state = executor.execute(ExportAdapter(adapter_id, optimizer=False))
    (folder / ADAPTER_CONFIG).write_bytes(adapter_config("base", state.spec, state.weights))
    safetensors.numpy.save_file(dict(state.weights), folder / ADAPTER)
    adapted = peft.PeftModel.from_pretrained(model.model, str(folder), is_trainable=True)
    try:
        yield adapted
    finally:
        adapted.unload().requires_grad_(True)  # PEFT froze it


def test_logprobs_of_the_base_model(family):
    base, executor, _ = family
    same_logprobs(base, executor, examples(LENGTHS))


@pytest.mark.parametrize(
    ("model", "parts"),
    [("qwen3", {}), ("qwen3", {"train_attn": False}), ("qwen2", {})],
)
def test_adapter_and_its_gradients_as_peft_has_them(request, model, tmp_path, parts):
    """tests/store/test_peft.py tests train_unembed on a tied model, because PEFT wraps its lm_head in its own way."""
    parts = {**parts, "train_unembed": False}
    base = request.getfixturevalue(model)
    executor = base.executor()
    add_adapter(executor, "a", **parts)
    data = examples(LENGTHS, targets=2)
    with in_peft(base, executor, "a", tmp_path) as by_torch:
        result = forward(executor, "a", data, backward=True)
        loss = torch.zeros(())
        for example, found in zip(data, result.logprobs, strict=True):
            scored = scores(by_torch, example)
            close_logprobs(found, scored.detach().numpy())
            loss = loss - (scored * torch.tensor(example.weights_TK)).sum()
        assert result.loss_sum == pytest.approx(float(loss.detach()), rel=1e-4)
        loss.backward()
        same_gradients(gradients(executor, "a"), by_torch)


def test_two_optimizer_steps_equal_peft(family, tmp_path):
    base, executor, parts = family
    add_adapter(executor, "steps", **parts)
    with in_peft(base, executor, "steps", tmp_path) as by_torch:
        trained = {named(name): each for name, each in by_torch.named_parameters() if each.requires_grad}
        rule = torch.optim.AdamW(trained.values(), lr=1e-3, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
        for step in range(2):
            data, kept = examples(LENGTHS, seed=step), executor.execute(ExportAdapter("steps", True, keep="folder"))
            pieces = executor.take_kept(WriteState("steps", "folder"))
            rule.zero_grad()
            loss = -sum((scores(by_torch, one) * torch.tensor(one.weights_TK)).sum() for one in data)
            loss.backward()
            result = forward(executor, "steps", data, backward=True)
            assert result.loss_sum == pytest.approx(float(loss.detach()), rel=1e-4)
            same_gradients(gradients(executor, "steps"), by_torch)
            rule.step()
            executor.execute(OptimStep("steps", ADAM))
            weights = executor.execute(ExportAdapter("steps", optimizer=False)).weights
            for name, wanted in trained.items():
                close(weights[name], wanted.detach().numpy(), ulps=2**14)
    # The last step is repeated from a recovery snapshot that was taken before it, as after a crash: the bits are equal.
    files = {"part-00000.safetensors": Digest.of(b"")}
    stored = StoredState(kept.spec, kept.step, kept.optimizer, "folder", files)
    executor.keep_fetched(FetchState("again", stored), pieces)
    executor.execute(ImportAdapter("again", stored))
    again = forward(executor, "again", data, backward=True)
    for one, other in zip(again.logprobs, result.logprobs, strict=True):
        np.testing.assert_array_equal(one, other)
    executor.execute(OptimStep("again", ADAM))
    for name, array in executor.execute(ExportAdapter("again", optimizer=False)).weights.items():
        np.testing.assert_array_equal(array, weights[name])


def test_an_adapter_that_peft_saves_is_imported_and_trains_on(family, tmp_path):
    base, executor, parts = family
    add_adapter(executor, "out", **parts)
    data = examples(LENGTHS)
    with in_peft(base, executor, "out", tmp_path) as by_torch, torch.no_grad():
        by_torch.save_pretrained(tmp_path / "saved", save_embedding_layers=True)
        wanted = [scores(by_torch, example)[:, 0].numpy() for example in data]
    files = [(tmp_path / "saved" / file).read_bytes() for file in (ADAPTER_CONFIG, ADAPTER)]
    state, own = (
        import_adapter(load_config(base.folder), *files),
        executor.execute(ExportAdapter("out", optimizer=False)),
    )
    assert state.spec == own.spec and sorted(state.weights) == sorted(own.weights)
    executor.execute(ImportAdapter("in", state))
    results = [forward(executor, each, data, backward=True) for each in ("out", "in")]
    for found, expected in zip(results[1].logprobs, wanted, strict=True):
        close_logprobs(found, expected)
    trained = []
    for each in ("out", "in"):
        executor.execute(OptimStep(each, ADAM))
        trained.append(executor.execute(ExportAdapter(each, optimizer=False)).weights)
    for name, array in trained[0].items():
        np.testing.assert_array_equal(array, trained[1][name])


def test_a_merged_model_is_the_base_model_with_its_adapter(family, tmp_path):
    """Includes experts, fused in the files or not. Transformers reads the written files."""
    base, executor, _ = family
    add_adapter(executor, "merged")
    merge(base.folder, executor.execute(ExportAdapter("merged", optimizer=False)), tmp_path / "merged")
    merged = replace(base, model=type(base.model).from_pretrained(tmp_path / "merged").eval())
    data = examples(LENGTHS)
    for found, example in zip(forward(executor, "merged", data).logprobs, data, strict=True):
        close_logprobs(found, merged.logprobs(example)[:, 0])


@pytest.mark.usefixtures("sampled")
@pytest.mark.parametrize("family", DECODERS, indirect=True)
def test_greedy_tokens_equal_transformers_with_and_without_cached_prefixes(family, tmp_path):
    base, executor, parts = family
    add_adapter(executor, "tokens", **parts)
    executor.execute(PublishSnapshot("tokens", "tokens"))
    prompt = np.random.default_rng(5).integers(0, VOCAB, 150).tolist()
    asked = [ask(name, prompt, 64, snapshot_id="tokens") for name in ("first", "second")]
    (first,), (second,) = (result_of(executor, one).sequences for one in asked)
    with in_peft(base, executor, "tokens", tmp_path) as by_torch:
        wanted = _generated(by_torch, prompt, 64)
    assert first.tokens_T.tolist() == second.tokens_T.tolist() == wanted
    np.testing.assert_array_equal(first.logprobs_T, second.logprobs_T)


@pytest.mark.usefixtures("sampled")
@pytest.mark.parametrize("family", DECODERS, indirect=True)
def test_the_sampler_scores_as_training_does(family):
    """Includes adapters of experts. The base model's own tokens equal those of transformers.

    Most shapes are those of the test before, because each other shape is a program to compile.
    """
    base, executor, _ = family
    add_adapter(executor, "scored")
    executor.execute(PublishSnapshot("scored", "scored"))
    prompt = np.random.default_rng(6).integers(0, VOCAB, 30).tolist()
    plain = result_of(executor, ask("base", prompt, 35))
    assert plain.sequences[0].tokens_T.tolist() == _generated(base.model, prompt, 35)
    own = result_of(executor, ask("own", prompt, 35, snapshot_id="scored", prompt_logprobs=True))
    (sequence,) = own.sequences
    whole = np.asarray([*prompt, *sequence.tokens_T], np.int32)
    example = Example(whole[:-1], whole[1:, None], np.ones((len(whole) - 1, 1), np.float32))
    (expected,) = forward(executor, "scored", (example,)).logprobs
    close_logprobs(own.prompt_logprobs_T[1:], expected[:29], ulps=1024)
    close_logprobs(sequence.logprobs_T, expected[29:], ulps=1024)


@pytest.mark.usefixtures("sampled")
@pytest.mark.parametrize("family", DECODERS, indirect=True)
def test_packed_examples_equal_separate_ones(family):
    """A row contains one short example. The tests before compare rows of several examples with torch."""
    _, executor, _ = family
    add_adapter(executor, "packed")
    data = examples(LENGTHS)
    together = forward(executor, "packed", data).logprobs
    for found, example in zip(together, data, strict=True):
        close_logprobs(found, forward(executor, "packed", (example,)).logprobs[0])


def _shown(examples):
    """Examples of text and of images."""
    text, *others = examples((20, 60, 33, 7), targets=2)
    return text, seeing(others[0], (3, 2, 3), (20, 4, 2)), seeing(others[1], (0, 1, 5)), others[2]


@pytest.mark.parametrize(
    "family",
    ["qwen3_vl", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("qwen3_vl_moe", "qwen3_5"))],
    indirect=True,
)
def test_images_in_one_row_equal_transformers(family, tmp_path):
    base, executor, parts = family
    add_adapter(executor, "sees", **parts)
    data = _shown(examples)
    with in_peft(base, executor, "sees", tmp_path) as by_torch:
        scored = [scores(by_torch, example) for example in data]
        loss = -sum((one * torch.tensor(example.weights_TK)).sum() for one, example in zip(scored, data, strict=True))
        loss.backward()
        result = forward(executor, "sees", data, backward=True)
        for found, wanted in zip(result.logprobs, scored, strict=True):
            close_logprobs(found, wanted.detach().numpy())
        same_gradients(gradients(executor, "sees"), by_torch)
    base.model.model.rope_deltas = None  # transformers keeps the deltas of the last images


@pytest.mark.parametrize("family", ["qwen3_vl"], indirect=True)
def test_images_in_one_row_equal_separate_ones(family):
    _, executor, parts = family
    add_adapter(executor, "sees", **parts)
    data, before = _shown(examples), executor.execute(ExportAdapter("sees", optimizer=True))
    result = forward(executor, "sees", data, backward=True)
    for found, example in zip(result.logprobs, data, strict=True):
        close_logprobs(found, forward(executor, "sees", (example,)).logprobs[0])
    # Repeated from the state before, as after a crash: the bits are equal.
    executor.execute(ImportAdapter("replayed", before))
    again = forward(executor, "replayed", data, backward=True)
    for one, other in zip(again.logprobs, result.logprobs, strict=True):
        np.testing.assert_array_equal(one, other)
    found = gradients(executor, "replayed")
    for name, gradient in gradients(executor, "sees").items():
        np.testing.assert_array_equal(found[name], gradient)


@pytest.mark.parametrize(
    "reference",
    ["qwen3-tied", *(pytest.param(f"{name}-tied", marks=pytest.mark.thorough) for name in SEEING)],
    indirect=True,
)
def test_logprobs_of_the_base_model_with_tied_embeddings(reference):
    """Families state tied embeddings in different fields of their files."""
    same_logprobs(reference, reference.executor(), examples(LENGTHS))


def _generated(by_torch, prompt, tokens):
    """The greedy tokens after the prompt, by transformers."""
    ids = torch.tensor([prompt])
    plain = {"do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    with torch.no_grad():
        return by_torch.generate(input_ids=ids, max_new_tokens=tokens, **plain)[0, len(prompt) :].tolist()


def scores(by_torch, example):
    """Logprobs [T, K] of the example's targets, which torch can differentiate."""
    logits = by_torch(**inputs_of(example)).logits[0]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(example.targets_TK.astype(np.int64)))


def same_logprobs(base, executor, data):
    """Assert that a model with a fresh adapter, which changes nothing, has the logprobs of the base model in torch."""
    executor.execute(CreateAdapter("fresh", LoraSpec(4), 0))
    for example, found in zip(data, forward(executor, "fresh", data).logprobs, strict=True):
        close_logprobs(found, base.logprobs(example)[:, 0])


def named(parameter: str) -> str:
    return parameter.replace(".default.", ".")


def same_gradients(found, by_torch):
    expected = {named(name): each.grad.numpy() for name, each in by_torch.named_parameters() if each.grad is not None}
    assert sorted(found) == sorted(expected)
    for name, gradient in expected.items():
        assert np.abs(found[name] - gradient).max() < 1e-3 * max(1.0, np.abs(gradient).max()), name


def test_bfloat16_is_close(qwen3):
    executor = qwen3.executor(dtype="bfloat16")
    executor.execute(CreateAdapter("fresh", LoraSpec(4), 0))
    data = examples((30,))
    found = forward(executor, "fresh", data).logprobs[0]
    assert np.abs(found - qwen3.logprobs(data[0])[:, 0]).mean() < 0.1
