"""Names of models in the OpenAI- and Anthropic-compatible endpoints.

<base model>                          without an adapter
tinker://<run>/sampler_weights/<name> a checkpoint; `weights` can be sampled too
<training run id>                     its newest weights for sampling
champion/<name>                       the newest champion that a pipeline promoted under this name
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache

from tinkerflow.api.call import Call
from tinkerflow.api.submit import base_model_card, stored_cards
from tinkerflow.api.text import Tokenizer
from tinkerflow.backend.catalog.champions import champion_names, newest_champion
from tinkerflow.backend.catalog.control_tokens import ControlTokens
from tinkerflow.backend.catalog.model_card import ModelCard, alias_of
from tinkerflow.backend.core.errors import ContextExceededError, NotFoundError, UserError
from tinkerflow.backend.core.ids import about_id
from tinkerflow.backend.core.suggest import did_you_mean
from tinkerflow.backend.journal import CheckpointKind, CheckpointView
from tinkerflow.backend.store.blobs import Blobs, open_blobs
from tinkerflow.backend.store.failures import store_errors

CHAMPION = "champion/"
_open = cache(open_blobs)  # one object for each URL
_LONGEST_TOKENS = 16  # characters per token, on average over a whole context; usual texts have about four
_SHORT = 2000  # characters that are tokenized on the event loop, in under a millisecond
_LISTED = 1000  # newest checkpoints of the project, of any kind; the list contains sampler weights only


@dataclass(frozen=True)
class Target:
    """A model to sample. name: as in the request. checkpoint: None for the base model itself.

    tokenizer: the base model's tokenizer. call: its threads tokenize long texts.
    """

    name: str
    card: ModelCard
    checkpoint: CheckpointView | None
    tokenizer: Tokenizer
    call: Call = field(repr=False, compare=False)

    @property
    def path(self) -> str | None:
        """The checkpoint's path, or None for the base model."""
        return None if self.checkpoint is None else self.checkpoint.path

    @property
    def longest_text(self) -> int:
        """The maximum number of characters in a text."""
        return _LONGEST_TOKENS * self.card.max_context

    async def encode(self, text: str, field: str, control: ControlTokens | None = None) -> list[int]:
        """Tokenize a text. ContextExceededError: the text is longer than any context; the error names `field`.

        control: encodes a rendered conversation; None: the text is a plain prompt, which `Tokenizer.encode` encodes.
        Without a limit, tokenizing the largest body would take minutes and tens of gigabytes.
        """
        encode = self.tokenizer.encode if control is None else control.encode
        if len(text) > (most := self.longest_text):
            rule = f"at most {most}, {_LONGEST_TOKENS} for each token of the context"
            size = f"{len(text)} characters"
            message = f"{field} has {size}: must have {rule}"
            raise ContextExceededError(message, context=self.card.max_context, size=size, most=most)
        if len(text) <= _SHORT:
            return encode(text)
        return await self.call.slowly(encode, text)


@dataclass(frozen=True)
class Listed:
    """A model in a list: a base model, a champion or a checkpoint of the project.

    root: the base model or checkpoint behind the name. context: the most tokens in a prompt and its answer.
    """

    name: str
    base_model: str
    context: int
    root: str
    owned_by: str
    created_at: datetime


async def resolve(call: Call, model: str) -> Target:
    """Find the model that a request names.

    NotFoundError: the caller may use no such model. UserError: the model cannot be sampled.
    """
    card, checkpoint = await asyncio.to_thread(_find, call, model)
    return Target(model, card, checkpoint, await call.services.tokenizers.load(card), call)


async def find(call: Call, model: str) -> Listed:
    """Find the model that a request names, in the form of lists. Raises the errors of `resolve`."""
    card, checkpoint = await asyncio.to_thread(_find, call, model)
    if checkpoint is not None:
        return _of_checkpoint(model, checkpoint, card.max_context)
    return next(listed for listed in await asyncio.to_thread(_base_models, call) if listed.name == model)


