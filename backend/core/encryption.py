"""Files encrypted with age (filippo.io/age), so that only the given recipients can read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyrage

from tinkerflow.backend.core.errors import UserError

SUFFIX = ".age"
MOST_RECIPIENTS = 10
_RULE = "must be a native age recipient (age1...) or an SSH public key (ssh-ed25519 or ssh-rsa)"


def check_recipients(recipients: Sequence[str], field: str) -> None:
    """UserError: an entry of `field` is not an age recipient, or there are too many entries."""
    if len(recipients) > MOST_RECIPIENTS:
        raise UserError(f"{field} has {len(recipients)} entries: must be at most {MOST_RECIPIENTS}")
    for index, text in enumerate(recipients):
        try:
            _recipient(text)
        except (pyrage.RecipientError, ValueError) as error:
            raise UserError(f"{field}[{index}] is {text[:80]!r}: {_RULE} ({error})") from error


def encrypt(files: Mapping[str, bytes], recipients: Sequence[str]) -> dict[str, bytes]:
    """Every file encrypted to all recipients, with `.age` added to its name. Any one recipient can decrypt it."""
    keys = [_recipient(text) for text in recipients]
    return {name + SUFFIX: pyrage.encrypt(data, keys) for name, data in files.items()}


def _recipient(text: str) -> pyrage.x25519.Recipient | pyrage.ssh.Recipient:
    return pyrage.ssh.Recipient.from_str(text) if text.startswith("ssh-") else pyrage.x25519.Recipient.from_str(text)
