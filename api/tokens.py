"""Tokens that represent keys, so that a key itself is sent once an hour and not with every request.

They are JSON Web Tokens, signed by HMAC-SHA256 with a secret that all API processes share (Journal.service_secret) and
never reveal.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

import jwt
from jwt.utils import base64url_decode, base64url_encode

TOKEN_PREFIX = "eyJ"
TOKEN_SECRET = "tokens"  # the name of the service secret that signs tokens
TOKEN_LIFETIME = timedelta(hours=1)
_ALGORITHM = "HS256"
_USER = "tml:user:"


class BadTokenError(Exception):
    """The token was not signed here, or has expired. The text gives the reason."""

    def __init__(self, reason: str, *, expired: bool = False) -> None:
        """expired: whether the token is signed correctly, but has expired."""
        super().__init__(reason)
        self.expired = expired


@dataclass(frozen=True)
class Claims:
    """The contents of a token: the key's id ("" if no key is needed), its project, and the token's time of expiry.

    name: the key's. It fills the SDK's field for an e-mail address, because we have no addresses, and people recognize
    the names of their keys. sign_in: the id of the console sign-in that the token belongs to, or "".
    """

    key_id: str
    project: str
    name: str
    expires: datetime
    sign_in: str = ""


def sign_token(claims: Claims, secret: bytes, now: datetime) -> str:
    """Create a token with the claims that the SDK reads: sub, org_id, email, iat, exp (seconds since 1970)."""
    body = {
        "iss": "tinkerflow",
        "sub": _USER + (claims.key_id or claims.project),
        "key_id": claims.key_id,
        "org_id": claims.project,
        "email": claims.name,
        "iat": int(now.timestamp()),
        "exp": int(claims.expires.timestamp()),
        **({"sign_in": claims.sign_in} if claims.sign_in else {}),
    }
    return jwt.encode(body, secret, _ALGORITHM)


def read_token(token: str, secret: bytes, now: datetime) -> Claims:
    """Verify a token and read its claims. BadTokenError: the token is not ours, or has expired at `now`."""
    signature = token.rpartition(".")[2]
    try:
        # PyJWT would compare the times with the machine's clock instead of `now`.
        claims = jwt.decode(token, secret, [_ALGORITHM], options={"verify_exp": False, "verify_iat": False})
        # base64 has several texts for the same bytes, and we made only one of them
        if base64url_encode(base64url_decode(signature)).decode() != signature:
            raise jwt.InvalidSignatureError
    except jwt.InvalidTokenError as e:
        raise BadTokenError("the token is not valid: its signature does not match") from e
    expires = datetime.fromtimestamp(claims["exp"], now.tzinfo)
    if expires <= now:
        raise BadTokenError("the token has expired; exchange the key for a new one", expired=True)
    return Claims(claims["key_id"], claims["org_id"], claims["email"], expires, claims.get("sign_in", ""))
