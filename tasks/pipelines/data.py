"""The data check: read rows, validate and tokenize them, and quarantine bad rows with their errors."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice

import numpy as np
import orjson
from pydantic import BaseModel, Field

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.core.suggest import did_you_mean
from tinkerflow.tasks.pipelines.render import Renderer, TokenizedExample
from tinkerflow.tasks.pipelines.row_errors import FEW, RowError, left_out, shorten, show, too_many_wrong
from tinkerflow.tasks.pipelines.rows import ALL_FIELDS, Form, Row, RowReader, Schema, forms_of, guess_form
from tinkerflow.tasks.pipelines.sources import DataSource, Item, RawRow, read_rows
from tinkerflow.tasks.pipelines.work import create_once, digest, open_work

_SHOWN_ERRORS = 20
_QUARANTINED = 20_000  # characters of a bad row in the quarantine
FIRST_ROWS = 100  # first rows that determine the form of a data set


@dataclass(frozen=True)
class Use:
    """How a pipeline uses the rows of a data set.

    name: the pipeline's name. schemas: the schemas that it accepts. max_tokens: longest sequence, or longest prompt.
    learns: the pipeline trains on (or scores) the answers of rows. Otherwise it uses prompts, and samples answers.
    extra: the other fields that it uses; None = all. answer_tokens: longest sampled answer, which shares the context
    with its prompt.
    """

    name: str
    schemas: tuple[Schema, ...]
    max_tokens: int
    learns: bool = True
    extra: frozenset[str] | None = frozenset()
    answer_tokens: int = 0

    def within(self, max_context: int) -> Use:
        """A copy for a model with this context length, because longer sequences would be refused."""
        return replace(self, max_tokens=max(2, min(self.max_tokens, max_context - self.answer_tokens)))


class BadRow(BaseModel):
    """Rows with the same problem, which are left out."""

    where: str = Field(description="the first of the rows")
    error: str
    rows: int = 1
    also: list[str] = Field([], description="the next of the rows, at most two")
    columns: dict[str, str] = Field({}, description="an example of columns that would make the rows right")
    ignore: list[str] = Field([], description="fields without which the rows would be right")

    def __str__(self) -> str:
        """Describe the problem for people."""
        if self.rows == 1:
            return f"{self.where}: {self.error}"
        return f"{self.rows} rows: {self.error}; first at {', '.join([self.where, *self.also])}"


@dataclass
class _Problem:
    where: str
    error: RowError | str
    rows: int = 0
    also: list[str] = field(default_factory=list)


class DataReport(BaseModel):
    """The result of a check. digest: the digest of the good rows, which `load_rows` reads from the work folder."""

    url: str
    form: str = Field("", description="how the rows are written; empty = no form has their fields")
    schema_name: str
    digest: str
    rows: int
    bad_rows: int
    too_long: int = Field(0, description="sequences over max_tokens, which are left out")
    duplicates: int = Field(description="good rows that are the same as an earlier one; they stay")
    characters: int
    tokens: int = 0
    trained_tokens: int = 0
    lengths: list[int] = Field([], description="tokens of a sequence: shortest, median, 95th percentile, longest")
    notes: list[str] = Field([], description="empty rows, and parts of good rows that are not trained on")
    first_errors: list[BadRow]
    quarantine: str = Field("", description="key of the file of bad rows in the work folder, empty when there are none")
    tokenized: str = Field("", description="key of the rows' tokens in the work folder, for `load_examples`")

    def summary(self) -> str:
        """The number of used and omitted rows on one line, with the first reasons and the place of all."""
        parts = [f"{self.rows} rows"]
        parts += [f"{self.bad_rows} left out ({self._reasons()})"] if self.bad_rows else []
        parts += [f"{self.too_long} sequences over max_tokens left out"] if self.too_long else []
        return ", ".join(parts)

    def _reasons(self) -> str:
        lines, everywhere = [], f"{self.quarantine} in the work folder" if self.quarantine else ""
        for bad in self.first_errors:
            more = bad.rows - 1 - len(bad.also)
            also = f" (also {', '.join(bad.also)}{f' and {more} more' if more else ''})" if bad.also else ""
            lines.append(f"{bad.where}: {bad.error}{also}")
        return left_out(lines, everywhere)


class DataCheckError(UserError):
    """More rows are wrong or fewer rows are good than the source allows. `report` contains the figures."""

    def __init__(self, message: str, report: DataReport) -> None:
        """message: names the data, the value and the limit."""
        super().__init__(message)
        self.report = report


@dataclass
class ReadRows:
    """The rows of a source: `good` rows with their content, and in `quarantine` each bad row with its error.

    empty: the places of table rows without any values, which are neither good nor bad.
    """

    reader: RowReader
    good: list[tuple[RawRow, Row]] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)
    quarantine: list[bytes] = field(default_factory=list)
    _problems: dict[str, _Problem] = field(default_factory=dict)

    @property
    def bad(self) -> list[BadRow]:
        """The problems of bad rows, ordered by their first rows."""
        return [
            BadRow(where=one.where, error=one.error, rows=one.rows, also=one.also)
            if isinstance(one.error, str)
            else BadRow(
                where=one.where,
                error=one.error.of(self.reader.parameter),
                rows=one.rows,
                also=one.also,
                columns=one.error.columns,
                ignore=one.error.ignore,
            )
            for one in self._problems.values()
        ]

    def refuse(self, raw: RawRow, error: RowError | str) -> None:
        """Add a bad row. The unused fields of all rows are one problem."""
        message = error if isinstance(error, str) else error.of(self.reader.parameter)
        key = error if isinstance(error, str) else error.problem
        problem = self._problems.setdefault(key, _Problem(raw.where, error))
        if 0 < problem.rows < FEW:
            problem.also.append(raw.where)
        problem.rows += 1
        if isinstance(error, RowError) and isinstance(problem.error, RowError) and not error.columns:
            more = [name for name in error.ignore if name not in problem.error.ignore]
            if more:
                problem.error = self.reader.unused(dict.fromkeys([*problem.error.ignore, *more]))
        row = {"where": raw.where, "error": message, "row": raw.value}
        try:
            text = json.dumps(row, default=repr, skipkeys=True)
        except RecursionError:
            text = json.dumps(row | {"row": "nested too deeply"})
        if len(text) > _QUARANTINED:
            text = json.dumps(row | {"row": shorten(show(raw.value), _QUARANTINED)})
        self.quarantine.append(text.encode())

    def refuse_schema(self, source: DataSource, use: Use) -> None:
        """Raise UserError if there are rows, and the pipeline does not accept their schema."""
        if self.good and self.reader.schema not in use.schemas:
            wanted = " or ".join(use.schemas)
            names = list(self.good[0][0].value) if isinstance(self.good[0][0].value, dict) else []
            raise UserError(
                f"{source.parameter} {source.url}: schema {self.reader.schema}: {use.name} needs {wanted}; "
                f"its first row has {', '.join(names)}"
            )


@dataclass(frozen=True)
class Tokenized:
    """Rows as sequences, one after another.

    counts: the number of sequences of each row. errors: index of a row -> why it has no tokens. too_long: the number of
    groups of sequences that were left out.
    """

    examples: Sequence[TokenizedExample]
    counts: Sequence[int]
    errors: Mapping[int, str]
    too_long: int

    def pack(self) -> bytes:
        """Write the sequences as one file, for `unpack`."""
        out = io.BytesIO()
        np.savez_compressed(
            out,
            tokens=np.concatenate([np.zeros(0, np.int32), *(example.tokens for example in self.examples)]),
            weights=np.concatenate([np.zeros(0, np.float32), *(example.weights for example in self.examples)]),
            lengths=np.array([len(example.tokens) for example in self.examples], np.int64),
            counts=np.array(self.counts, np.int64),
            too_long=np.int64(self.too_long),
            errors=np.frombuffer(orjson.dumps(sorted(self.errors.items())), np.uint8),
        )
        return out.getvalue()

    @staticmethod
    def unpack(data: bytes) -> Tokenized:
        """Read the sequences that `pack` wrote."""
        with np.load(io.BytesIO(data)) as arrays:
            tokens, weights, ends = arrays["tokens"], arrays["weights"], np.cumsum(arrays["lengths"])
            starts = ends - arrays["lengths"]
            examples = [TokenizedExample(tokens[a:b], weights[a:b]) for a, b in zip(starts, ends, strict=True)]
            errors = dict(orjson.loads(arrays["errors"].tobytes()))
            return Tokenized(examples, arrays["counts"].tolist(), errors, int(arrays["too_long"]))


def tokenize(rows: Sequence[Row], renderer: Renderer, use: Use) -> Tokenized:
    """Tokenize rows. Omits groups of sequences, such as a preference's pair, if one is longer than `use.max_tokens`."""
    examples: list[TokenizedExample] = []
    counts, errors, too_long = [], {}, 0
    for i, row in enumerate(rows):
        fit: list[TokenizedExample] = []
        try:
            groups = renderer.examples(row, use.max_tokens) if use.learns else [[renderer.prompt_example(row)]]
        except RowError as error:
            errors[i] = error.message
        else:
            for group in groups:
                if all(len(example.tokens) <= use.max_tokens for example in group):
                    fit += group
                else:
                    too_long += 1
        examples += fit
        counts.append(len(fit))
    return Tokenized(examples, counts, errors, too_long)


