"""Reads of every kind of file, and the check of rows: a digest of good rows, and a quarantine for bad ones."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.tasks.pipelines.conftest import ANY, SFT
from tests.tasks.pipelines.row_parts import CALL, TOOL, A, U

from tinkerflow.backend.core.errors import UserError
from tinkerflow.tasks.pipelines import (
    DataCheckError,
    DataReport,
    DataSource,
    Renderer,
    Use,
    check_source,
    load_examples,
    load_rows,
)
from tinkerflow.tasks.pipelines.parameters import SftParameters
from tinkerflow.tasks.pipelines.preparation import PreparedRun
from tinkerflow.tasks.pipelines.sources import MAX_ROW_BYTES
from tinkerflow.tasks.pipelines.work import open_work

Check = Callable[..., DataReport]
ROWS = [{"prompt": f"{i} + 1?", "completion": str(i + 1)} for i in range(4)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


def table(rows: list[dict[str, Any]], delimiter: str) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, fieldnames=[*rows[0], "empty"], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return b"\xef\xbb\xbf" + text.getvalue().encode()


def saved_to_disk(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Write the files of `datasets.Dataset.save_to_disk`: Arrow streams, and a state.json with their names."""
    folder.mkdir(parents=True)
    arrow = pa.Table.from_pylist(rows)
    with pa.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), arrow.schema) as stream:
        stream.write_table(arrow)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))


def write_every_format(folder: Path) -> dict[str, tuple[str, str]]:
    """Write the same rows to every kind of file. Returns name -> (url, split)."""
    files: dict[str, bytes] = {
        "rows.jsonl": b"\xef\xbb\xbf" + LINES.encode() + b"\n",
        "rows.ndjson.gz": gzip.compress(LINES.encode()),
        "rows.jsonl.bz2": bz2.compress(LINES.encode()),
        "rows.jsonl.xz": lzma.compress(LINES.encode()),
        "rows.json": json.dumps(ROWS).encode(),
        "lines.json": LINES.encode(),
        "rows.csv": table(ROWS, ","),
        "rows.tsv.gz": gzip.compress(table(ROWS, "\t")),
        "with space.jsonl": LINES.encode(),
    }
    for name, data in files.items():
        (folder / name).write_bytes(data)
    pq.write_table(rows_table := pa.Table.from_pylist(ROWS), folder / "rows.parquet")
    with pa.ipc.new_file(str(folder / "rows.arrow"), rows_table.schema) as file:
        file.write_table(rows_table)
    hub = folder / "hub" / "data"
    hub.mkdir(parents=True)
    for other in (hub.parent / "dataset_infos.json", hub / ".train-copy.json", hub / ".cache" / "train.json"):
        other.parent.mkdir(exist_ok=True)
        other.write_text("{}")  # must not be read as rows
    for split, rows in (("train", ROWS), ("test", ROWS[:1])):
        pq.write_table(pa.Table.from_pylist(rows), hub / f"{split}-00000-of-00001.parquet")
    saved_to_disk(folder / "saved", ROWS)
    saved_to_disk(folder / "splits" / "train", ROWS)
    saved_to_disk(folder / "splits" / "test", ROWS[:1])
    (folder / "splits" / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    fsspec.filesystem("memory").pipe_file("/everywhere/rows.jsonl", LINES.encode())
    return {name: (str(folder / name), "") for name in [*files, "rows.parquet", "rows.arrow", "saved"]} | {
        "a file's URL": (f"file://{folder}/with%20space.jsonl", ""),
        "a folder of the hub": (str(folder / "hub"), "train"),
        "splits of datasets": (str(folder / "splits"), "train"),
        "another URL": ("memory://everywhere/rows.jsonl", ""),
    }


def test_the_same_rows_have_the_same_digest_in_every_kind_of_file(
    tmp_path: Path, work: str, renderer: Renderer
) -> None:
    places = write_every_format(tmp_path)
    reports = {
        name: check_source(DataSource(url=url, split=split), work, renderer, SFT)
        for name, (url, split) in places.items()
    }
    assert {name: report.rows for name, report in reports.items()} == dict.fromkeys(places, 4)
    assert len({report.digest for report in reports.values()}) == 1
    rows = load_rows(work, reports["rows.csv"])
    assert [row.chosen[0]["content"] for row in rows] == ["1", "2", "3", "4"]
    # These are the digests of release 0.2, so that runs that it began can be resumed.
    assert reports["rows.jsonl"].digest == "e2d694653890e672f4e6b1979f224a7e"
    assert reports["rows.jsonl"].tokenized == "1e9d77aedcb1e7a38309ab08f22b3fa1"


def test_a_real_datasets_folder_with_nested_columns_is_read(tmp_path: Path, work: str, renderer: Renderer) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"messages": [U, {**A, "tool_calls": [CALL]}], "tools": [TOOL]}, {"messages": [U, A], "tools": None}]
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(str(tmp_path / "real"))
    report = check_source(DataSource(url=str(tmp_path / "real")), work, renderer, SFT)
    assert [row.tools for row in load_rows(work, report)] == [(TOOL,), ()]


