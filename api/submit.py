"""Stores requests for the engine, and looks up the base models and uploaded files that they name.

Invalid content is not refused but stored as a failed request. A forward_backward request is never refused, because a
refused chunk other than the first makes the SDK wait forever. Even a request with an unknown model or with unreadable
bytes gets an id, which then contains the reason (`refuse`), and polling the id returns the failure. Nothing is stored
for such an id, and a client that invents such an id only reads its own text.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import orjson
from fastapi.responses import Response

from tinkerflow.api.bodies import MEDIUM, SMALL, check_values
from tinkerflow.api.call import CONTROL_BYTES, Call
from tinkerflow.api.schemas import Wire
from tinkerflow.backend.catalog.model_card import ModelCard, alias_of, image_processor
from tinkerflow.backend.core.errors import NotFoundError, TinkerflowError, UserError
from tinkerflow.backend.core.ids import about_id
from tinkerflow.backend.core.suggest import did_you_mean
from tinkerflow.backend.journal import Journal, Kind, NewRequest
from tinkerflow.backend.spec.limits import MAX_ASSETS
from tinkerflow.backend.wire import NumSamples, OnModel, OnSampler, parse, with_files, with_seed
from tinkerflow.backend.wire.images import LOCATIONS
from tinkerflow.backend.wire.requests import MAX_LISTED

_REFUSED = "refused-"
T = TypeVar("T")
V = TypeVar("V")
M = TypeVar("M", bound=Wire)
_SAVES = (Kind.SAVE_WEIGHTS, Kind.SAVE_FOR_SAMPLER, Kind.SAVE_EXTERNAL)
_LONGEST_REASON = 500  # characters
_VALUES_PER_TOKEN = MAX_LISTED + 2  # numbers for each position of the context: the token, and the tokens to score there
_NUMBER_BYTES = 12  # bytes of a token id in JSON
_OTHER_VALUES = 2**18


# ------------------------------------------------------------------ responses to submissions
def json_response(values: Mapping[str, Any]) -> Response:
    """A JSON response that no model describes."""
    return Response(orjson.dumps(values), media_type="application/json")


def response(request_id: str, **more: Any) -> Response:
    """The response to every submission: the request's id, and fields that its kind adds."""
    return json_response({"request_id": request_id, **more})


def refuse(reason: str) -> str:
    """A request id that represents a user error with this reason."""
    return _REFUSED + base64.urlsafe_b64encode(reason[:_LONGEST_REASON].encode()).decode().rstrip("=")


def reason_of(request_id: str) -> str | None:
    """The reason in an id made by `refuse`, or None for any other id."""
    if not request_id.startswith(_REFUSED):
        return None
    text = request_id.removeprefix(_REFUSED)
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True).decode() or None
    except ValueError:  # not base64, or not text
        return None


# ------------------------------------------------------------------ storing requests
def content_hash(values: Mapping[str, Any], without: Collection[str] = ()) -> str:
    """A hash that is equal for equivalent JSON bodies. without: top-level fields to ignore."""
    kept = {key: value for key, value in values.items() if key not in without}
    return hashlib.sha256(orjson.dumps(kept, option=orjson.OPT_SORT_KEYS)).hexdigest()


def checked(check: Callable[[V], T], given: V) -> tuple[T, None] | tuple[None, str]:
    """The result of `check` for `given`, or the message of its UserError."""
    try:
        return check(given), None
    except UserError as e:
        return None, e.message


async def submit_for_model(
    call: Call,
    kind: Kind,
    check: Callable[[dict[str, Any]], object],
    *,
    body: bytes | None = None,
    not_content: Collection[str] = (),
) -> Response:
    """Store an operation on a model, and respond with its id.

    call: the operation's request. kind: the operation's kind. check: raises UserError for invalid content, which fails
    the operation. body: the JSON to store; None: the request's body. not_content: fields in which a repeated submission
    may differ.
    UserError: the body does not name its model or its seq_id. NotFoundError, ConflictError: see `Requests.submit`.
    """
    payload = await call.body() if body is None else body

    def submit() -> Response:
        values = parse(payload)
        address = OnModel.from_values(values)
        request = NewRequest(
            kind=kind,
            owner=call.owner,
            payload=payload,
            content_hash=content_hash(values, not_content),
            model_id=address.model_id,
            seq_id=address.seq_id,
            error=checked(check, values)[1],
            # A save without a name is kept for sampling only, and not stored.
            stores=kind in _SAVES and values.get("path") is not None,
        )
        return response(call.journal.requests.submit(request, call.limits), model_id=address.model_id)

    return await call.on_body(len(payload), submit)