def read_source(source: DataSource, use: Use, most: int = 0) -> ReadRows:
    """Read and validate rows without tokenizing. most: number of rows to read; 0 = as many as the source allows."""
    if use.extra is not None:
        refuse_unknown_fields(f"{source.parameter}.columns.", source.columns, use.extra)
    items = islice(read_rows(source), most or source.limit or None)
    first = list(islice(items, FIRST_ROWS))
    form, guessed = _form(source, first, use)
    forms = () if guessed else forms_of(use.schemas)
    reader = RowReader(form, source.columns, frozenset(source.ignore), use.extra, use.name, forms, source.parameter)
    read = ReadRows(reader)
    for item in chain(first, items):
        if isinstance(item, tuple):
            read.refuse(*item)
            continue
        if item.is_empty:
            read.empty.append(item.where)
            continue
        try:
            read.good.append((item, read.reader.parse(item.value)))
        except RowError as error:
            read.refuse(item, error)
    return read


def refuse_unknown_fields(where: str, columns: Mapping[str, str], extra: Iterable[str] = ()) -> None:
    """Raise UserError for a column whose field is neither in a form nor in `extra`.

    where: prefix of the fields' names in the error. columns: maps fields to columns.
    """
    usable = (*ALL_FIELDS, *extra)
    for name, column in columns.items():
        if name not in usable:
            near = did_you_mean(name, usable)
            if column in usable:
                near = f" (the field comes first: is {name!r} the column of {column!r}?)"
            raise UserError(f"{where}{name}: no form has this field; must be one of {', '.join(usable)}{near}")


