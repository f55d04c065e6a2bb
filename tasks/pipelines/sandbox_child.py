"""The program inside of a sandbox: reads what to execute, executes it with limits, and writes its end.

`sandbox` passes the text of this file to a Python interpreter, perhaps in a container. So it imports the standard
library alone. Its standard input is a JSON object, and its standard output another.
"""

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

_MOST = 2**20  # bytes of each output
_FILE = 2**24  # bytes of each file
_PROCESSES = 256
_DROP_CAPABILITY, _SET_DUMPABLE, _NO_NEW_PRIVILEGES = 24, 4, 38  # of prctl(2)
_MOUNT_SETATTR, _HERE, _RECURSIVE, _READ_ONLY = 442, -100, 0x8000, 1  # of mount_setattr(2), in Linux 5.12 and newer
_SECCOMP = 22  # of prctl(2)
_SOCKETS = {"x86_64": (0xC000003E, 41), "aarch64": (0xC00000B7, 198)}  # architectures, and socket(2) on them
_libc = ctypes.CDLL(None, use_errno=True)


def own_files(megabytes: int) -> None:
    """Make all files read-only for this mount namespace, and its /tmp and /dev/shm empty folders in memory."""
    attributes = (ctypes.c_uint64 * 4)(_READ_ONLY)
    _check(_libc.syscall(_MOUNT_SETATTR, _HERE, b"/", _RECURSIVE, ctypes.byref(attributes), ctypes.sizeof(attributes)))
    for folder in (b"/tmp", b"/dev/shm"):
        if Path(folder.decode()).is_dir():
            _check(_libc.mount(b"tmpfs", folder, b"tmpfs", 0, f"size={megabytes}m,mode=1777".encode()))


def no_other_sockets() -> None:
    """Refuse sockets that are not of the network namespace, such as those of files. io_uring could make them, too."""
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
    """Limit the process that executes the program. Its capabilities are dropped: so it cannot look into this one."""
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


def main() -> None:
    """Execute the program of the standard input."""
    spec = json.load(sys.stdin)
    seconds, megabytes, first = spec["seconds"], spec["megabytes"], os.getpid() == 1
    if spec["isolated"]:
        own_files(megabytes)
    _libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for name, text in spec["files"].items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            given.write(spec["stdin"].encode())
            given.seek(0)
            program, *arguments = spec["command"]
            process = subprocess.Popen(
                [sys.executable if program == "python" else program, *arguments],
                cwd=folder,
                stdin=given,
                stdout=out,
                stderr=err,
                env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"},
                preexec_fn=lambda: limit(seconds, megabytes, isolated=spec["isolated"]),  # noqa: PLW1509  this process has one thread
                start_new_session=True,
            )
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
    print(json.dumps({"status": process.returncode, "timed_out": timed_out, **texts}))


if __name__ == "__main__":
    main()