def submit_sample(call: Call, body: bytes, values: dict[str, Any]) -> str:
    """Store a sample request of the tinker protocol, and return its id. values: the parsed `body`.

    Invalid content is stored as a failure.
    """
    address = OnSampler.from_values(values)
    filled, error = checked(partial(with_files, find=partial(uploaded_files, call)), values)
    stored = values if filled is None else filled
    request = NewRequest(
        kind=Kind.SAMPLE,
        owner=call.owner,
        payload=with_seed(body if stored is values else orjson.dumps(stored), stored),
        content_hash=content_hash(values),
        sampler_id=address.sampling_session_id,
        seq_id=address.seq_id,
        error=error or checked(NumSamples.from_values, values)[1],
        interactive=values.get("priority") == "interactive",
    )
    return call.journal.requests.submit(request, call.limits)


# ------------------------------------------------------------------ base models
def stored_cards(journal: Journal) -> dict[str, str]:
    """The cards of the served base models as JSON, under their names and aliases."""
    cards = {row.name: row.card for row in journal.base_models.all()}
    return {alias: card for name, card in cards.items() if (alias := alias_of(name))} | cards


def base_model_card(journal: Journal, base_model: str | None) -> ModelCard:
    """The card of a base model, by its name or alias. NotFoundError: no such base model is served here."""
    cards = stored_cards(journal)
    if base_model not in cards:
        near = about_id(base_model or "") or did_you_mean(base_model or "", cards)
        raise NotFoundError(f"base_model is {base_model!r}: must be one that is served here: {', '.join(cards)}{near}")
    return ModelCard.from_json(cards[base_model])


async def prompt_body(call: Call) -> bytes:
    """Read the body of a request with a prompt, limited to the size that the served models can use.

    BodyTooLargeError: the body contains more bytes or values than a prompt of the longest context can.
    """
    declared = call.request.headers.get("content-length", "")
    zipped = "content-encoding" in call.request.headers
    if declared.isdecimal() and int(declared) <= CONTROL_BYTES and not zipped:
        return await call.body()
    bytes_, values = await asyncio.to_thread(_prompt_bounds, call)
    body = await call.body(bytes_)
    if len(body) > CONTROL_BYTES:
        await call.on_body(len(body), check_values, body, values, "the limit for the served models")
    return body


async def parsed_prompt(call: Call, model: type[M]) -> M:
    """Parse the JSON body of `prompt_body` as `model`. UserError: names the field and the rule."""
    body = await prompt_body(call)
    return model.from_json(body) if len(body) <= SMALL else await call.on_body(len(body), model.from_json, body)


def _prompt_bounds(call: Call) -> tuple[int, int]:
    """The maximum numbers of bytes and of JSON values in a request with a prompt, for the served models."""
    cards = [ModelCard.from_json(row.card) for row in call.journal.base_models.all()]
    numbers = _VALUES_PER_TOKEN * max((card.max_context for card in cards), default=0)
    if any(_may_take_images(card) for card in cards):
        return call.services.settings.max_body_bytes, numbers + _OTHER_VALUES
    return MEDIUM + _NUMBER_BYTES * numbers, numbers + _OTHER_VALUES


def _may_take_images(card: ModelCard) -> bool:
    try:
        return image_processor(card.path) is not None
    except (OSError, TinkerflowError):  # the files of the model are not on this machine
        return True


# ------------------------------------------------------------------ uploaded files
def uploaded_files(call: Call, locations: Sequence[str]) -> Mapping[str, bytes]:
    """The project's files at these locations; other locations are left out.

    UserError: there are too many files, or the files would make the request too large.
    """
    ids = {
        location: location.removeprefix(LOCATIONS)
        for location in locations
        if location.startswith(LOCATIONS) and "\0" not in location  # databases cannot store NUL
    }
    if len(ids) > MAX_ASSETS:
        raise UserError(f"the request names {len(ids)} uploaded images: must be at most {MAX_ASSETS}")
    assets = call.journal.assets.found(set(ids.values()), call.owner)
    size = sum(assets[ids[location]].size_bytes for location in locations if ids.get(location) in assets)
    if size > (most := call.services.settings.max_body_bytes):
        raise UserError(f"the request's uploaded images have {size} bytes: must be at most {most} (max_body_bytes)")
    files = {}
    for location, asset_id in ids.items():
        if (asset := assets.get(asset_id)) is not None:
            try:
                files[location] = call.services.store.uploads.read_file(asset.id, asset.piece, 1)
            except NotFoundError:
                continue  # the file was deleted meanwhile
    return files