def _form(source: DataSource, first: Sequence[Item], use: Use) -> tuple[Form, bool]:
    """The most frequent form of the first rows, preferably one that the pipeline accepts, and whether there is one."""
    if source.kind != "auto":
        return source.kind, True
    forms, accepted = Counter[Form](), forms_of(use.schemas)
    for item in first:
        if isinstance(item, RawRow) and not item.is_empty:
            try:
                forms[guess_form(_renamed(item.value, source), accepted)] += 1
            except RowError:
                continue
    taken = [form for form in forms if RowReader(form).schema in use.schemas]
    return max(taken or forms, key=lambda form: forms[form], default=use.schemas[0]), bool(forms)


def _renamed(raw: object, source: DataSource) -> object:
    """The row with mapped columns renamed to their fields."""
    if not isinstance(raw, dict):
        return raw
    mapped = {name: raw[column] for name, column in source.columns.items() if column in raw}
    return {name: value for name, value in raw.items() if name not in source.columns.values()} | mapped


def inspect(
    source: DataSource, renderer: Renderer, use: Use, work_url: str = ""
) -> tuple[DataReport, ReadRows, Tokenized]:
    """Read, validate and tokenize all rows. Bad rows are not an error here, however many there are.

    work_url: the work folder, which keeps tokens for the next check of the same rows; "" = keep none.
    UserError: there is nothing to read, or the pipeline does not accept the rows' schema.
    """
    read, renderer = read_source(source, use), renderer.with_special_tokens(source.special_tokens)
    read.refuse_schema(source, use)
    schema = read.reader.schema
    lines = [orjson.dumps(row.to_json(), option=orjson.OPT_SORT_KEYS) for _, row in read.good]
    purpose = [] if use.learns else ["prompts"]
    key = digest(digest(schema, *lines), renderer.fingerprint, str(use.max_tokens), *purpose)
    tokenized = _tokenized(work_url, key, [row for _, row in read.good], renderer, use)
    for i, message in tokenized.errors.items():
        read.refuse(read.good[i][0], message)
    read.good = [good for i, good in enumerate(read.good) if i not in tokenized.errors]
    lines = [line for i, line in enumerate(lines) if i not in tokenized.errors]
    counts = [count for i, count in enumerate(tokenized.counts) if i not in tokenized.errors]
    tokenized = replace(tokenized, counts=counts)
    lengths = [len(example.tokens) for example in tokenized.examples]
    notes = Counter(note for _, row in read.good for note in _notes(row, use))
    shown = ", ".join(read.empty[:_SHOWN_ERRORS]) + (", ..." if len(read.empty) > _SHOWN_ERRORS else "")
    skipped = [f"{len(read.empty)} row(s): empty, skipped: {shown}"] if read.empty else []
    report = DataReport(
        url=source.url,
        form="" if read.reader.forms else read.reader.form,
        schema_name=schema,
        digest=digest(schema, *lines),
        rows=len(lines),
        bad_rows=len(read.quarantine),
        too_long=tokenized.too_long,
        duplicates=sum(count - 1 for count in Counter(lines).values()),
        characters=sum(_characters(row) for _, row in read.good),
        tokens=sum(lengths),
        trained_tokens=sum(int((example.weights > 0).sum()) for example in tokenized.examples),
        lengths=[int(n) for n in np.percentile(lengths, (0, 50, 95, 100), method="lower")] if lengths else [],
        notes=skipped + [f"{count} row(s): {note}" for note, count in sorted(notes.items())],
        first_errors=read.bad[:_SHOWN_ERRORS],
        tokenized=key,
    )
    if work_url:
        create_once(open_work(work_url), _rows_key(report.digest), b"\n".join(lines) + b"\n")
    return report, read, tokenized


