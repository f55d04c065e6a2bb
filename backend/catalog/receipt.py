"""Receipts: small signed statements of all inputs and results of a training run.

A receipt contains no data, only digests of the inputs and results of a run in order, at up to MARKS steps. Each digest
covers all earlier inputs or results. Two receipts, or a receipt and a history, are compared mark by mark. The signature
is Ed25519 (RFC 8032) with a key that the service keeps in its database. The receipt contains the public key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from tinkerflow.backend.catalog.history import past_requests
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.spec.history import PastRequest, digest

if TYPE_CHECKING:
    from tinkerflow.backend.journal import Journal
    from tinkerflow.backend.store import Store

FORMAT = "tinkerflow-receipt-1"
MARKS = 64
_SECRET = "receipts"


@dataclass(frozen=True)
class Mark:
    """The run after a request: the optimizer steps so far, and digests of all inputs and of all results so far."""

    step: int
    seq_id: int
    inputs: str
    results: str


class Link(NamedTuple):
    """The parts of a request that a receipt covers. step: the optimizer step that it made, None for other requests."""

    seq_id: int
    kind: str
    step: int | None
    payload_hash: str
    result_hash: str
    error: str | None

    @classmethod
    def of(cls, past: PastRequest, step: int | None) -> Link:
        """The link of a request."""
        return cls(past.seq_id, past.kind, step, digest(past.payload), past.result_hash, past.error)


def marks(links: Iterable[Link]) -> Iterator[Mark]:
    """A mark after each optimizer step, and one after the last request."""
    inputs = results = b""
    last: Mark | None = None
    step = 0
    for link in links:
        inputs = hashlib.sha256(inputs + link.kind.encode() + link.payload_hash.encode()).digest()
        results = hashlib.sha256(results + (link.result_hash or f"error: {link.error}").encode()).digest()
        step = step if link.step is None else link.step
        last = Mark(step, link.seq_id, inputs.hex(), results.hex())
        if link.step is not None:
            yield last
            last = None
    if last is not None:
        yield last


def make_receipt(journal: Journal, store: Store, run_id: str, now: datetime) -> dict[str, Any]:
    """The signed receipt of a run with a history, as JSON values. StoreError: its history is damaged."""
    model = journal.models.get(run_id, None)
    steps = journal.histories.steps(run_id)
    history = past_requests(journal, store, run_id)
    found = list(marks(Link.of(past, steps.get(past.seq_id)) for past in history))
    kept = found if len(found) <= MARKS else [found[len(found) * (n + 1) // MARKS - 1] for n in range(MARKS)]
    group = next((row.worker_group for row in journal.base_models.all() if row.name == model.base_model), None)
    served = group or {}
    receipt = {
        "format": FORMAT,
        "run": {
            "id": model.id,
            "base_model": model.base_model,
            "rank": model.rank,
            "optimizer": model.optimizer,
            "seed": model.seed,
            "created_at": model.created_at.isoformat(),
        },
        "service": {
            "release": version("tinkerflow"),
            "programs": served.get("programs", ""),
            "devices": served.get("devices", []),
        },
        "marks": [{"step": m.step, "seq_id": m.seq_id, "inputs": m.inputs, "results": m.results} for m in kept],
        "issued_at": now.isoformat(),
    }
    key = Ed25519PrivateKey.from_private_bytes(journal.keys.service_secret(_SECRET))
    receipt["public_key"] = key.public_key().public_bytes_raw().hex()
    return {**receipt, "signature": key.sign(_signed(receipt)).hex()}


def check_receipt(receipt: Any) -> list[Mark]:
    """Verify a receipt, and return its marks. UserError: it is not a receipt with a valid signature."""
    if not isinstance(receipt, dict) or receipt.get("format") != FORMAT:
        raise UserError(f"receipt: it is not a {FORMAT} of `tinkerflow receipt`")
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(receipt["public_key"]))
        key.verify(bytes.fromhex(receipt["signature"]), _signed(receipt))
        return [Mark(**mark) for mark in receipt["marks"]]
    except InvalidSignature as error:
        raise UserError("receipt: the signature does not match: it was changed after it was issued") from error
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"receipt: a part is absent or malformed ({error!r})") from error


def first_difference(receipt: Iterable[Mark], found: Iterable[Mark]) -> str | None:
    """Describe the first difference between a history and a receipt for people. Returns None if they agree."""
    by_request = {mark.seq_id: mark for mark in found}
    before = 0
    for mark in receipt:
        other = by_request.get(mark.seq_id)
        span = f"steps {before + 1} to {mark.step}" if mark.step > before + 1 else f"step {mark.step}"
        if other is None:
            return f"{span}: the history has no request {mark.seq_id}"
        for part in ("inputs", "results"):
            if getattr(mark, part) != getattr(other, part):
                return f"{span}: the {part} differ from the receipt"
        before = mark.step
    return None


def _signed(receipt: Mapping[str, Any]) -> bytes:
    """The bytes to sign: the receipt without its signature, with sorted keys."""
    parts = {name: value for name, value in receipt.items() if name != "signature"}
    return orjson.dumps(parts, option=orjson.OPT_SORT_KEYS)