def test_texts_and_other_forms_and_columns_are_understood(
    tmp_path: Path, work: str, renderer: Renderer, check: Check
) -> None:
    (tmp_path / "book.txt").write_text("Once upon a time. " * 400)
    report = check_source(DataSource(url=str(tmp_path / "book.txt")), work, renderer, Use("sft", ("text",), 64))
    assert (report.form, report.rows, report.too_long) == ("text", 1, 0)
    assert report.lengths[-1] <= 64 and report.trained_tokens == report.tokens
    assert (
        check([{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}]).form == "sharegpt"
    )
    assert check([{"instruction": "a", "output": "b"}]).schema_name == "prompt_completion"
    mapped = check([{"q": "a", "a": "b", "id": 1}], columns={"prompt": "q", "completion": "a"}, ignore=["id"])
    assert (mapped.form, mapped.rows) == ("prompt_completion", 1)
    with pytest.raises(
        UserError, match=r"data\.columns\.promt: no form has this field; must be one of .*did you mean 'prompt'"
    ):
        check(ROWS, columns={"promt": "q"})


GOOD = [{"messages": [U, {**A, "content": f"hello {i}"}]} for i in range(8)]
BAD: dict[str, Any] = {
    "not JSON": "not json",
    "cut off": json.dumps(GOOD[0])[:-3],
    "a number": "7",
    "empty object": {},
    "NaN": '{"messages": NaN}',
    "a field twice": json.dumps(GOOD[0])[:-1] + ', "messages": []}',
    "deep": '{"messages": ' + "[" * 300 + "]" * 300 + "}",
    "very deep": "[" * 200_000 + "]" * 200_000,
    "not UTF-8": b'{"messages": "\xff\xfe"}',
    "UTF-16": json.dumps(GOOD[0]).encode("utf-16"),
    "zero bytes": b"\0" * 100,
    "half a character": '{"messages": [{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content": "x"}]}',
    "long number": '{"messages": ' + "9" * 5000 + "}",
    "huge": json.dumps({"messages": [U, {**A, "content": "x" * MAX_ROW_BYTES}]}),
    "wrong types": {"messages": {"role": ["user"], "content": {"a": 1}}},
    "image that does not decode": {"messages": [{**U, "content": [{"type": "image", "image": "!"}]}, A]},
    "unknown field": {**GOOD[0], "labels": [1]},
    "template error": {"messages": [U, {**A, "content": "boom"}]},
    "blank": {"messages": [U, {**A, "content": " "}]},
    "too long": {"messages": [U, {**A, "content": "well " * 5000}]},
}


