"""The program inside a sandbox: reads commands, executes each with limits, and writes the results.

`sandbox` passes the text of this file to a Python interpreter, perhaps in a container. Therefore it imports only the
standard library. Each line of its standard input and output is a JSON object.
"""

import base64
import ctypes
import json
import os
import platform
import resource
import signal
import struct
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

_MOST = 2**20  # most bytes of each output
_FILE = 2**24  # most bytes of each file
_PROCESSES = 256
_NOT_STARTED = 127  # the status that shells give a command that they cannot start
_DROP_CAPABILITY, _SET_DUMPABLE, _NO_NEW_PRIVILEGES = 24, 4, 38  # of prctl(2)
_BIND = 0x5000  # of mount(2): MS_BIND and MS_REC
_MOUNT_SETATTR, _HERE, _RECURSIVE, _READ_ONLY = 442, -100, 0x8000, 1  # of mount_setattr(2), in Linux 5.12 and newer
_SECCOMP = 22  # of prctl(2)
_SOCKETS = {"x86_64": (0xC000003E, 41), "aarch64": (0xC00000B7, 198)}  # architectures, and socket(2) on them
_libc = ctypes.CDLL(None, use_errno=True)


def own_files(megabytes: int, folders: list[str]) -> None:
    """Make all files read-only in this mount namespace, and /tmp and /dev/shm empty folders in memory.

    folders: more empty folders. If there are any, the root becomes a new folder in memory that contains them and all
    other folders.
    """
    attributes = (ctypes.c_uint64 * 4)(_READ_ONLY)
    _check(_libc.syscall(_MOUNT_SETATTR, _HERE, b"/", _RECURSIVE, ctypes.byref(attributes), ctypes.sizeof(attributes)))
    for folder in (b"/tmp", b"/dev/shm"):
        if Path(folder.decode()).is_dir():
            _check(_libc.mount(b"tmpfs", folder, b"tmpfs", 0, f"size={megabytes}m,mode=1777".encode()))
    if folders:
        root, own = Path("/tmp/root"), {Path(name).parts[1] for name in folders} | {"tmp"}
        for name in [*folders, "/tmp"]:
            (root / name[1:]).mkdir(parents=True)
        for old in Path("/").iterdir():
            new = root / old.name
            if old.name in own:
                continue
            if old.is_symlink():
                new.symlink_to(old.readlink())
            elif old.is_dir():
                new.mkdir()
                _check(_libc.mount(bytes(old), bytes(new), None, _BIND, None))
        os.chroot(root)


def no_other_sockets() -> None:
    """Refuse sockets outside the network namespace, such as Unix sockets, and io_uring, which could make them."""
    architecture, socket = _SOCKETS[platform.machine()]
    program = [
        (0x20, 0, 0, 4),  # load the architecture
        (0x15, 0, 9, architecture),  # another one: end the process
        (0x20, 0, 0, 0),  # load the number of the system call
        (0x35, 7, 0, 0x40000000),  # a number of x32: end the process
        (0x15, 4, 0, 425),  # io_uring_setup: refuse
        (0x15, 0, 4, socket),  # not socket: allow
        (0x20, 0, 0, 16),  # load the family of the socket
        (0x15, 2, 0, 2),  # AF_INET: allow
        (0x15, 1, 0, 10),  # AF_INET6: allow
        (0x06, 0, 0, 0x00050001),  # refuse: EPERM
        (0x06, 0, 0, 0x7FFF0000),  # allow
        (0x06, 0, 0, 0x80000000),  # end the process
    ]
    text = b"".join(struct.pack("=HBBI", *step) for step in program)
    _check(_libc.prctl(_SECCOMP, 2, struct.pack("@HP", len(program), _address(text)), 0, 0))


def _address(text: bytes) -> int:
    return ctypes.cast(ctypes.c_char_p(text), ctypes.c_void_p).value or 0


def _check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def limit(seconds: float, megabytes: int, *, isolated: bool) -> None:
    """Limit the process that executes the program, and drop its capabilities, so that it cannot inspect this one."""
    cpu = max(1, round(seconds))
    for name, most in (
        (resource.RLIMIT_AS, megabytes * 2**20),
        (resource.RLIMIT_CPU, cpu),
        (resource.RLIMIT_FSIZE, _FILE),
        (resource.RLIMIT_NPROC, _PROCESSES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(name, (most, most + (name == resource.RLIMIT_CPU)))
    for capability in range(64):
        _libc.prctl(_DROP_CAPABILITY, capability, 0, 0, 0)
    _libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    if isolated:
        no_other_sockets()


def execute(spec: dict[str, Any], folder: str, *, isolated: bool) -> dict[str, Any]:
    """Execute a command. Returns its result. folder: for its files. isolated: this process has its own namespaces."""
    seconds, megabytes, first = spec["seconds"], spec["megabytes"], os.getpid() == 1
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        program, *arguments = spec["command"]
        try:
            for name, content in spec["files"].items():
                path = Path(folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(base64.b64decode(content))
            given.write(spec["stdin"].encode(errors="surrogatepass"))
            given.seek(0)
            process = subprocess.Popen(
                [sys.executable if program == "python" else program, *arguments],
                cwd=spec["folder"] or folder,
                stdin=given,
                stdout=out,
                stderr=err,
                env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", **spec["variables"]},
                preexec_fn=lambda: limit(seconds, megabytes, isolated=isolated),  # noqa: PLW1509  this process has one thread
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            # The sandbox's memory is full, or the command is too long, has a NUL character, or does not exist.
            with suppress(OSError):
                given.close()  # the pipe may hold input that could not be written
            return {"status": _NOT_STARTED, "timed_out": False, "output": "", "errors": f"{error}\n"}
        try:
            timed_out = process.wait(spec["wall_seconds"]) == -signal.SIGXCPU
        except subprocess.TimeoutExpired:
            timed_out = True
        with suppress(ProcessLookupError):  # the program and all that it started have ended
            os.kill(-1 if first else -process.pid, signal.SIGKILL)
        process.wait()
        texts = {}
        for name, file in (("output", out), ("errors", err)):
            file.seek(0)
            texts[name] = file.read(_MOST).decode(errors="replace")
    return {"status": process.returncode, "timed_out": timed_out, **texts}


def main() -> None:
    """Execute the commands on standard input one after another. The first line describes the sandbox."""
    sandbox = json.loads(sys.stdin.readline())
    if sandbox["isolated"]:
        own_files(sandbox["megabytes"], sandbox["folders"])
    for name in sandbox["folders"]:
        Path(name).mkdir(parents=True, exist_ok=True)
    _libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for line in sys.stdin:
            print(json.dumps(execute(json.loads(line), folder, isolated=sandbox["isolated"])), flush=True)


if __name__ == "__main__":
    main()
