"""Reading every kind of file, and the check: a digest of what is good, a quarantine for what is not."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tinkerflow.backend.core.errors import UserError
from tinkerflow.tasks.pipelines import DataCheckError, DataSource, check_data, load_rows
from tinkerflow.tasks.pipelines.work import open_work

ROWS = [{"prompt": f"{i} + 1?", "completion": str(i + 1)} for i in range(4)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


def saved_to_disk(folder: Path, rows: list[dict[str, Any]]) -> None:
    """What `datasets.Dataset.save_to_disk` writes: Arrow streams, and state.json that names them."""
    folder.mkdir(parents=True)
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table.schema) as stream:
        stream.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))


def write_everywhere(folder: Path) -> dict[str, tuple[str, str]]:
    """The same rows in every form: name -> (url, split)."""
    (folder / "rows.jsonl").write_text(LINES + "\n")
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress(LINES.encode()))
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "rows.parquet")
    hub = folder / "hub" / "data"
    hub.mkdir(parents=True)
    for split, rows in (("train", ROWS), ("test", ROWS[:1])):
        pq.write_table(pa.Table.from_pylist(rows), hub / f"{split}-00000-of-00001.parquet")
    saved_to_disk(folder / "saved", ROWS)
    saved_to_disk(folder / "splits" / "train", ROWS)
    saved_to_disk(folder / "splits" / "test", ROWS[:1])
    (folder / "splits" / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    fsspec.filesystem("memory").pipe_file("/everywhere/rows.jsonl", LINES.encode())
    return {
        "lines": (str(folder / "rows.jsonl"), ""),
        "compressed": (f"file://{folder}/rows.jsonl.gz", ""),
        "parquet": (str(folder / "rows.parquet"), ""),
        "hub folder": (str(folder / "hub"), "train"),
        "datasets folder": (str(folder / "saved"), ""),
        "datasets splits": (str(folder / "splits"), "train"),
        "any fsspec URL": ("memory://everywhere/rows.jsonl", ""),
    }


def test_the_same_rows_have_the_same_digest_wherever_they_come_from(tmp_path: Path, work: str) -> None:
    places = write_everywhere(tmp_path)
    reports = {name: check_data.fn(DataSource(url=url, split=split), work) for name, (url, split) in places.items()}
    assert {name: report.rows for name, report in reports.items()} == dict.fromkeys(places, 4)
    assert len({report.digest for report in reports.values()}) == 1
    rows = load_rows(work, reports["lines"].digest)
    assert [row.chosen[0]["content"] for row in rows] == ["1", "2", "3", "4"]


def test_a_real_datasets_folder_is_read(tmp_path: Path, work: str) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(str(tmp_path / "real"))
    assert check_data.fn(DataSource(url=str(tmp_path / "real")), work).rows == 4


def test_bad_rows_are_left_out_and_quarantined_with_their_errors(tmp_path: Path, work: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(LINES + "not json\n" + json.dumps({"prompt": "x", "completion": "y<|im_end|>"}) + "\n")
    source = DataSource(url=str(file), max_bad_fraction=0.5)
    report = check_data.fn(source, work, ["<|im_end|>"])
    assert (report.rows, report.bad_rows, report.schema_name) == (4, 2, "prompt_completion")
    assert [row.where for row in report.first_errors] == ["rows.jsonl:5", "rows.jsonl:6"]
    kept = [json.loads(line) for line in open_work(work).read(report.quarantine).splitlines()]
    assert kept[0]["row"] == "not json"
    assert kept[0]["error"].startswith("line: 'not json': must be JSON")
    assert kept[1]["row"]["prompt"] == "x"
    assert "'<|im_end|>', a special token" in kept[1]["error"]


def test_too_many_bad_rows_fail_the_check_and_say_how_many(tmp_path: Path, work: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(LINES + "{}\n")
    with pytest.raises(DataCheckError, match=r"1 of 5 rows are wrong, max_bad_fraction allows 2\.0%; first: rows") as e:
        check_data.fn(DataSource(url=str(file)), work)
    assert e.value.report.bad_rows == 1
    with pytest.raises(DataCheckError, match="4 good rows, min_rows asks for 10"):
        check_data.fn(DataSource(url=str(file), max_bad_fraction=1, min_rows=10), work)


def test_duplicates_are_counted_and_a_limit_is_kept(tmp_path: Path, work: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(LINES + LINES)
    assert check_data.fn(DataSource(url=str(file)), work).duplicates == 4
    assert check_data.fn(DataSource(url=str(file), limit=3), work).rows == 3


def test_what_cannot_be_read_is_named(tmp_path: Path, work: str) -> None:
    (tmp_path / "rows.csv").write_text("a,b\n")
    for url, split, message in (
        (tmp_path / "gone", "", "does not exist"),
        (tmp_path / "rows.csv", "", "rows.csv: must end in .jsonl"),
        (tmp_path, "train", "holds no .jsonl, .parquet or .arrow file of the split 'train'"),
    ):
        with pytest.raises(UserError, match=message):
            check_data.fn(DataSource(url=str(url), split=split), work)
    write_everywhere(tmp_path)
    with pytest.raises(UserError, match="split 'dev': must be one of train, test"):
        check_data.fn(DataSource(url=str(tmp_path / "splits"), split="dev"), work)
