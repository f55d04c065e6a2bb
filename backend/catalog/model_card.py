"""Facts about a base model that are known without loading it: read from its Hugging Face folder, stored as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Self

from tinkerflow.backend.catalog.model_source import find_model
from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.families import family_of, load_config, projections
from tinkerflow.backend.compute.models.family import open_unpacked
from tinkerflow.backend.compute.models.vision_config import open_processor
from tinkerflow.backend.compute.weights.files import read_object
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.core.ids import EMBEDDED, EMBEDDED_FOLDER, hub_name
from tinkerflow.backend.spec.commands import GroupInfo
from tinkerflow.backend.spec.images import ImageProcessor
from tinkerflow.backend.spec.limits import DEFAULT_MAX_CONTEXT, MODEL_CONTEXT

TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class ModelCard:
    """The facts about a base model.

    name: the configured name, which clients use. path: its absolute folder on this machine. tokenizer_id: the hub id or
    folder for `transformers.AutoTokenizer.from_pretrained`. max_context: the longest sequence served, in tokens.
    eos_token_ids: tokens that end an answer; may be empty. context_rule: the reason for max_context, for errors.
    parameters: the number of weights; a tied unembedding counts once. experts_per_token: 0 without experts.
    """

    name: str
    path: str
    tokenizer_id: str
    architecture: str
    vocab_size: int
    max_context: int
    eos_token_ids: tuple[int, ...]
    parameters: int
    tied: bool
    experts_per_token: int = 0
    context_rule: str = MODEL_CONTEXT

    @classmethod
    def load(cls, name: str, *, max_context: int = 0) -> Self:
        """Load the card of the model `name` (`find_model`), which is copied to this host on first use.

        max_context: 0 = the model's limit, up to 32768. UserError: a part is missing, unreadable or unsupported.
        """
        folder = find_model(name)
        config = load_config(folder, name=name)
        if not (folder / TOKENIZER).is_file():
            raise UserError(f"base model {name!r}: {folder} has no {TOKENIZER}; a fast tokenizer's file is needed")
        of_the_hub = hub_name(name)
        return cls(
            name=name,
            path=str(folder),
            tokenizer_id=str(folder) if of_the_hub is None else of_the_hub[0],
            architecture=config.architecture,
            vocab_size=config.vocab,
            max_context=context_of(name, config, max_context),
            eos_token_ids=_eos(name, folder, config),
            parameters=_count_parameters(name, folder, config),
            tied=config.tied,
            experts_per_token=config.experts_per_token,
        )

    def served_by(self, group: GroupInfo) -> Self:
        """The card with a context that fits the devices of the model's worker group."""
        if group.context >= self.max_context:
            return self
        return replace(self, max_context=group.context, context_rule=group.context_rule)

    def to_json(self) -> str:
        """The card as a JSON object."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The inverse of `to_json`, which also accepts cards without newer fields. ValueError: it is not a card."""
        values = json.loads(text)
        known = {field.name for field in fields(cls)}
        needed = {field.name for field in fields(cls) if field.default is MISSING}
        if not isinstance(values, dict) or not needed <= set(values) <= known:
            raise ValueError(f"not a model card: {text[:80]!r}; it must be an object with {', '.join(sorted(known))}")
        return cls(**{**values, "eos_token_ids": tuple(values["eos_token_ids"])})


def alias_of(name: str) -> str:
    """The alias of a base model for clients, or ""."""
    return EMBEDDED if Path(name).parts[-len(EMBEDDED_FOLDER) :] == EMBEDDED_FOLDER else ""


def public_name(name: str) -> str:
    """The name of a base model for clients and people: its alias, if it has one."""
    return alias_of(name) or name


@cache
def image_processor(folder: str) -> ImageProcessor | None:
    """The image processor of the model in a card's folder; None if the model takes only text.

    UserError: the processor needs an unsupported step.
    """
    return open_processor(load_config(folder), folder)


def context_of(name: str, config: ModelConfig, wanted: int) -> int:
    """The longest sequence to serve for a model, in tokens.

    wanted: 0 = the model's limit, up to 32768. UserError: it exceeds the model's limit.
    """
    if wanted > config.max_positions:
        raise UserError(f"base model {name!r}: max_context {wanted}; the model allows at most {config.max_positions}")
    return wanted or min(config.max_positions, DEFAULT_MAX_CONTEXT)


def _eos(name: str, folder: Path, config: ModelConfig) -> tuple[int, ...]:
    """The end tokens in generation_config.json, or else in config.json, as in transformers."""
    for file in ("generation_config.json", "config.json"):
        path = folder / file
        values = read_object(path, name) if path.is_file() else {}
        text = values.get("text_config") or {}  # of a model that also takes images
        ids = values.get("eos_token_id", text.get("eos_token_id"))
        if ids is not None:
            found = tuple(ids) if isinstance(ids, list) else (ids,)
            if not all(isinstance(i, int) and 0 <= i < config.vocab for i in found):
                raise UserError(
                    f"base model {name!r}: eos_token_id {ids!r} in {file}; must be ids in 0..{config.vocab - 1}"
                )
            return found
    return ()


def _count_parameters(name: str, folder: Path, config: ModelConfig) -> int:
    family = family_of(config)
    tensors = open_unpacked(family, config, folder, name)
    shapes = {tensor: stored.shape for tensor, stored in tensors.items() if not tensor.startswith(family.skipped)}
    if config.tied:
        unembed = projections(config)["unembed"]
        shapes.pop(f"{unembed.module}.weight", None)  # some exports store the shared matrix twice
    return sum(math.prod(shape) for shape in shapes.values())
