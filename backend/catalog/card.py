"""Cards of trained models: Markdown for people, with the header that the Hugging Face hub reads.

https://huggingface.co/docs/hub/model-cards describes the header. `model_card.ModelCard` describes a base model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import yaml

from tinkerflow.backend.catalog.history import past_requests
from tinkerflow.backend.core.errors import NotFoundError
from tinkerflow.backend.core.ids import hub_name
from tinkerflow.backend.spec.checkpoint import EXTERNAL_WEIGHTS, SAMPLER_WEIGHTS, WEIGHTS, CheckpointPath, Saved
from tinkerflow.backend.spec.history import chain, digest, last_request
from tinkerflow.backend.wire import tinker_pb2 as pb

if TYPE_CHECKING:
    from tinkerflow.backend.journal import Journal
    from tinkerflow.backend.journal.curves import StepFigures
    from tinkerflow.backend.store import Store

_SAVES = {"save_weights": WEIGHTS, "save_for_sampler": SAMPLER_WEIGHTS, "save_weights_external": EXTERNAL_WEIGHTS}
_POINTS = 10  # rows of the curve
_EMPTY = {"parent": "the base model"}  # meanings of empty metadata
_OF_BATCHES = ("trained_tokens", "tokens", "rows_left_out")  # metrics of pipelines that measure no quality
# Mixtures of experts that PEFT 0.21 adapts by fusing their experts. They have no other MLPs, which it would take for
# experts.
_ADAPTED_MIXTURES = ("qwen3_moe", "minimax_m2")
_HEADER = re.compile(r"\A---\n(.*?\n)---\n", re.DOTALL)  # of a README on the hub


@dataclass
class TrainedData:
    """The data in a state of a run. Call `add` with each successful request in order.

    steps: optimizer steps. rows: how many times each row was trained, by the row's digest. tokens: trained tokens,
    counting repetitions. A row counts from the next optim_step on. Before that, it is only in gradients, which no
    checkpoint contains. loaded: the checkpoint that the run began with or loaded last; None if it began with a fresh
    adapter.
    """

    steps: int = 0
    rows: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    loaded: str | None = None
    _accumulated: list[tuple[str, int]] = field(default_factory=list)  # rows in the gradients: digests and tokens

    @property
    def data_digest(self) -> str:
        """One digest of the distinct rows, independent of their order."""
        return chain(sorted(self.rows))

    def add(self, kind: str, payload: bytes) -> None:
        """Count a successful request."""
        if kind == "forward_backward":
            for datum in pb.ForwardBackwardRequest.FromString(payload).data:
                size = sum(len(chunk.encoded_text.tokens) // 4 for chunk in datum.model_input)
                self._accumulated.append((row_digest(datum), size))
        elif kind == "optim_step":
            self.steps += 1
            for key, size in self._accumulated:
                self.rows[key] = self.rows.get(key, 0) + 1
                self.tokens += size
            self._accumulated = []
        elif (loaded := loaded_by(kind, payload)) is not None:
            self.rows, self.tokens, self.steps, self._accumulated = {}, 0, 0, []  # it replaces weights and gradients
            self.loaded = loaded

    def lines(self) -> list[str]:
        """Sentences about the data."""
        trained = sum(self.rows.values())
        return [
            f"trained on {trained} rows, {len(self.rows)} of them different, {self.tokens:,} tokens",
            f"digest of the rows: {self.data_digest}",
            f"began with {self.loaded or 'a fresh adapter'}",
        ]


def row_digest(datum: pb.Datum) -> str:
    """The identity of a row: tokens, targets and all other inputs of its loss."""
    return digest(datum.SerializeToString(deterministic=True))


def loaded_by(kind: str, payload: bytes) -> str | None:
    """The checkpoint that a request loads, or None."""
    return str(orjson.loads(payload)["path"]) if kind in ("load_model", "load_weights") else None


def saved_by(run_id: str, kind: str, payload: bytes) -> str | None:
    """The named checkpoint that a request of a run saves, or None."""
    if kind not in _SAVES or not (name := orjson.loads(payload).get("path")):
        return None
    return f"tinker://{run_id}/{_SAVES[kind]}/{name}"


def trained_data(journal: Journal, store: Store, saved: Saved) -> TrainedData | None:
    """The data in a checkpoint, or None if its run has no history. StoreError: the history is damaged."""
    try:
        if not journal.histories.exists(saved.run_id):
            return None
    except NotFoundError:  # an imported checkpoint, or a new database
        return None
    step = CheckpointPath.parse(saved.path).step
    last = None if step is None else last_request(journal.histories.steps(saved.run_id), step)
    found = TrainedData()
    for past in past_requests(journal, store, saved.run_id):
        if past.error is None:
            found.add(past.kind, past.payload)
        if past.request_id == saved.meta.request_id or (last is not None and past.seq_id >= last):
            return found
    return None


def card(journal: Journal | None, store: Store, saved: Saved, base: Path, *, merged: bool = False) -> str:
    """The card of a checkpoint: training, data, curve, evaluation and license.

    journal: None if there is none; the card then contains only facts of the checkpoint itself. saved: the checkpoint.
    base: the folder of its base model. merged: whether the adapter is merged into the model. StoreError: the run's
    history is damaged.
    """
    license_, source = license_of(base)
    hub = hub_name(saved.meta.base_model)
    named = hub[0] if hub is not None else Path(saved.meta.base_model).name
    header = {"base_model": named} if hub is not None else {}
    header |= {"license": license_} if license_ else {}
    header["library_name"] = "peft" if saved.spec.rank and not merged else "transformers"
    kind = f"An adapter of rank {saved.spec.rank}" if saved.spec.rank else "All parameters"
    name = _run_name(journal, saved)
    title = f"{name}: {saved.name}" if name else saved.name
    lines = [
        *("---", yaml.safe_dump({**header, "tags": ["tinkerflow"]}, sort_keys=True).strip(), "---", ""),
        *(f"# {title}", "", f"{kind} of `{named}`, after {saved.step} steps with {saved.optimizer}.", ""),
        *(f"- checkpoint `{saved.path}`, saved at {saved.created_at:%Y-%m-%d %H:%M} UTC",),
        *(f"- {key}: {value or _EMPTY.get(key, '')}" for key, value in sorted(saved.meta.user_metadata.items())),
        *_usage(saved, base, hub[0] if hub is not None else "", merged=merged),
    ]
    data = None if journal is None else trained_data(journal, store, saved)
    facts = [f"- {line}" for line in data.lines()] if data is not None else ["The run has no history of its data."]
    lines += ["", "## Data", "", *facts]
    if journal is not None:
        lines += _training(journal, saved)
    lines += ["", "## License", "", f"Base model: {license_ or 'not known'} ({source})."]
    return "\n".join(lines) + "\n"


def _run_name(journal: Journal | None, saved: Saved) -> str:
    try:
        return "" if journal is None else journal.models.run(saved.run_id, None).model.user_metadata.get("name", "")
    except NotFoundError:  # an imported checkpoint
        return ""


def _usage(saved: Saved, folder: Path, hub: str, *, merged: bool) -> Iterator[str]:
    """How to load the checkpoint, from Python and from a client of the service.

    folder: the base model's folder. hub: its id, or "".
    """
    yield from ("", "## Use", "")
    hint = merge_hint(saved, folder)
    if merged or not hint:
        base = "FOLDER" if merged else hub
        kind = "AutoModelForImageTextToText" if "text_config" in _config(folder) else "AutoModelForCausalLM"
        yield from ("In Python, where `FOLDER` is the folder of this file:", "", "```python")
        yield from () if merged else ("from peft import PeftModel",)
        yield from (f"from transformers import {kind}, AutoTokenizer", "")
        yield from (f'tokenizer = AutoTokenizer.from_pretrained("{base}")',)
        yield from (f'model = {kind}.from_pretrained("{base}")',)
        yield from () if merged else ('model = PeftModel.from_pretrained(model, "FOLDER")',)
        yield from ("```", "")
    else:
        yield from (f"{hint}.", "")
    yield from (
        *("From a client of OpenAI's API, with the service that stores the checkpoint:", "", "```python"),
        *("from openai import OpenAI", ""),
        'client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="tml-local")',
        'messages = [{"role": "user", "content": "..."}]',
        f'answer = client.chat.completions.create(model="{saved.path}", messages=messages)',
        "```",
    )


def merge_hint(saved: Saved, folder: Path) -> str:
    """How to get a folder for transformers; "" if PEFT loads the adapter onto a base model of the hub.

    folder: the base model's folder.
    """
    if not saved.spec.rank:
        why = "These are the parameters alone"
    elif saved.spec.train_mlp and _omits_experts(_config(folder)):
        why = "PEFT with transformers 5 omits the experts, or the MLPs beside them, of an adapter of this model"
    elif hub_name(saved.meta.base_model) is None:
        why = "The base model is a folder of the service"
    else:
        return ""
    return f"{why}: `tinkerflow checkpoint merge {saved.path} --to FOLDER` writes a whole model that transformers load"


def _omits_experts(config: Mapping[str, Any]) -> bool:
    """Whether PEFT adapts only a part of the MLPs of a model with this `config.json`, without an error."""
    from tinkerflow.backend.compute.models.families import parse_config  # see `_config`

    kind = config.get("model_type")
    return kind is not None and kind not in _ADAPTED_MIXTURES and parse_config(config, name=kind).experts > 0


def _config(folder: Path) -> Mapping[str, Any]:
    """The fields of the model's `config.json`; {} if its folder has none."""
    # Imported here, because the client also imports this module, and has no packages for weights.
    from tinkerflow.backend.compute.weights.files import read_object

    path = folder / "config.json"
    return read_object(path, str(folder)) if path.is_file() else {}


