"""The end of a process's log, memory maps, and free ports."""

from __future__ import annotations

import mmap
import socket
from pathlib import Path

import pytest

from tinkerflow.backend.supervise import processes
from tinkerflow.backend.supervise.processes import free_port, memory_maps_used, tail


def test_the_tail_of_a_log_is_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "part.log"
    log.write_bytes(b"one\ntwo \xff\nthree\n")
    assert tail(log, 2) == "two \ufffd\nthree"
    with log.open("ab") as file:
        file.truncate(2**40)  # no machine has so much memory
        file.seek(0, 2)
        file.write(b"\nfour\n")
    assert tail(log, 1) == "four"


def test_memory_maps_are_counted() -> None:
    before = memory_maps_used()
    maps = [mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE * (one % 2)) for one in range(400)]
    most = int(Path("/proc/sys/vm/max_map_count").read_text())
    assert 0 < before < 1
    assert 300 <= (memory_maps_used() - before) * most <= 500
    del maps


def test_a_port_that_is_taken_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        port = taken.getsockname()[1]
        assert port < 32_768  # Linux may give a higher port to a connection while its server restarts
        monkeypatch.setattr(processes, "_PORTS", range(port, port + 1))
        with pytest.raises(OSError, match=f"no port of {port} to {port} is free"):
            free_port()
    assert free_port() == port


def test_foreign_address_has_no_free_port() -> None:
    with pytest.raises(OSError, match="annot assign requested address"):
        free_port("192.0.2.1")
