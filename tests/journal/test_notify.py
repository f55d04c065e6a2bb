"""The notifier wakes subscribers in this process and in others, and never raises if a subscriber cannot be reached."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import psycopg
import pytest

from tinkerflow.backend.core.errors import ServerError
from tinkerflow.backend.journal import Notifier
from tinkerflow.backend.journal.notify_sqlite import socket_folder
from tinkerflow.backend.journal.topics import pack_topics, unpack_topics

LISTENER = """
import asyncio, sys
from tinkerflow.backend.journal import Notifier

async def main():
    notifier = Notifier(sys.argv[1])
    async with notifier.subscribe("model:", "sample") as topics:
        print("listening", flush=True)
        async for topic in topics:
            print(topic, flush=True)
            if topic == "sample":
                break
    notifier.close()

asyncio.run(main())
"""
RINGER = """
import sys
from tinkerflow.backend.journal import Notifier
notifier = Notifier(sys.argv[1])
notifier.publish(*sys.argv[2:])
notifier.close()
"""


class Standby:
    """A connection to a server in recovery."""

    def execute(self, *_):
        raise psycopg.errors.ReadOnlySqlTransaction("cannot execute LISTEN during recovery")

    def close(self):
        pass


async def take(topics, count: int) -> list[str]:
    async with asyncio.timeout(20):
        return [await anext(topics) for _ in range(count)]


def listener(url: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-W", "error", "-c", LISTENER, url], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "listening\n"
    return process


async def test_local_listeners_get_their_topics_once(notifier):
    async with notifier.subscribe("model:") as models, notifier.subscribe() as everything:
        notifier.publish("model:a", "sample", "model:a")
        notifier.publish("model:b")
        assert await take(models, 2) == ["model:a", "model:b"]
        assert await take(everything, 3) == ["model:a", "sample", "model:b"]
        notifier.publish("model:a")
        assert await take(models, 1) == ["model:a"]
        await asyncio.sleep(0.2)  # time for an echo through the transport
        notifier.publish("model:end")
        assert await take(models, 1) == ["model:end"]


async def test_threads_may_publish(notifier):
    async with notifier.subscribe() as topics:
        await asyncio.gather(*(asyncio.to_thread(notifier.publish, f"done:{n}") for n in range(50)))
        assert sorted(await take(topics, 50)) == sorted(f"done:{n}" for n in range(50))


async def test_publications_of_another_process_arrive(notifier, url):
    async with notifier.subscribe() as topics:
        topic_names = [f"done:req-{n:04}" for n in range(300)]
        command = [sys.executable, "-W", "error", "-c", RINGER, url, *topic_names]
        await asyncio.to_thread(subprocess.run, command, check=True)
        assert await take(topics, 300) == topic_names


async def test_publications_reach_another_process(notifier, url):
    process = listener(url)
    notifier.publish("done:1", "model:x")
    notifier.publish("session:1")
    notifier.publish("sample")
    out, _ = process.communicate(timeout=20)
    assert (process.returncode, out.split()) == (0, ["model:x", "sample"])


async def test_dead_listeners_are_ignored(notifier, url):
    process = listener(url)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    notifier.publish("model:a")
    async with notifier.subscribe() as topics:
        notifier.publish("model:b")
        assert await take(topics, 1) == ["model:b"]


def test_publishing_without_listeners_or_after_closing_does_nothing(notifier):
    notifier.publish()
    notifier.publish("model:a")
    notifier.close()
    notifier.publish("model:b")


async def test_closed_subscription_gets_no_topics(notifier):
    async with notifier.subscribe() as topics:
        pass
    notifier.publish("model:a")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await anext(topics)


async def test_socket_folder_is_private_and_cleaned(tmp_path):
    url = f"sqlite:///{tmp_path / 'j.db'}"
    notifier, folder = Notifier(url), socket_folder(url)
    process = listener(url)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert len(list(folder.iterdir())) == 1
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    notifier.publish("model:a")
    assert list(folder.iterdir()) == []
    async with notifier.subscribe():
        assert len(list(folder.iterdir())) == 1
    notifier.close()
    assert not folder.exists()


def test_a_long_temp_dir_is_avoided(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/" + "x" * 90)
    assert socket_folder(f"sqlite:///{tmp_path / 'j.db'}").parent == Path("/tmp")


async def test_socket_folder_readable_by_others_is_refused(tmp_path):
    url = f"sqlite:///{tmp_path / 'j.db'}"
    folder = socket_folder(url)
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    notifier = Notifier(url)
    notifier.publish("model:a")
    with pytest.raises(ServerError, match="mode 0700"):
        async with notifier.subscribe():
            pass
    notifier.close()
    folder.rmdir()


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
async def test_full_buffer_loses_only_notifications(notifier, url):
    process = listener(url)
    os.kill(process.pid, signal.SIGSTOP)
    try:
        for n in range(40):
            notifier.publish(f"model:{n}")
    finally:
        os.kill(process.pid, signal.SIGCONT)
    while True:
        notifier.publish("sample")
        try:
            out, _ = process.communicate(timeout=0.5)
        except subprocess.TimeoutExpired:
            continue
        break
    assert out.startswith("model:0\n")
    assert process.returncode == 0


@pytest.mark.parametrize("url", ["postgres"], indirect=True)
async def test_a_broken_postgres_connection_is_opened_again(notifier, url, monkeypatch):
    connect, standbys = psycopg.connect, [Standby(), Standby()]

    def first_to_a_standby(*to, **how):
        receives = threading.current_thread().name == "notifier"
        return standbys.pop() if receives and standbys else connect(*to, **how)

    monkeypatch.setattr(psycopg, "connect", first_to_a_standby)
    async with notifier.subscribe() as topics:
        notifier.publish("model:a")
        await take(topics, 1)
        with connect(url, autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        other = Notifier(url)
        async with asyncio.timeout(20):
            heard = asyncio.create_task(anext(topics))
            while not heard.done():
                other.publish("model:b")
                await asyncio.sleep(0.1)
        assert heard.result() == "model:b"
        assert not standbys
        notifier.publish("model:c")
        other.close()


@pytest.mark.parametrize("url", ["postgres"], indirect=True)
async def test_an_outage_at_the_start_only_delays_notifications(notifier, url, monkeypatch):
    connect, failures = psycopg.connect, [psycopg.OperationalError("connection refused") for _ in range(2)]

    def refused_first(*to, **how):
        if failures:
            raise failures.pop()
        return connect(*to, **how)

    monkeypatch.setattr(psycopg, "connect", refused_first)
    async with notifier.subscribe() as topics, asyncio.timeout(20):
        assert len(failures) == 1
        other, heard = Notifier(url), asyncio.create_task(anext(topics))
        while failures:  # noqa: ASYNC110  another thread connects
            await asyncio.sleep(0.01)
        while not heard.done():
            other.publish("model:b")
            await asyncio.sleep(0.1)
        assert heard.result() == "model:b"
        other.close()


def test_a_standby_server_of_postgres_only_loses_notifications(monkeypatch):
    monkeypatch.setattr(psycopg, "connect", lambda *to, **how: Standby())
    notifier = Notifier("postgresql://host/database")
    notifier.publish("model:a")
    notifier.close()


def test_topics_are_packed_into_few_messages():
    topics = tuple(f"done:req-{n:016}" for n in range(1000))
    messages = list(pack_topics(topics, 4096))
    assert all(len(message) <= 4096 for message in messages)
    assert len(messages) <= 7
    assert tuple(topic for message in messages for topic in unpack_topics(message)) == topics
    assert list(pack_topics(("x" * 5000,), 4096)) == [b"x" * 5000 + b"\n"]