def _training(journal: Journal, saved: Saved) -> Iterator[str]:
    try:
        points = [p for p in journal.curves.of_run(saved.run_id, None).points if p.step <= saved.step]
        metrics = journal.run_metrics.of_run(saved.run_id, None)
    except NotFoundError:
        return
    if points:
        yield from ("", "## Curve", "", "| step | loss | gradient norm | learning rate |", "|---|---|---|---|")
        yield from (_row(point) for point in _spread(points))
    measured = [
        (one.name, [(step, v) for step, v in one.points if step <= saved.step])
        for one in metrics
        if one.name not in _OF_BATCHES
    ]
    if any(values for _, values in measured):
        yield from ("", "## Evaluation", "", "| metric | step | value |", "|---|---|---|")
        yield from (f"| {name} | {values[-1][0]} | {values[-1][1]:.4g} |" for name, values in measured if values)


def _spread(points: Sequence[StepFigures]) -> list[StepFigures]:
    """At most _POINTS of the points, including the first and the last."""
    if len(points) <= _POINTS:
        return list(points)
    return [points[round(n * (len(points) - 1) / (_POINTS - 1))] for n in range(_POINTS)]


def _row(point: StepFigures) -> str:
    figures = (point.loss, point.grad_norm, point.learning_rate)
    return f"| {point.step} | " + " | ".join("" if one is None else f"{one:.4g}" for one in figures) + " |"


def license_of(folder: Path) -> tuple[str, str]:
    """The license in a model's folder, or "", and the file that states it."""
    readme = folder / "README.md"
    found = _HEADER.match(readme.read_text(errors="replace")) if readme.is_file() else None
    if found is not None:
        try:
            header: Any = yaml.safe_load(found[1])
        except yaml.YAMLError:
            header = None
        if isinstance(header, dict) and (stated := header.get("license_name") or header.get("license")):
            return str(stated), "its README.md"
    for file in sorted(folder.glob("LICENSE*")):
        first = next((line.strip() for line in file.read_text(errors="replace").splitlines() if line.strip()), "")
        return first, f"its file {file.name}"
    return "", "its folder has no README.md or LICENSE that states it"