@pytest.mark.parametrize("badness", BAD)
@pytest.mark.parametrize("at", [0, 4, 8])
def test_one_bad_row_never_fails_a_tolerant_check(
    check: Check, work: str, tokenizer: Any, badness: str, at: int
) -> None:
    rows: list[Any] = [*GOOD[:at], BAD[badness], *GOOD[at:]]
    kept = tokenizer.chat_template
    tokenizer.chat_template = kept + "{% if 'boom' in messages[-1].content %}{{ raise_exception('boom') }}{% endif %}"
    try:
        report = check(rows, max_bad_fraction=0.2)
        assert (report.rows - report.too_long, report.bad_rows) == (8, int(badness != "too long"))
        assert len(load_rows(work, report)) == len(load_examples(work, report)) == 8
        if badness != "too long":
            assert report.first_errors[0].where == f"rows.jsonl:{at + 1}"
            (line,) = open_work(work).read(report.quarantine).splitlines()
            assert json.loads(line)["error"] == report.first_errors[0].error
            reason = r"1 of 9 rows is wrong, at most 2\.0% may be left out \(data\.max_bad_fraction\); first: rows"
            with pytest.raises(DataCheckError, match=reason):
                check(rows)
    finally:
        tokenizer.chat_template = kept


def test_bad_cells_and_lines_of_a_csv_file_and_a_table_are_bad_rows(
    tmp_path: Path, work: str, renderer: Renderer
) -> None:
    lines = [b"prompt,completion", b"a,b", b"a", b"a,b,c", b"\xff,b", b",b", b'"a""b",c', b'a"b,c', b'"never closed,x']
    (tmp_path / "rows.csv").write_bytes(b"\n".join(lines))
    found = check_source(DataSource(url=str(tmp_path / "rows.csv"), max_bad_fraction=1), work, renderer, SFT)
    assert found.rows == 3
    assert [bad.where for bad in found.first_errors] == [f"rows.csv:{n}" for n in (3, 4, 5, 6, 9)]
    text = pa.array([b"a", b"\xff", b"c"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"prompt": text, "completion": ["x", "y", "z"]}), tmp_path / "rows.parquet")
    found = check_source(DataSource(url=str(tmp_path / "rows.parquet"), max_bad_fraction=1), work, renderer, SFT)
    assert (found.rows, [bad.where for bad in found.first_errors]) == (2, ["rows.parquet:2"])
    days = pa.array([0, 10**9, 0], pa.int32()).view(pa.date32())  # the second is after the year 9999
    pq.write_table(
        pa.table({"prompt": ["a"] * 3, "completion": ["x", "y", "z"], "day": days}), tmp_path / "days.parquet"
    )
    source = DataSource(url=str(tmp_path / "days.parquet"), max_bad_fraction=1, ignore=["day"])
    found = check_source(source, work, renderer, SFT)
    assert (found.rows, [bad.where for bad in found.first_errors]) == (2, ["days.parquet:2"])


def test_a_bad_row_of_a_json_list_is_a_bad_row(tmp_path: Path, work: str, renderer: Renderer) -> None:
    lines = {
        name: line if isinstance(line, bytes) else line.encode() if isinstance(line, str) else json.dumps(line).encode()
        for name, line in BAD.items()
    }
    lines = {
        name: line
        for name, line in lines.items()
        if name not in ("cut off", "UTF-16", "huge", "too long", "template error")
    }
    rows = [
        json.dumps(GOOD[0]).encode(),
        *lines.values(),
        json.dumps({"text": 'a "[b]", {c'}).encode(),
        b"",
        json.dumps(GOOD[1]).encode(),
    ]
    (tmp_path / "rows.json").write_bytes(b"\xef\xbb\xbf[" + b",\n".join(rows) + b"]\n")
    report = check_source(DataSource(url=str(tmp_path / "rows.json"), max_bad_fraction=1), work, renderer, SFT)
    assert (report.rows, report.bad_rows) == (2, len(lines) + 2)
    bad = [json.loads(line)["where"] for line in open_work(work).read(report.quarantine).splitlines()]
    assert bad == [f"rows.json:{n}" for n in range(2, len(lines) + 4)]
    assert sum(problem.rows for problem in report.first_errors) == len(bad)


