"""Cassettes are read as they were written, and other files are refused with one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tinkerflow.backend.core.errors import UserError
from tinkerflow.deployments.cassettes.file import CassetteWriter, Exchange, FutureResult, TokenizerFiles, read_cassette

RECORDS = [
    Exchange(0, "POST", "/api/v1/client/config", b"{}", 200, "application/json", b'{"flag": true}'),
    Exchange(1, "POST", "/api/v1/optim_step", b'{"seq_id": 1}' * 40, 200, "application/json", b'{"request_id": "r"}'),
    FutureResult("r", "application/json", b'{"metrics": {}}'),
    TokenizerFiles("/models/tiny", {"tokenizer.json": b"{}" * 200}),
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    with CassetteWriter(tmp_path / "a.cassette") as writer:
        for record in RECORDS:
            writer.write(record)
        writer.close()
    return writer.path


def test_a_cassette_holds_its_records(file: Path) -> None:
    found = read_cassette(file)
    assert found.exchanges == RECORDS[:2]
    assert found.compared == RECORDS[1:2]
    assert found.results == {"r": RECORDS[2]}
    assert found.tokenizers == RECORDS[3:]
    assert found.whole
    assert len(found.digest) == 64
    assert [path.name for path in file.parent.iterdir()] == ["a.cassette"]


def test_a_killed_recorder_leaves_all_it_wrote(file: Path) -> None:
    before = file.read_bytes()
    writer = CassetteWriter(file)
    for record in RECORDS[:3]:
        writer.write(record)
    part = writer.part.read_bytes()  # as another process sees it, because nothing was closed
    writer.discard()
    assert file.read_bytes() == before, "a recording that was interrupted replaces no good one"
    file.write_bytes(part)
    with pytest.raises(UserError, match=r"a.cassette has no end: .* after request 1; record it again, or .*--partial"):
        read_cassette(file)
    found = read_cassette(file, partial=True)
    assert (found.exchanges, list(found.results), found.whole) == (RECORDS[:2], ["r"], False)


def test_truncated_file_is_refused_or_read_as_a_prefix(file: Path) -> None:
    whole, seen = file.read_bytes(), set()
    for size in range(len(whole)):
        file.write_bytes(whole[:size])
        with pytest.raises(UserError) as refused:
            read_cassette(file)
        assert "\n" not in str(refused.value)
        try:
            found = read_cassette(file, partial=True)
        except UserError as error:
            assert "which is not a cassette" in str(error) or "the version of cassette" in str(error)
        else:
            assert found.exchanges == RECORDS[: len(found.exchanges)]
            seen.add(len(found.exchanges))
    assert seen == {0, 1, 2}


def test_a_flipped_bit_changes_no_content(file: Path) -> None:
    whole, refused = file.read_bytes(), 0
    for at in range(len(whole)):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        try:
            assert read_cassette(file).exchanges == RECORDS[:2]  # a bit of zstd's format without effect here
        except UserError:
            refused += 1
    assert refused > len(whole) - 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "x.cassette begins with b'', which is not a cassette"),
        (b"PK\x03\x04 something", "x.cassette begins with .*, which is not a cassette"),
        (b"tinkerflow cassette 9\nmore", r"the version of cassette .*x.cassette is '9': must be 1, as this release"),
        (b"tinkerflow cassette 1\nmore", "x.cassette is damaged after record 0"),
    ],
)
def test_file_of_another_kind_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.cassette"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_cassette(path, partial=True)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"y.cassette cannot be read: No such file"):
        read_cassette(tmp_path / "y.cassette")


@pytest.mark.parametrize("folder", [".", "..", "/", "there"])
def test_a_folder_is_refused_before_it_is_recorded(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"^cassette \S+ cannot be written: it is a folder$"):
        CassetteWriter(Path(folder))
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]
