"""Cassettes: the requests of a program with their answers, in one file that replays them without a model.

`tinkerflow cassette record` runs a program behind a proxy that writes the file (record.py, file.py), or creates the
file from the history of a run (from_history.py). The command `tinkerflow cassette serve` and the pytest fixture answer
a program from the file (replay.py, play.py, testing.py). A request is recognized by its meaning, such as the third step
of a model, and compared by its content (requests.py, content.py). matching.py finds the recorded request, or names the
first field that differs.

Nothing here loads JAX, Prefect, transformers or the API, so a test with a cassette starts in less than a second.
"""

__all__ = [
    "content",
    "file",
    "from_history",
    "matching",
    "play",
    "programs",
    "record",
    "replay",
    "requests",
    "server",
    "testing",
]
