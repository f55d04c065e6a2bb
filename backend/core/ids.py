"""The id maker, the forms of ids that the SDK computes itself, kinds of checkpoints in paths, and hub ids."""

from __future__ import annotations

import re
import secrets
from enum import StrEnum
from pathlib import Path

KEY_PREFIX = "tml-"  # of every API key
LOCAL_OWNER = "local"  # the project of all callers of a server without keys, which only its own machine reaches
IMPORTED = "imported"  # the name of an imported checkpoint in its run
_ALPHABET = "0123456789abcdefghijklmnopqrstuv"
NAME_RULE = "1 to 128 letters, digits, '.', '_' or '-', not starting with '.'"
_KINDS = {"": "a session", "train": "a training run", "sample": "a sampler", "loss": "a custom loss"}
_OTHERS = {"req": "a request", "key": "a key", "upload": "an upload"}
_OURS = re.compile(
    r"(tinker://)?(?P<session>(sess|import)-[0-9a-v]{16})(:(?P<kind>train|sample|loss):(?P<number>\d+))?/?"
    rf"|(?P<other>{'|'.join(_OTHERS)})-[0-9a-v]{{16}}"
)
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


class CheckpointKind(StrEnum):
    """The path segment of a checkpoint: training state, weights for sampling, or weights exported for downloads."""

    WEIGHTS = "weights"
    SAMPLER_WEIGHTS = "sampler_weights"
    EXTERNAL_WEIGHTS = "external_weights"


def new_id(prefix: str) -> str:
    """A fresh id such as `sess-k3v9…`: the prefix and 16 random characters of [0-9a-v] (80 bits)."""
    bits = int.from_bytes(secrets.token_bytes(10))
    return prefix + "-" + "".join(_ALPHABET[bits >> shift & 31] for shift in range(0, 80, 5))


def model_id(session_id: str, model_seq_id: int) -> str:
    """`{session}:train:{n}`: the SDK computes this id itself after it creates a model from a checkpoint."""
    return f"{session_id}:train:{model_seq_id}"


def session_of(model: str) -> str:
    """The id of the session in which a model was created, from the model's id."""
    return model.partition(":train:")[0]


def sampler_id(session_id: str, sampling_session_seq_id: int) -> str:
    """`{session}:sample:{n}`."""
    return f"{session_id}:sample:{sampling_session_seq_id}"


def about_id(text: str) -> str:
    """The end of an error message about one of our ids given instead of another value, with the likely value, or "".

    The text depends only on the form of the id, and never reveals whether the id exists.
    """
    if (found := _OURS.fullmatch(text)) is None:
        return ""
    if found["other"]:
        return f" (this is the id of {_OTHERS[found['other']]})"
    session, kind = found["session"], found["kind"] or ""
    run = f"{session}:train:{found['number'] if kind == 'train' else 0}"
    runs = "" if kind == "train" else f"a training run of {'its session' if kind else 'it'} is {run!r}, "
    return f" (this is the id of {_KINDS[kind]}: {runs}a checkpoint is 'tinker://{run}/sampler_weights/NAME')"


def inflight_id(model_id: str) -> str:
    """`{model}:inflight`: the sampling snapshot that all inflight samplers of a model share."""
    return f"{model_id}:inflight"


def custom_loss_id(session_id: str, custom_loss_seq_id: int) -> str:
    """`{session}:loss:{n}`."""
    return f"{session_id}:loss:{custom_loss_seq_id}"


def is_name(text: str) -> bool:
    """Whether `text` may name a checkpoint: see NAME_RULE (one path segment, no traversal)."""
    return _NAME.fullmatch(text) is not None


def base_model_name(given: str) -> str:
    """The name of a base model given as a folder, a hub id or a URL: the same text without trailing slashes."""
    return given.rstrip("/") or given


EMBEDDED = "tinkerflow/tiny"  # an alias of the embedded model; its name is its folder
EMBEDDED_FOLDER = ("models", "tinkerflow", "tiny-qwen3")  # in the data dir


def hub_name(name: str) -> tuple[str, str] | None:
    """The hub id and the revision ("" if none) in a base model's name; None for a folder or a URL."""
    repository, _, revision = name.partition("@")
    elsewhere = "://" in name or name.startswith(("/", ".", "~")) or repository.count("/") > 1
    return None if elsewhere or Path(name).is_dir() else (repository, revision)
