"""An fsspec file system in memory with planned failures: crashes, truncated writes, lost answers, refusals."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from fsspec import AbstractFileSystem

# The failure of an operation. "before" and "after" refer to its effect.
Wrong = Literal[
    "crash before",  # the process is gone
    "crash after",
    "crash, cut",  # half of the bytes were written, and the process is gone
    "503 before",  # the answer is an error
    "503 after",  # a proxy's answer: the request had arrived
    "timeout after",
    "412",  # the answer was lost, and the repeated request found the object of the first
    "timeout, cut",  # a stream that was closed by an error published its half
    "cut",  # the same, unnoticed
]
Operation = Literal["create", "replace", "remove", "read"]


class Crash(BaseException):
    """The process is gone: nothing after this reaches the store."""


@dataclass(frozen=True)
class Fault:
    """A failure of the next `operation` on a path that contains `where`."""

    operation: Operation
    where: str
    wrong: Wrong


class FaultyFileSystem(AbstractFileSystem):
    """Objects by path. Each fault occurs once."""

    cachable = False
    protocol = "faulty"

    def __init__(self) -> None:
        super().__init__()
        self.objects: dict[str, bytes] = {}
        self.faults: list[Fault] = []
        self.met: list[Fault] = []
        self.dead = False
        self._lock = threading.RLock()

    def restart(self) -> None:
        """Start a new process, without the planned faults of the old process."""
        self.dead, self.faults = False, []

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        with self._lock:
            wrong = self._begin("create" if mode == "create" else "replace", path)
            if mode == "create" and path in self.objects:
                raise FileExistsError(path)
            if wrong in ("crash, cut", "timeout, cut", "cut"):
                self.objects[path] = value[: len(value) // 2]
            else:
                self.objects[path] = bytes(value)
            self._end(wrong, path)

    def rm_file(self, path: str) -> None:
        with self._lock:
            wrong = self._begin("remove", path)
            if path not in self.objects:
                raise FileNotFoundError(path)
            del self.objects[path]
            self._end(wrong, path)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        with self._lock:
            wrong = self._begin("read", path)
            if path not in self.objects:
                raise FileNotFoundError(path)
            self._end(wrong, path)
            return self.objects[path][start:end]

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        self._alive()
        if path not in self.objects:
            raise FileNotFoundError(path)
        return {"name": path, "size": len(self.objects[path]), "type": "file"}

    def modified(self, path: str) -> datetime:
        self.info(path)
        return datetime(2026, 1, 1, tzinfo=UTC)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        self._alive()
        assert not detail
        below = path.rstrip("/") + "/"
        with self._lock:
            found = {below + name[len(below) :].partition("/")[0] for name in self.objects if name.startswith(below)}
        if not found:
            raise FileNotFoundError(path)
        return sorted(found)

    def _alive(self) -> None:
        if self.dead:
            raise Crash

    def _begin(self, operation: Operation, path: str) -> Wrong | None:
        self._alive()
        for fault in self.faults:
            if fault.operation == operation and fault.where in path:
                self.faults.remove(fault)
                self.met.append(fault)
                if fault.wrong == "crash before":
                    self.dead = True
                    raise Crash
                if fault.wrong == "503 before":
                    raise OSError(f"503 for {path}")
                return fault.wrong
        return None

    def _end(self, wrong: Wrong | None, path: str) -> None:
        match wrong:
            case "crash after" | "crash, cut":
                self.dead = True
                raise Crash
            case "503 after":
                raise OSError(f"503 for {path}")
            case "timeout after" | "timeout, cut":
                raise TimeoutError(f"no answer for {path}")
            case "412":
                raise FileExistsError(path)