def test_equal_problems_of_many_rows_are_one_and_name_the_fix(check: Check) -> None:
    """The file contains questions and answers in columns with other names. Some cells are missing."""
    rows = [{"Frage": "a?", "Antwort": "a", **({"Kapitel": i} if i % 2 else {})} for i in range(60)]
    with pytest.raises(DataCheckError, match="60 of 60 rows are wrong") as error:
        check(rows)
    (problem,) = error.value.report.first_errors
    assert error.value.report.form == "" and problem.columns == {"prompt": "Frage", "completion": "Antwort"}
    text = "60 rows: Frage, Antwort: no form has these fields: a chat has messages; .*a question with its answer has p"
    assert re.match(text, str(problem)) and str(problem).endswith("; first at rows.jsonl:1, rows.jsonl:2, rows.jsonl:3")
    assert "for example data.columns: {prompt: Frage, completion: Antwort}" in problem.error
    with pytest.raises(DataCheckError, match=r"first: rows\.jsonl:1: data\.columns\.prompt: 'Question': the column"):
        check(rows, columns={"prompt": "Question", "completion": "Antwort"})
    rows = [*ROWS, *({**ROWS[0], name: i} for i, name in enumerate(["id", "source", "id", "note"]))]
    report = check(rows, max_bad_fraction=1)
    (problem,) = report.first_errors
    assert (problem.rows, problem.ignore) == (4, ["id", "source", "note"])


def test_empty_rows_of_a_table_are_skipped_with_a_note(tmp_path: Path, work: str, renderer: Renderer) -> None:
    (tmp_path / "rows.csv").write_text("Question,Answer\na,b\n,\nc,d\n , \n")
    rows = {"Question": ["a", None, "c", None], "Answer": ["b", None, "d", None]}
    pq.write_table(pa.table(rows), tmp_path / "rows.parquet")
    for file, places in (("rows.csv", "rows.csv:3, rows.csv:5"), ("rows.parquet", "rows.parquet:2, rows.parquet:4")):
        source = DataSource(url=str(tmp_path / file), columns={"prompt": "Question", "completion": "Answer"})
        report = check_source(source, work, renderer, SFT)
        assert (report.rows, report.bad_rows) == (2, 0)
        assert report.notes == [f"2 row(s): empty, skipped: {places}"]
    (tmp_path / "rows.jsonl").write_text(LINES + "{}\n")
    report = check_source(DataSource(url=str(tmp_path / "rows.jsonl"), max_bad_fraction=1), work, renderer, SFT)
    assert (report.bad_rows, report.notes) == (1, [])


def test_rows_that_are_left_out_are_summed_up_on_one_line(check: Check) -> None:
    assert check(ROWS).summary() == "4 rows"
    report = check([*ROWS, "{"], max_bad_fraction=0.5)
    assert re.fullmatch(
        r"4 rows, 1 left out \(rows\.jsonl:5: line: .*must be JSON .*; all: quarantine/\w+\.jsonl in the work folder\)",
        report.summary(),
    )
    faults: list[Any] = ["{"] * 5 + [{"prompt": 1, "completion": "x"}, [], {"a": "b"}, {"c": "d"}]
    found = check([*ROWS, *faults], max_bad_fraction=1).summary()
    also = r"rows\.jsonl:5: line: .* \(also rows\.jsonl:6, rows\.jsonl:7 and 2 more\); rows\.jsonl:10: .*; rows.*:11: "
    assert re.search(also, found) and "and 1 more; all: quarantine/" in found
    run: Any = SimpleNamespace(reports={"data": check(ROWS), "held_out": report})
    assert PreparedRun.used_rows.fget(run).startswith("4 rows; held_out: 4 rows, 1 left out (rows.jsonl:5")  # type: ignore[attr-defined]


