"""The meaning of a request: its operation, and its place among the requests of its model, sampler or session.

Clients send the same requests in a different order in each run, because they wait for answers concurrently. A place
does not depend on that order.

- Requests that train a model are numbered (`seq_id`), and matched by their number.
- Samples and samplers are numbered, too. A program that waits for several answers may number them differently in each
  run, so equal content is enough.
- All other requests are recognized by their content. Those that only read may be repeated or left out.

Polls, heartbeats, telemetry and the exchange of keys for tokens are not recorded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec

API = "/api/v1/"
# Requests whose answers are futures, with the fields that give their owner and their number there.
_ON_MODEL, _IN_SESSION = ("model_id", "seq_id"), ("session_id", "model_seq_id")
FUTURES = {
    "create_model": _IN_SESSION,
    "load_weights": _ON_MODEL,
    "forward_backward": _ON_MODEL,
    "optim_step": _ON_MODEL,
    "save_weights": _ON_MODEL,
    "save_weights_for_sampler": _ON_MODEL,
    "save_weights_external": _ON_MODEL,
    "create_custom_loss": ("session_id", "custom_loss_seq_id"),
    "asample": ("sampling_session_id", "seq_id"),
}
_NUMBERED = {"create_sampling_session": ("session_id", "sampling_session_seq_id")}
_BY_CONTENT = {"asample", "create_sampling_session"}
_POLLS = {"retrieve_future", "retrieve_futures", "cancel_future"}
_UNRECORDED = {"healthz", "telemetry", "session_heartbeat", "auth/token", *_POLLS}
CONFIGURATION = {"client/config", "client/dynamic_config"}
_READS = {"get_info", "weights_info", "sessions/search", "checkpoints/search"}
# Fields that give the place of a request, or that differ between runs of the same program.
_NO_CONTENT = {
    "asample": {"sampling_session_id", "seq_id"},
    "create_session": {"sdk_version"},
    "create_sampling_session": {"sampling_session_seq_id"},
    "save_weights_for_sampler": {"sampling_session_seq_id"},  # the SDK changes it when it repeats a save
}
_TOKENS = {"weights_access_token"}
_KEY = re.compile(rb"(?<!h)tml-[\w.~+/=-]+")  # but not in words such as html-page


@dataclass(frozen=True)
class ClientRequest:
    """A request in the form that cassettes compare.

    operation: for messages. place: only recorded requests of the same place are compared with it. owner: the id of the
    model, sampler or session in messages, or "". number: its number in its place, or None. strict: whether it must
    match by number. reads: whether it may be repeated or left out. content: the fields to compare; None for protobuf
    and other bytes. body: the bytes.
    """

    operation: str
    place: str
    owner: str
    number: int | None
    strict: bool
    reads: bool
    content: dict[str, Any] | None
    body: bytes

    @property
    def is_future(self) -> bool:
        """Whether its answer is the id of a future."""
        return self.operation in FUTURES or self.operation in ("forward", "unload_model")


def name_of(target: str) -> str:
    """The endpoint of a target, such as `optim_step`: the path below /api/v1/, or the whole path elsewhere."""
    path = urlsplit(target).path
    return path.removeprefix(API)


def is_unrecorded(name: str) -> bool:
    """Whether requests to an endpoint are never recorded."""
    return name in _UNRECORDED or (name.startswith("sessions/") and name.endswith("/finish"))


def is_binary(media: str) -> bool:
    """Whether a body of this Content-Type is neither JSON nor text nor a form."""
    return media != "" and "json" not in media and not media.startswith(("text/", "application/x-www-form-urlencoded"))


def future_of(answer: bytes) -> str:
    """The id of the future in the answer to a submit; "" if there is none."""
    return str((_json(answer) or {}).get("request_id", ""))


def asked(method: str, target: str, body: bytes, range_: str = "") -> ClientRequest:
    """The meaning of a request. ValueError: the body of a future is unreadable.

    body: decompressed, without secrets. range_: the bytes of the answer that are requested, as in the header Range.
    """
    name = name_of(target)
    if name == "forward_backward":
        return _chunk(body)
    content = _json(body)
    if name in FUTURES or name in _NUMBERED:
        return _numbered(name, body, content)
    kept = _kept(name, content)
    if name == "create_session":
        return ClientRequest(name, name, "", None, strict=False, reads=False, content=kept, body=body)
    if name == "join_sampling_session":
        owner = str((content or {}).get("sampling_session_id", ""))
        return ClientRequest(name, f"{name} {owner}", owner, None, strict=False, reads=False, content=kept, body=body)
    reads = method == "GET" or name in _READS
    place = f"{method} {target} {range_}".rstrip()
    operation = name if name in _READS else place
    return ClientRequest(operation, place, "", None, strict=False, reads=reads, content=kept, body=body)


def _chunk(body: bytes) -> ClientRequest:
    from google.protobuf.message import DecodeError

    from tinkerflow.backend.wire.tinker_pb2 import ForwardBackwardHeader

    try:
        header = ForwardBackwardHeader.FromString(body)
    except DecodeError as error:
        raise ValueError(f"forward_backward: {error}") from error
    name = "forward" if header.forward_only else "forward_backward"
    return ClientRequest(
        name, header.model_id, header.model_id, header.seq_id, strict=True, reads=False, content=None, body=body
    )


def _numbered(name: str, body: bytes, content: dict[str, Any] | None) -> ClientRequest:
    values = content or {}
    owner_field, number_field = FUTURES[name] if name in FUTURES else _NUMBERED[name]
    if name == "load_weights" and values.get("session_id") is not None:  # this request creates a model
        owner_field, number_field = _IN_SESSION
    owner, number = values.get(owner_field), values.get(number_field)
    if not isinstance(owner, str) or not isinstance(number, int):
        raise ValueError(f"{name}: {owner_field} is {owner!r} and {number_field} is {number!r}: must both be given")
    place = owner
    if owner_field == "session_id":
        place = f"{owner} {number_field}"
        owner = f"{owner}:train:{number}" if number_field == "model_seq_id" else owner
    return ClientRequest(
        name, place, owner, number, strict=name not in _BY_CONTENT, reads=False, content=_kept(name, values), body=body
    )


def _json(body: bytes) -> dict[str, Any] | None:
    try:
        values = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return None
    return values if isinstance(values, dict) else None


def _kept(name: str, content: dict[str, Any] | None) -> dict[str, Any] | None:
    """The fields to compare. A null field counts as absent."""
    if content is None:
        return None
    without = _NO_CONTENT.get(name, set()) | _TOKENS
    kept = {key: value for key, value in content.items() if value is not None and key not in without}
    if name == "create_session" and isinstance(tags := kept.get("tags"), list):
        kept["tags"] = sorted(map(str, tags))  # the SDK sends a set
    if name == "create_session" and kept.get("user_metadata") == {}:
        del kept["user_metadata"]  # absent and {} are the same to the service
    return kept


def without_secrets(body: bytes, secrets: set[bytes]) -> bytes:
    """A JSON body without API keys, and without the token of a shared checkpoint. secrets: keys of the request."""
    for secret in secrets:
        body = body.replace(secret, b"[key]")
    body = _KEY.sub(b"[key]", body)
    if any(name.encode() in body for name in _TOKENS) and (values := _json(body)) is not None:
        return msgspec.json.encode({key: value for key, value in values.items() if key not in _TOKENS})
    return body
