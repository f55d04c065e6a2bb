"""JSON Web Tokens: what a key is exchanged for, so that the key itself travels once an hour and not with every request.

Signed by HMAC-SHA256 (RFC 7515, HS256) under a secret that all API processes share (Journal.service_secret) and that
nobody is ever shown. Only tokens with exactly our header are looked at, so no other algorithm can be talked into.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from dataclasses import dataclass
from datetime import datetime, timedelta

import orjson

SECRET = "tokens"
LIFETIME = timedelta(hours=1)
USER, ORGANIZATION = "tml:user:", "tml:organization:"


class BadTokenError(Exception):
    """The token is not one of ours, or has expired; the text says which."""


@dataclass(frozen=True)
class Claims:
    """What a token says: the key (id "" where none is needed) and its project, and until when.

    name: of the key. It stands where an e-mail address is expected: we know of none, and people know their keys.
    """

    key_id: str
    project: str
    name: str
    expires: datetime


def sign(claims: Claims, secret: bytes, now: datetime) -> str:
    """The token, with the claims that the SDK reads: sub, org_id, email, iat, exp (seconds since 1970)."""
    body = {
        "iss": "tinkerflow",
        "sub": USER + (claims.key_id or claims.project),
        "key_id": claims.key_id,
        "org_id": claims.project,
        "email": claims.name,
        "iat": int(now.timestamp()),
        "exp": int(claims.expires.timestamp()),
    }
    content = f"{_HEADER}.{_encode(orjson.dumps(body))}"
    return f"{content}.{_signature(content, secret)}"


def verify(token: str, secret: bytes, now: datetime) -> Claims:
    """What the token says, when it is ours and has not expired; else BadTokenError."""
    content, _, signature = token.rpartition(".")
    header, _, body = content.partition(".")
    right = _signature(content, secret)
    if not hmac.compare_digest(signature.encode(), right.encode()) or header != _HEADER:
        raise BadTokenError("the token is not one of ours: its signature does not fit")
    said = orjson.loads(_decode(body))
    expires = datetime.fromtimestamp(said["exp"], now.tzinfo)
    if expires <= now:
        raise BadTokenError("the token has expired; exchange the key for a new one")
    return Claims(said["key_id"], said["org_id"], said["email"], expires)


def _signature(content: str, secret: bytes) -> str:
    return _encode(hmac.digest(secret, content.encode(), hashlib.sha256))


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _decode(text: str) -> bytes:
    try:
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except (binascii.Error, ValueError) as e:
        raise BadTokenError("the token is not one of ours: it cannot be read") from e


_HEADER = _encode(b'{"alg":"HS256","typ":"JWT"}')