async def list_models(call: Call) -> Sequence[Listed]:
    """Base models, the champions whose weights the caller may use, and the project's newest checkpoints."""
    return await asyncio.to_thread(_list, call)


def champions_of(call: Call, *paths: str) -> dict[str, str]:
    """The champions among the checkpoints at `paths`: each name with its time of promotion, or "" if unknown."""
    with work_folder(call) as work:
        newest = {name: newest_champion(work, name) for name in champion_names(work)}
    return {
        name: champion.get("promoted_at", "")
        for name, champion in newest.items()
        if champion is not None and champion["weights"] in paths
    }


def _list(call: Call) -> list[Listed]:
    listed = _base_models(call)
    contexts = {model.name: model.context for model in listed}
    with work_folder(call) as work:
        names = champion_names(work)
    for name in names:
        try:
            card, checkpoint = _find(call, CHAMPION + name)
        except UserError:
            continue  # the champion of another project, or one with deleted weights
        if checkpoint is not None:
            listed.append(_of_checkpoint(CHAMPION + name, checkpoint, card.max_context))
    for saved in call.journal.checkpoints.page(call.owner, limit=_LISTED).rows:
        if saved.kind == CheckpointKind.SAMPLER_WEIGHTS and saved.base_model in contexts:
            listed.append(_of_checkpoint(saved.path, saved, contexts[saved.base_model]))
    return listed


def _base_models(call: Call) -> list[Listed]:
    rows = [(row, ModelCard.from_json(row.card)) for row in call.journal.base_models.all()]
    return [
        Listed(name, row.name, card.max_context, row.name, "tinkerflow", row.registered_at)
        for row, card in rows
        for name in (row.name, alias_of(row.name))
        if name
    ]


def _of_checkpoint(name: str, saved: CheckpointView, context: int) -> Listed:
    return Listed(name, saved.base_model, context, saved.path, saved.owner, saved.created_at)


def _find(call: Call, model: str) -> tuple[ModelCard, CheckpointView | None]:
    journal = call.journal
    if model.startswith(CHAMPION):
        model = _champion(call, model)
    elif not model.startswith("tinker://"):
        if (card := stored_cards(journal).get(model)) is not None:
            return ModelCard.from_json(card), None
        model = _newest_of_run(call, model)
    checkpoint = journal.checkpoints.get(model, call.owner)
    if checkpoint.unsampled:
        raise UserError(f"model is {model!r}: {checkpoint.unsampled}")
    return base_model_card(journal, checkpoint.base_model), checkpoint


def _newest_of_run(call: Call, run_id: str) -> str:
    try:
        newest = call.journal.models.run(run_id, call.owner).last_sampler_checkpoint
    except NotFoundError as error:
        rule = "a base model that is served here, a tinker:// path, a training run's id, or champion/NAME"
        near = about_id(run_id) or did_you_mean(run_id, stored_cards(call.journal))
        raise NotFoundError(f"model {run_id!r} does not exist: must be {rule}{near}") from error
    if newest is None:
        raise NotFoundError(f"model {run_id!r} has no sampler weights yet: call save_weights_for_sampler")
    return newest.path


def _champion(call: Call, model: str) -> str:
    champion = None
    with suppress(UserError), work_folder(call) as work:  # UserError: an invalid name
        champion = newest_champion(work, model.removeprefix(CHAMPION))
    with suppress(NotFoundError):  # another project's champion does not exist for this caller
        if champion is not None:
            return call.journal.checkpoints.get(str(champion["weights"]), call.owner).path
    raise NotFoundError(f"model {model!r} does not exist: nothing was promoted under this name in this key's project")


@contextmanager
def work_folder(call: Call) -> Iterator[Blobs]:
    """The folder that pipelines write to. Within this context, OSErrors become StoreErrors that name the folder."""
    url = call.services.settings.pipelines_url
    with store_errors(url, "read the files of pipelines"):
        yield _open(url)
