"""In every process of a traced service, record the files that run while a file $HOUSE_TRACE/on-* exists.

Python imports a module of this name when it starts, if the module's folder is on PYTHONPATH.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType

FOLDER = Path(os.environ["HOUSE_TRACE"])
LOOK_SECONDS = 0.01
seen: set[str] = set()
on = False


def note(frame: FrameType, event: str, _: object) -> None:
    """Record the file of a called function. Python calls this for every function call, in every thread."""
    if on and event == "call":
        seen.add(frame.f_code.co_filename)


def watch() -> None:
    """Switch the recording on and off with the file $HOUSE_TRACE/on-*, and write the recorded files."""
    global on
    while True:
        wanted = next(iter(FOLDER.glob("on-*")), None)
        if wanted is not None and not on:
            seen.clear()
            on, window = True, wanted.name
            (FOLDER / f"began-{window}.{os.getpid()}").touch()
        elif wanted is None and on:
            on = False
            noted = FOLDER / f"noted-{window}.{os.getpid()}"
            noted.write_text(json.dumps(sorted(seen)))
            noted.rename(FOLDER / f"ran-{window}.{os.getpid()}")
        time.sleep(LOOK_SECONDS)


(FOLDER / f"process.{os.getpid()}").touch()
threading.setprofile(note)
sys.setprofile(note)
threading.Thread(target=watch, daemon=True).start()
