"""Finds the files of a base model: in a folder, on the hub, or in Google Cloud Storage.

Files of a bucket are copied to this host once, next to the cache of the hub, and checked against the bucket's MD5 sums:

    $HF_HOME/tinkerflow/<bucket>--<prefix>/<version>/config.json, model-00001-of-00004.safetensors, ...

A version is a hash of the listed names, sizes and generations. A model that is replaced in the bucket gets a new
folder here, so weights in use never change.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tinkerflow.backend.core.disk import flush, folder_of_url, locked, make_folder, open_private
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.core.ids import hub_name

if TYPE_CHECKING:
    from tinkerflow.backend.store.gcs import Stamp  # importing it costs 1.4 s of CPU

TEXT_FILES = ("*.json", "*.jinja", "*.txt", "tokenizer.model")
HUB_FILES = ("*.safetensors", *TEXT_FILES)
_BUCKET = "gs://"
_PART = 16 * 2**20  # bytes of one read
_THREADS = 8  # parts read at the same time
_TOLD_SECONDS = 10.0  # between two lines of progress
_GIB = 2**30

log = logging.getLogger(__name__)


def find_model(name: str, files: Sequence[str] = HUB_FILES) -> Path:
    """The folder of a base model on this host.

    name: a folder, its `file://` URL, a hub id, a hub id with a revision (`org/model@revision`), or
    `gs://bucket/prefix`. Files of the hub or a bucket are copied here unless they already exist. files: patterns of
    the files' names. UserError: the model does not exist, or cannot be read.
    """
    if not name:
        raise UserError("base model '': give a folder, a hub id or a gs:// URL")
    if name.startswith(_BUCKET):
        return _from_bucket(name, files)
    folder = folder_of_url(name) if name.startswith("file://") else Path(name).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if (of_the_hub := hub_name(name)) is None:
        raise UserError(f"base model {name!r}: there is no folder {folder.resolve()}")
    return _from_hub(name, *of_the_hub, files)


def _from_hub(name: str, repository: str, revision: str, files: Sequence[str]) -> Path:
    # Imported here because a model in a folder should not wait for a network library.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=list(files))).resolve()
    except HFValidationError as error:
        raise UserError(f"base model {name!r}: neither a folder nor a hub id ({error})") from error
    except LocalEntryNotFoundError as error:
        raise UserError(
            f"base model {name!r}: not a folder, not in the local hub cache, and the hub cannot be reached; "
            "give a folder, or download it on a machine with a network"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise UserError(f"base model {name!r}: not a folder, and the hub did not provide it ({error})") from error


def _from_bucket(url: str, files: Sequence[str]) -> Path:
    from huggingface_hub.constants import HF_HOME

    from tinkerflow.backend.store.gcs import GcsBlobs

    place = url.removeprefix(_BUCKET).strip("/")
    if not place:
        raise UserError(f"base model {url!r}: the bucket is missing, as in gs://bucket/models/name")
    blobs = GcsBlobs(place)
    home = Path(HF_HOME) / "tinkerflow" / place.replace("/", "--")
    try:
        listed = {name: blobs.stamp(name) for name in blobs.children("") if _wanted(name, HUB_FILES)}
        if "config.json" not in listed:
            raise UserError(f"base model {url!r}: there is no {url}/config.json")
        make_folder(home)
        with locked(home / "lock"):
            folder = home / _version(listed)
            missing = {name: stamp for name, stamp in listed.items() if not (folder / name).exists()}
            missing = {name: stamp for name, stamp in missing.items() if _wanted(name, files)}
            _check_room(url, home, sum(stamp.size for stamp in missing.values()))
            _copy(url, blobs.read_range, missing, folder)
    except OSError as error:
        raise UserError(f"base model {url!r}: cannot be copied to {home} ({error})") from error
    return folder.resolve()


def _wanted(name: str, files: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in files)


def _version(listed: dict[str, Stamp]) -> str:
    text = "\n".join(f"{name} {stamp.size} {stamp.generation}" for name, stamp in sorted(listed.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _check_room(url: str, home: Path, needed: int) -> None:
    free = shutil.disk_usage(home).free
    if needed > free:
        raise UserError(
            f"base model {url!r}: copying needs {needed / _GIB:.1f} GiB in {home}, which has {free / _GIB:.1f} GiB "
            "free; set HF_HOME to a larger disk"
        )


def _copy(url: str, read: Callable[[str, int, int], bytes], files: dict[str, Stamp], folder: Path) -> None:
    """Copy the files. Each is renamed once it is complete, verified and on disk. OSError: a file is wrong."""
    make_folder(folder)
    told, done, whole = time.monotonic(), 0, sum(stamp.size for stamp in files.values())
    with ThreadPoolExecutor(_THREADS, "model") as threads:
        for name, stamp in files.items():
            draft = folder / f"{name}.part"
            open_private(draft, "wb").close()
            for size in threads.map(partial(_copy_part, read, draft, name), range(0, stamp.size, _PART)):
                done += size
                if time.monotonic() - told >= _TOLD_SECONDS:
                    told = time.monotonic()
                    log.info("base model %s: %.1f of %.1f GiB copied", url, done / _GIB, whole / _GIB)
            _check_sum(name, draft, stamp)
            flush(draft)
            draft.replace(folder / name)
            flush(folder)


def _copy_part(read: Callable[[str, int, int], bytes], draft: Path, name: str, start: int) -> int:
    part = read(name, start, _PART)
    with draft.open("r+b") as file:
        file.seek(start)
        file.write(part)
    return len(part)


def _check_sum(name: str, draft: Path, stamp: Stamp) -> None:
    """Raise OSError unless the draft equals the object. Composed objects have no MD5, so only sizes are compared."""
    with draft.open("rb") as file:
        md5 = hashlib.file_digest(file, "md5").digest() if stamp.md5 else b""
    if draft.stat().st_size != stamp.size or md5 != stamp.md5:
        said = f"{stamp.size} bytes with MD5 {stamp.md5.hex()}"
        raise OSError(f"{name} has {draft.stat().st_size} bytes with MD5 {md5.hex()}; the bucket lists {said}")
