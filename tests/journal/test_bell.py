"""The bell rings in this process, in other processes, and never raises when a listener cannot be reached."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import psycopg
import pytest

from tinkerflow.backend.errors import ServerError
from tinkerflow.backend.journal import Bell
from tinkerflow.backend.journal.bell_sockets import packed, socket_folder, unpacked

LISTENER = """
import asyncio, sys
from tinkerflow.backend.journal import Bell

async def main():
    bell = Bell(sys.argv[1])
    async with bell.listen("model:", "sample") as topics:
        print("listening", flush=True)
        async for topic in topics:
            print(topic, flush=True)
            if topic == "sample":
                break
    bell.close()

asyncio.run(main())
"""
RINGER = """
import sys
from tinkerflow.backend.journal import Bell
bell = Bell(sys.argv[1])
bell.ring(*sys.argv[2:])
bell.close()
"""


async def take(topics, count: int) -> list[str]:
    async with asyncio.timeout(20):
        return [await anext(topics) for _ in range(count)]


def listener(url: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-W", "error", "-c", LISTENER, url], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "listening\n"
    return process


async def test_listeners_in_the_same_process_hear_their_topics_once(bell):
    async with bell.listen("model:") as models, bell.listen() as everything:
        bell.ring("model:a", "sample", "model:a")
        bell.ring("model:b")
        assert await take(models, 2) == ["model:a", "model:b"]
        assert await take(everything, 3) == ["model:a", "sample", "model:b"]
        bell.ring("model:a")
        assert await take(models, 1) == ["model:a"]
        await asyncio.sleep(0.2)  # an echo through the carrier would come by now
        bell.ring("model:end")
        assert await take(models, 1) == ["model:end"]


async def test_threads_may_ring(bell):
    async with bell.listen() as topics:
        await asyncio.gather(*(asyncio.to_thread(bell.ring, f"done:{n}") for n in range(50)))
        assert sorted(await take(topics, 50)) == sorted(f"done:{n}" for n in range(50))


async def test_a_second_process_is_heard(bell, url):
    async with bell.listen() as topics:
        topic_names = [f"done:req-{n:04}" for n in range(300)]
        command = [sys.executable, "-W", "error", "-c", RINGER, url, *topic_names]
        await asyncio.to_thread(subprocess.run, command, check=True)
        assert await take(topics, 300) == topic_names


async def test_a_second_process_hears_us(bell, url):
    process = listener(url)
    bell.ring("done:1", "model:x")
    bell.ring("session:1")
    bell.ring("sample")
    out, _ = process.communicate(timeout=20)
    assert (process.returncode, out.split()) == (0, ["model:x", "sample"])


async def test_dead_listeners_do_not_matter(bell, url):
    process = listener(url)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    bell.ring("model:a")
    async with bell.listen() as topics:
        bell.ring("model:b")
        assert await take(topics, 1) == ["model:b"]


def test_ringing_with_nobody_there_and_after_closing_is_fine(bell):
    bell.ring()
    bell.ring("model:a")
    bell.close()
    bell.ring("model:b")


async def test_a_listener_that_left_hears_nothing_more(bell):
    async with bell.listen() as topics:
        pass
    bell.ring("model:a")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await anext(topics)


async def test_the_socket_folder_is_private_and_swept(tmp_path):
    url = f"sqlite:///{tmp_path / 'j.db'}"
    bell, folder = Bell(url), socket_folder(url)
    process = listener(url)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert len(list(folder.iterdir())) == 1
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    bell.ring("model:a")
    assert list(folder.iterdir()) == []
    async with bell.listen():
        assert len(list(folder.iterdir())) == 1
    bell.close()
    assert not folder.exists()


def test_a_long_temp_dir_is_avoided(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/" + "x" * 90)
    assert socket_folder(f"sqlite:///{tmp_path / 'j.db'}").parent == Path("/tmp")


async def test_a_folder_that_others_may_read_is_refused(tmp_path):
    url = f"sqlite:///{tmp_path / 'j.db'}"
    folder = socket_folder(url)
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    bell = Bell(url)
    bell.ring("model:a")
    with pytest.raises(ServerError, match="mode 0700"):
        async with bell.listen():
            pass
    bell.close()
    folder.rmdir()


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
async def test_a_full_buffer_loses_bells_and_nothing_else(bell, url):
    process = listener(url)
    os.kill(process.pid, signal.SIGSTOP)
    try:
        for n in range(40):
            bell.ring(f"model:{n}")
    finally:
        os.kill(process.pid, signal.SIGCONT)
    while True:
        bell.ring("sample")
        try:
            out, _ = process.communicate(timeout=0.5)
        except subprocess.TimeoutExpired:
            continue
        break
    assert out.startswith("model:0\n")
    assert process.returncode == 0


@pytest.mark.parametrize("url", ["postgres"], indirect=True)
async def test_a_broken_postgres_connection_is_opened_again(bell, url):
    async with bell.listen() as topics:
        bell.ring("model:a")
        await take(topics, 1)
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        other = Bell(url)
        async with asyncio.timeout(20):
            heard = asyncio.create_task(anext(topics))
            while not heard.done():
                other.ring("model:b")
                await asyncio.sleep(0.1)
        assert heard.result() == "model:b"
        bell.ring("model:c")
        other.close()


def test_topics_are_packed_into_few_messages():
    topics = tuple(f"done:req-{n:016}" for n in range(1000))
    messages = list(packed(topics, 4096))
    assert all(len(message) <= 4096 for message in messages)
    assert len(messages) <= 7
    assert tuple(topic for message in messages for topic in unpacked(message)) == topics
    assert list(packed(("x" * 5000,), 4096)) == [b"x" * 5000 + b"\n"]