def _tokenized(work_url: str, key: str, rows: Sequence[Row], renderer: Renderer, use: Use) -> Tokenized:
    """The rows' tokens, from the work folder if an earlier check has stored them there."""
    if not work_url:
        return tokenize(rows, renderer, use)
    work = open_work(work_url)
    try:
        return Tokenized.unpack(work.read(_tokens_key(key)))
    except FileNotFoundError:
        tokenized = tokenize(rows, renderer, use)
        create_once(work, _tokens_key(key), tokenized.pack())
        return tokenized


def check_source(source: DataSource, work_url: str, renderer: Renderer, use: Use) -> DataReport:
    """Check all rows of a source, and store the good ones and their tokens in the work folder.

    DataCheckError: more rows are wrong or fewer rows are good than the source allows. UserError: no sequence is short
    enough, or the pipeline does not accept the schema.
    """
    report, read, tokenized = inspect(source, renderer, use, work_url)
    if read.quarantine:
        report.quarantine = f"quarantine/{digest(*read.quarantine)}.jsonl"
        create_once(open_work(work_url), report.quarantine, b"\n".join(read.quarantine) + b"\n")
    refuse_bad(source, report)
    if not tokenized.examples:
        kind = "sequences" if use.learns else "prompts"
        raise UserError(f"max_tokens {use.max_tokens}: all {report.too_long} {kind} of {source.url} are longer")
    return report


def refuse_bad(source: DataSource, report: DataReport) -> None:
    """Raise DataCheckError if more rows are wrong or fewer rows are good than the source allows."""
    total = report.rows + report.bad_rows
    if not total:
        raise DataCheckError(f"{source.parameter}.url {source.url!r}: is empty: it contains no rows", report)
    first = f"; first: {report._reasons()}" if report.first_errors else ""
    if report.bad_rows > source.max_bad_fraction * total:
        refused = too_many_wrong(report.bad_rows, total, source.max_bad_fraction, source.parameter)
        raise DataCheckError(f"{source.parameter} {source.url}: {refused}{first}", report)
    if report.rows < source.min_rows:
        raise DataCheckError(
            f"{source.parameter} {source.url}: {report.rows} good rows, min_rows asks for {source.min_rows}{first}",
            report,
        )


def load_rows(work_url: str, report: DataReport) -> list[Row]:
    """Load the good rows that a check stored. Omits rows without a sequence that is short enough."""
    work = open_work(work_url)
    tokenized = Tokenized.unpack(work.read(_tokens_key(report.tokenized)))
    counts = [count for i, count in enumerate(tokenized.counts) if i not in tokenized.errors]
    lines = work.read(_rows_key(report.digest)).splitlines()
    return [Row.from_json(orjson.loads(line)) for line, count in zip(lines, counts, strict=True) if count]


def load_examples(work_url: str, report: DataReport) -> Sequence[TokenizedExample]:
    """Load the sequences that a check stored."""
    return Tokenized.unpack(open_work(work_url).read(_tokens_key(report.tokenized))).examples


def _rows_key(name: str) -> str:
    return f"data/{name}.jsonl"


def _tokens_key(name: str) -> str:
    return f"tokens/{name}.npz"


def _notes(row: Row, use: Use) -> Iterator[str]:
    """Notes on the parts of a row that the pipeline does not use."""
    messages = (*row.prompt, *row.chosen)
    if not use.learns and row.chosen and use.extra is not None:
        yield f"{use.name} uses the prompt, not the answer"
    elif use.learns and row.chosen and row.chosen[-1]["role"] != "assistant":
        yield "the messages after the last answer are not trained on"
    linked = any("id" in call for message in messages for call in message.get("tool_calls", ()))
    if not linked and any("tool_call_id" in message for message in messages):
        yield "tool_call_id names no tool call of the row"


def _characters(row: Row) -> int:
    messages = (message for part in (row.prompt, row.chosen, row.rejected) for message in part)
    return len(row.text) + sum(len(message["content"]) for message in messages)
