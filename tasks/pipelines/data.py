"""The data check: read and validate rows, store the good ones under a digest, and quarantine bad ones with errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import Literal

import orjson
from prefect import task
from prefect.cache_policies import NO_CACHE
from pydantic import BaseModel, ConfigDict, Field

from tinkerflow.backend.core.errors import UserError
from tinkerflow.tasks.pipelines.rows import Row, RowError, Schema, guess_schema, parse_row
from tinkerflow.tasks.pipelines.sources import RawRow, read_rows
from tinkerflow.tasks.pipelines.work import create_once, digest, open_work

_SHOWN_ERRORS = 20


class DataSource(BaseModel):
    """Where rows come from, and the checks that they must pass."""

    model_config = ConfigDict(extra="forbid")

    url: str = Field(
        min_length=1,
        description="A .jsonl or .parquet file, a folder of them, or a folder by datasets' save_to_disk; a path or any "
        "fsspec URL (gs://, s3://, hf://, https://). Or journal://?rated=true&since=7d: answers that people rated.",
    )
    split: str = Field("", description="In a folder: read only what is named for this split, such as 'train'.")
    kind: Literal["auto", "chat", "prompt_completion", "preference", "prompt"] = Field(
        "auto", title="Schema", description="The fields of a row; auto: the schema of the first row that fits any."
    )
    limit: int = Field(0, ge=0, description="Most rows to read; 0 = all.")
    max_bad_fraction: float = Field(
        0.02, ge=0, le=1, description="Share of rows that may be wrong and are left out; the check fails when more are."
    )
    min_rows: int = Field(1, ge=1, description="The check fails when fewer good rows than this are left.")


class BadRow(BaseModel):
    """A row that was left out."""

    where: str
    error: str


class DataReport(BaseModel):
    """The result of a check. digest: names the good rows by content; `load_rows` reads them from the work folder."""

    url: str
    schema_name: str
    digest: str
    rows: int
    bad_rows: int
    duplicates: int = Field(description="good rows that are the same as an earlier one; they stay")
    characters: int
    first_errors: list[BadRow]
    quarantine: str = Field(description="key of the file of bad rows in the work folder, empty when there are none")


class DataCheckError(UserError):
    """More rows are wrong, or fewer good, than the source allows; `report` has the figures."""

    def __init__(self, message: str, report: DataReport) -> None:
        """`message` names the data, the value and the limit."""
        super().__init__(message)
        self.report = report


@task(name="check data", task_run_name="check data: {source.url}", cache_policy=NO_CACHE)
def check_data(source: DataSource, work_url: str, forbidden: Sequence[str] = ()) -> DataReport:
    """Read and validate all rows, and store the good ones in the work folder.

    forbidden: strings that no text may contain. Raises DataCheckError when more rows are wrong than the source allows,
    or fewer are good.
    """
    work = open_work(work_url)
    schema, good, bad = _sort(source, forbidden)
    lines = [orjson.dumps(row.to_json(), option=orjson.OPT_SORT_KEYS) for row in good]
    name = digest(schema, *lines)
    report = DataReport(
        url=source.url,
        schema_name=schema,
        digest=name,
        rows=len(lines),
        bad_rows=len(bad),
        duplicates=sum(count - 1 for count in Counter(lines).values()),
        characters=sum(_characters(row) for row in good),
        first_errors=[BadRow(where=raw.where, error=error.message) for raw, error in bad[:_SHOWN_ERRORS]],
        quarantine=_quarantine(work_url, bad),
    )
    _refuse_bad(source, report)
    create_once(work, _key(name), b"\n".join(lines) + b"\n")
    return report


def load_rows(work_url: str, data_digest: str) -> list[Row]:
    """The good rows that a check stored."""
    return [Row.from_json(orjson.loads(line)) for line in open_work(work_url).read(_key(data_digest)).splitlines()]


def _key(name: str) -> str:
    return f"data/{name}.jsonl"


def _sort(source: DataSource, forbidden: Sequence[str]) -> tuple[Schema, list[Row], list[tuple[RawRow, RowError]]]:
    """The schema of the rows, the good rows, and the bad ones."""
    schema: Schema | None = None if source.kind == "auto" else source.kind
    good: list[Row] = []
    bad: list[tuple[RawRow, RowError]] = []
    for item in islice(read_rows(source.url, source.split, source.kind), source.limit or None):
        if isinstance(item, tuple):
            bad.append(item)
            continue
        try:
            schema = schema or guess_schema(item.value)
            good.append(parse_row(item.value, schema, forbidden=forbidden))
        except RowError as error:
            bad.append((item, error))
    return schema or "chat", good, bad


def _characters(row: Row) -> int:
    return sum(len(message["content"]) for part in (row.prompt, row.chosen, row.rejected) for message in part)


def _quarantine(work_url: str, bad: Sequence[tuple[RawRow, RowError]]) -> str:
    if not bad:
        return ""
    lines = [
        orjson.dumps({"where": raw.where, "error": error.message, "row": raw.value}, default=repr) for raw, error in bad
    ]
    key = f"quarantine/{digest(*lines)}.jsonl"
    create_once(open_work(work_url), key, b"\n".join(lines) + b"\n")
    return key


def _refuse_bad(source: DataSource, report: DataReport) -> None:
    total = report.rows + report.bad_rows
    first = f"; first: {report.first_errors[0].where}: {report.first_errors[0].error}" if report.first_errors else ""
    if total and report.bad_rows > source.max_bad_fraction * total:
        raise DataCheckError(
            f"data {source.url}: {report.bad_rows} of {total} rows are wrong, "
            f"max_bad_fraction allows {source.max_bad_fraction:.1%}{first}",
            report,
        )
    if report.rows < source.min_rows:
        raise DataCheckError(
            f"data {source.url}: {report.rows} good rows, min_rows asks for {source.min_rows}{first}", report
        )