def test_spreadsheet_csv_in_another_language_is_read(tmp_path: Path, work: str, renderer: Renderer) -> None:
    lines = ["prompt;completion", '"a; b, c, d";x', "f;y"]
    for separator in ";,\t":
        (tmp_path / "rows.csv").write_text("\n".join(lines).replace(";", separator))
        report = check_source(DataSource(url=str(tmp_path / "rows.csv")), work, renderer, SFT)
        assert [row.chosen[0]["content"] for row in load_rows(work, report)] == ["x", "y"]
    for text in ("prompt,Stra\xdfe\na,b\n", "prompt,completion\nStra\xdfe?,b\n"):
        (tmp_path / "rows.csv").write_text(text, encoding="latin-1")
        with pytest.raises(UserError, match=r"must be UTF-8; a file of Latin-1 .*iconv -f latin1 -t utf-8") as error:
            check_source(DataSource(url=str(tmp_path / "rows.csv")), work, renderer, SFT)
        assert "udc" not in error.value.message
    (tmp_path / "rows.csv").write_text('prompt,completion\na,b\n"c,d\n')
    with pytest.raises(
        UserError, match=r"rows\.csv:3: line: must be CSV: a quote \(\"\) opens here and is not closed; all: quar"
    ):
        check_source(DataSource(url=str(tmp_path / "rows.csv")), work, renderer, SFT)
    for text in ("", "prompt,completion\n"):
        (tmp_path / "rows.csv").write_text(text)
        with pytest.raises(UserError, match=r"rows\.csv': is empty: it contains no rows"):
            check_source(DataSource(url=str(tmp_path / "rows.csv")), work, renderer, SFT)


def test_held_out_rows_use_the_format_of_the_data_by_default(tmp_path: Path, work: str, renderer: Renderer) -> None:
    data = {"url": "a.csv", "columns": {"prompt": "q", "completion": "a"}, "ignore": ["id"], "special_tokens": "tokens"}
    held_out = SftParameters.model_validate({"data": data, "held_out": {"url": "b.csv"}}).held_out
    assert held_out is not None and (held_out.columns, held_out.ignore) == (data["columns"], ["id"])
    assert held_out.special_tokens == "tokens"
    own = {"url": str(tmp_path / "b.csv"), "columns": {}, "kind": "chat", "special_tokens": "text"}
    held_out = SftParameters.model_validate({"data": data, "held_out": own}).held_out
    assert held_out is not None and (held_out.columns, held_out.ignore) == ({}, ["id"])
    assert held_out.special_tokens == "text"
    (tmp_path / "b.csv").write_text("q,a\nb,c\n")
    with pytest.raises(UserError, match=r"held_out .*b\.csv: 1 of 1 rows is wrong"):
        check_source(held_out, work, renderer, SFT)
    mapped = held_out.model_copy(update={"columns": {"messages": "r"}})
    with pytest.raises(UserError, match=r"held_out\.columns\.messages: 'r': the column is missing"):
        check_source(mapped, work, renderer, SFT)


def test_tokens_are_made_once_for_each_content(
    check: Check, work: str, tokenizer: Any, renderer: Renderer, tmp_path: Path
) -> None:
    first = check(ROWS)
    source = DataSource(url=str(tmp_path / "rows.jsonl"))

    class Unused(Renderer):
        def examples(self, *_: Any) -> Any:
            raise AssertionError("tokenized again")

    assert check_source(source, work, Unused(tokenizer), SFT) == first
    other = check_source(source, work, Renderer(tokenizer, "text"), SFT)
    assert other.tokenized != first.tokenized and other.digest == first.digest
    with pytest.raises(UserError, match="max_tokens 3: all 4 sequences"):
        check_source(source, work, renderer, Use("sft", SFT.schemas, 3))


def test_a_row_of_several_forms_has_the_form_that_the_pipeline_accepts(check: Check) -> None:
    row = {"prompt": "hi", "messages": [U, A], "chosen": [U, A], "rejected": [U, {**A, "content": "no"}]}
    assert check([row], Use("dpo", ("preference",), 64), ignore=["messages"]).form == "preference"
    assert check([row], ignore=["prompt", "chosen", "rejected"]).form == "chat"


def test_a_preference_is_two_sequences_that_stay_together(check: Check, work: str, renderer: Renderer) -> None:
    rows = [{"prompt": "Hi", "chosen": "Yes.", "rejected": answer} for answer in ("No.", "no " * 90)]
    report = check(rows, Use("dpo", ("preference",), 64))
    assert (report.rows, report.too_long) == (2, 1)
    texts = [renderer.text(e.tokens[e.weights > 0].tolist()) for e in load_examples(work, report)]
    assert texts == ["Yes.", "No."]


def test_prompts_have_no_weights_and_other_fields_are_for_the_reward(check: Check, work: str) -> None:
    rows = [{"prompt": "a", "answer": 4}, {"prompt": "well " * 90, "answer": 5}]
    report = check(rows, Use("rl", ("prompt",), 64, learns=False, extra=None))
    assert (report.rows, report.too_long, report.trained_tokens) == (2, 1, 0)
    assert [row.extra for row in load_rows(work, report)] == [{"answer": 4}]
    assert Use("rl", ("prompt",), 64, answer_tokens=16).within(40).max_tokens == 24


def test_unused_parts_of_good_rows_are_reported(check: Check) -> None:
    assert check([{"messages": [U, A, U]}]).notes == ["1 row(s): the messages after the last answer are not trained on"]
    result = {"role": "tool", "content": "4", "tool_call_id": "c9"}
    assert check([{"messages": [U, A, result, A]}]).notes == ["1 row(s): tool_call_id names no tool call of the row"]
    distill = Use("distill", ("chat",), 64, learns=False)
    assert check(GOOD, distill).notes == ["8 row(s): distill uses the prompt, not the answer"]


def test_duplicates_are_counted_a_limit_is_kept_and_good_rows_may_be_required(check: Check) -> None:
    assert check([*ROWS, *ROWS]).duplicates == 4
    assert check([*ROWS, *ROWS], limit=3).rows == 3
    with pytest.raises(DataCheckError, match="4 good rows, min_rows asks for 10"):
        check(ROWS, min_rows=10)
    with pytest.raises(UserError, match=r"schema preference: sft needs chat or prompt_completion or text"):
        check([{"prompt": "a", "chosen": "b", "rejected": "c"}])
    partial = [{"prompt": "a"}, *ROWS]  # the form of most rows is used
    assert check(partial, ANY, max_bad_fraction=1).form == "prompt_completion"


class Away(fsspec.AbstractFileSystem):
    """A file system without a network."""

    def isfile(self, path: str) -> bool:
        raise RuntimeError("no route\nto the hub")


def test_unreadable_file_is_named(tmp_path: Path, work: str, renderer: Renderer) -> None:
    fsspec.register_implementation("away", Away, clobber=True)
    places = write_every_format(tmp_path)
    files = {
        "rows.xml": b"<a/>",
        "bad.jsonl.gz": gzip.compress(LINES.encode())[:-20],
        "bad.jsonl.xz": b"no xz",
        "bad.parquet": b"PAR1",
        "bad.json": b"{}",
        "cut.json": b'[{"text": "a"}, {"text"',
        "twice.csv": b"a,a\n1,2\n",
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    pq.write_table(pa.table([["q"], ["a"]], names=["text", "text"]), tmp_path / "twice.parquet")
    for url, split, message in (
        ("rows.jsnl", "", r"does not exist \(did you mean 'rows.jsonl'\?\)"),
        ("rows.xml", "", r"rows.xml: must end in \.jsonl"),
        ("hub", "dev", r"contains no file of the split 'dev'"),
        ("splits", "tran", r"split 'tran': must be one of train, test \(did you mean 'train'\?\)"),
        ("bad.jsonl.gz", "", "bad.jsonl.gz cannot be read"),
        ("bad.jsonl.xz", "", "bad.jsonl.xz cannot be read"),
        ("bad.parquet", "", "bad.parquet cannot be read"),
        ("bad.json", "", "must be a list of rows"),
        ("cut.json", "", r"cut.json: must be JSON \("),
        ("twice.csv", "", r"must name every column once, not \['a', 'a'\]"),
        ("twice.parquet", "", r"must name every column once, not \['text', 'text'\]"),
        ("nowhere://x/rows.jsonl", "", "Protocol not known: nowhere"),
        ("away://x/rows.jsonl", "", "data.url 'away://x/rows.jsonl': no route to the hub"),
        ("http://127.0.0.1:9/data/rows.jsonl", "", "url 'http://127.0.0.1:9/data/rows.jsonl': does not exist"),
    ):
        place = url if "://" in url else str(tmp_path / url)
        with pytest.raises(UserError, match=message):
            check_source(DataSource(url=place, split=split), work, renderer, SFT)
    assert places
