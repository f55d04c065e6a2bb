"""Sources of rows: files and folders at any fsspec URL, read one row at a time.

A file ends in .jsonl or .ndjson, .json (a list of rows, or a row on each line), .csv or .tsv (the first line names the
columns), .txt (one text), each also compressed (.gz, .bz2, .xz, .zst), .parquet or .arrow. A folder contains such files
at any depth, or was written by `save_to_disk` of `datasets`. Hidden files and folders below it are not read.

A row that cannot be read is returned with its error, and reading continues with the next row.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import IO, Annotated, Any, ClassVar, Literal
from urllib.parse import unquote

import fsspec
from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.core.suggest import did_you_mean
from tinkerflow.tasks.pipelines.adapters import adapter_named
from tinkerflow.tasks.pipelines.row_errors import RowError
from tinkerflow.tasks.pipelines.rows import strict_json

JOURNAL = "journal://"
_LINES = {".jsonl": "lines", ".ndjson": "lines", ".json": "json", ".csv": "csv", ".tsv": "csv", ".txt": "text"}
_TABLES = {".parquet": "parquet", ".arrow": "arrow"}
_ARROW_FILE = b"ARROW1"  # the beginning of an Arrow file; an Arrow stream begins differently
_ABOUT_DATA = ("dataset_info.json", "dataset_infos.json")  # files that `datasets` writes next to files of rows
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
ENDINGS = ".jsonl, .ndjson, .json, .csv, .tsv, .txt (also compressed), .parquet or .arrow"
MAX_ROW_BYTES = 16 * 2**20
_MAX_DOCUMENT_BYTES = 2**30  # maximum size of a .json file, which is read as a whole
_UTF_8 = "must be UTF-8; a file of Latin-1 becomes UTF-8 with `iconv -f latin1 -t utf-8 FILE > NEW_FILE`"
_BATCH = 1024  # rows of a Parquet file in memory at a time


def _alone(value: object) -> object:
    """Convert a single name to a list."""
    return [value] if isinstance(value, str) else value


class DataSource(BaseModel):
    """A source of rows, the form of the rows, and the checks that they must pass."""

    model_config = ConfigDict(extra="forbid")
    parameter: ClassVar[str] = "data"  # the source's name, for errors

    url: str = Field(
        min_length=1,
        description="A file (.jsonl, .json, .csv, .tsv, .txt, .parquet, .arrow), a folder of them, or a folder by "
        "datasets' save_to_disk; a path or any fsspec URL (gs://, s3://, hf://, https://). Or "
        "journal://?rated=true&since=7d: answers that people rated. Or reasoning-gym://TASK?size=500, "
        "verifiers://NAME or harbor:///FOLDER: questions of an environment.",
    )
    split: str = Field("", description="In a folder: read only the files named for this split, such as 'train'.")
    kind: Literal["auto", "chat", "sharegpt", "alpaca", "preference", "prompt_completion", "prompt", "text"] = Field(
        "auto", title="Form", description="The form of the rows; auto: the most common form of the first 100 rows."
    )
    columns: dict[str, str] = Field(
        {}, description="Field of the form: name of the column that contains it, as in {prompt: question}."
    )
    ignore: Annotated[list[str], BeforeValidator(_alone)] = Field(
        [],
        description="Fields to leave out, such as id or messages.refusal; '*' = all fields that the form lacks. Other "
        "unused fields make a row wrong.",
    )
    special_tokens: Literal["text", "tokens"] = Field(
        "text",
        description="Special tokens of the tokenizer that occur in rows: text = plain text; tokens = special tokens.",
    )
    limit: int = Field(0, ge=0, description="Maximum number of rows to read; 0 = all.")
    max_bad_fraction: float = Field(
        0.02,
        ge=0,
        le=1,
        description="Share of rows that may be wrong and are left out; the check fails if more are wrong.",
    )
    min_rows: int = Field(1, ge=1, description="The check fails if fewer good rows than this are left.")


class HeldOutSource(DataSource):
    """`columns`, `ignore` and `special_tokens` default to those of `data`."""

    parameter: ClassVar[str] = "held_out"

    def like(self, data: DataSource) -> HeldOutSource:
        """A copy with the `columns`, `ignore` and `special_tokens` of `data`, unless they are given here."""
        shared = {"columns", "ignore", "special_tokens"} - self.model_fields_set
        return self.model_copy(update={name: getattr(data, name) for name in shared})


@dataclass(frozen=True)
class RawRow:
    """A row as read. where: `file:line` for people; lines and rows count from 1. is_empty: the row has no values."""

    where: str
    value: object
    is_empty: bool = False


Item = RawRow | tuple[RawRow, RowError]


def read_rows(source: DataSource) -> Iterator[Item]:
    """All rows of a source, ordered by file name. A row that cannot be read is returned with its error.

    UserError: there is nothing to read, or a file is damaged.
    """
    if source.url.startswith(JOURNAL):
        from tinkerflow.tasks.pipelines.rated import rated_rows

        yield from _made_rows("feedback", rated_rows(source.url, source.kind))
        return
    if (adapter := adapter_named(scheme := source.url.partition("://")[0])) is not None:
        yield from _made_rows(scheme, adapter.read_rows(source.url, source.split))
        return
    url = unquote(source.url) if source.url.startswith("file://") else source.url
    try:
        filesystem, path = url_to_fs(url)
        files = _files(filesystem, path, source)
    except UserError:
        raise
    except Exception as error:  # a missing library, no network, no permission: each filesystem raises its own errors
        raise UserError(f"{source.parameter}.url {source.url!r}: {' '.join(str(error).split())}") from error
    for file in files:
        try:
            yield from _read(filesystem, file)
        except UserError:
            raise
        except Exception as error:  # codecs and pyarrow raise their own errors
            reason = " ".join(str(error).split())
            raise UserError(
                f"{source.parameter}.url {source.url!r}: {PurePosixPath(file).name} cannot be read: {reason}"
            ) from error


def _made_rows(origin: str, rows: Iterable[object]) -> Iterator[RawRow]:
    """Rows that do not come from a file, each with its number."""
    return (RawRow(f"{origin}:{number}", row) for number, row in enumerate(rows, 1))


def _files(filesystem: AbstractFileSystem, path: str, source: DataSource) -> list[str]:
    """The files at a URL. UserError: there are no files."""
    if filesystem.isfile(path):
        return [path]
    if not filesystem.exists(path):
        near = did_you_mean(Path(path).name, _names_in(filesystem, str(Path(path).parent)))
        raise UserError(f"{source.parameter}.url {source.url!r}: does not exist{near}")
    saved = _saved_to_disk(filesystem, path, source.split)
    if saved is not None:
        return saved
    parts = {file: file[len(path) :].strip("/").split("/") for file in sorted(filesystem.find(path)) if _kind(file)}
    # Editors, notebooks and `hf download` keep hidden copies and notes of their own.
    hidden = {file for file, names in parts.items() if any(name.startswith(".") for name in names)}
    files = [file for file, names in parts.items() if file not in hidden and names[-1] not in _ABOUT_DATA]
    if source.split:
        files = [file for file in files if any(_is_named_for(part, source.split) for part in parts[file])]
    if not files:
        of_split = f" of the split {source.split!r}" if source.split else ""
        raise UserError(f"{source.parameter}.url {source.url!r}: contains no file{of_split} that ends in {ENDINGS}")
    return files


def _names_in(filesystem: AbstractFileSystem, folder: str) -> list[str]:
    try:
        return [PurePosixPath(name).name for name in filesystem.ls(folder, detail=False)]
    except Exception:  # noqa: BLE001  clients of remote files raise their own errors, and this is only for a hint
        return []


def _is_named_for(part: str, split: str) -> bool:
    return part == split or part.startswith((f"{split}-", f"{split}.", f"{split}_"))


def _saved_to_disk(filesystem: AbstractFileSystem, folder: str, split: str) -> list[str] | None:
    """The Arrow files in a folder of `Dataset.save_to_disk` or `DatasetDict.save_to_disk`; None for other folders."""
    if filesystem.exists(f"{folder}/dataset_dict.json"):
        splits = json.loads(filesystem.cat_file(f"{folder}/dataset_dict.json"))["splits"]
        if split not in splits and not (split == "" and len(splits) == 1):
            raise UserError(f"split {split!r}: must be one of {', '.join(splits)}{did_you_mean(split, splits)}")
        return _saved_to_disk(filesystem, f"{folder}/{split or splits[0]}", "")
    if not filesystem.exists(f"{folder}/state.json"):
        return None
    state = json.loads(filesystem.cat_file(f"{folder}/state.json"))
    return [f"{folder}/{file['filename']}" for file in state["_data_files"]]


def _kind(path: str) -> str:
    """The kind of a file: `lines`, `json`, `csv`, `text`, `parquet`, `arrow`; empty for an unsupported file."""
    name = PurePosixPath(path)
    ending = PurePosixPath(name.stem).suffix if name.suffix in _COMPRESSED else name.suffix
    return _LINES.get(ending, "") or _TABLES.get(name.suffix, "")


def _read(filesystem: AbstractFileSystem, path: str) -> Iterator[Item]:
    name, kind = PurePosixPath(path).name, _kind(path)
    if not kind:
        raise UserError(f"data file {name}: must end in {ENDINGS}")
    with filesystem.open(path, "rb", compression=fsspec.utils.infer_compression(path)) as file:
        match kind:
            case "lines":
                yield from _lines(file, name)
            case "json":
                yield from _document(file, name)
            case "csv":
                yield from _csv(file, name, "\t" if ".tsv" in name else ",")
            case "text":
                yield _text_row(file, name)
            case _:
                yield from _table(file, name, kind)


def _lines(file: IO[bytes], name: str) -> Iterator[Item]:
    for number, line in enumerate(_cut_lines(file), 1):
        where = f"{name}:{number}"
        if len(line) > MAX_ROW_BYTES:
            yield _wrong(where, None, f"must have at most {MAX_ROW_BYTES} bytes")
            continue
        text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        if text.strip():
            yield _row(where, text)


def _cut_lines(file: IO[bytes]) -> Iterator[bytes]:
    """The lines without line ends, cut to MAX_ROW_BYTES + 1 bytes. `readline` of remote files accepts no limit."""
    line = bytearray()
    while chunk := file.read(2**20):
        for i, piece in enumerate(chunk.split(b"\n")):
            if i:
                yield bytes(line)
                line.clear()
            line += piece[: MAX_ROW_BYTES + 1 - len(line)]
    if line:
        yield bytes(line)


def _row(where: str, text: bytes) -> Item:
    try:
        return RawRow(where, strict_json(text.decode()))
    except UnicodeDecodeError:
        return _wrong(where, text.decode(errors="replace").rstrip("\n"), _UTF_8)
    except (ValueError, RecursionError) as error:
        return _wrong(where, text.decode(errors="replace").rstrip("\n"), f"must be JSON ({error})")


def _wrong(where: str, text: str | None, rule: str) -> tuple[RawRow, RowError]:
    return RawRow(where, text or ""), RowError("line", text, rule)


def _document(file: IO[bytes], name: str) -> Iterator[Item]:
    data = file.read(_MAX_DOCUMENT_BYTES + 1)
    if len(data) > _MAX_DOCUMENT_BYTES:
        raise UserError(f"data file {name}: must have at most {_MAX_DOCUMENT_BYTES} bytes; use .jsonl for more")
    data = data.removeprefix(b"\xef\xbb\xbf")
    try:
        rows = strict_json(data.decode())
    except (ValueError, RecursionError) as error:
        if data.lstrip().startswith(b"{"):  # a row on each line, as `Dataset.to_json` of `datasets` writes them
            yield from _lines(io.BytesIO(data), name)
            return
        lines = _elements(data)
        if lines is None:
            raise UserError(f"data file {name}: must be JSON ({error})") from error
        for number, line in enumerate(lines, 1):
            yield _row(f"{name}:{number}", line)
        return
    if not isinstance(rows, list):
        raise UserError(f"data file {name}: must be a list of rows; a file with a row on each line ends in .jsonl")
    for number, row in enumerate(rows, 1):
        yield RawRow(f"{name}:{number}", row)


_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[][{},]', re.DOTALL)  # JSON strings and structural characters


def _elements(data: bytes) -> list[bytes] | None:
    """The texts of a JSON list's elements, which may be invalid themselves. None: the list does not end."""
    data = data.strip()
    depth, start, elements = 0, 1, list[bytes]()
    if not data.startswith(b"["):
        return None
    for token in _TOKEN.finditer(data):
        sign = token[0]
        if sign in (b"[", b"{"):
            depth += 1
        elif sign in (b"]", b"}"):
            depth -= 1
        if (depth == 1 and sign == b",") or depth == 0:
            elements.append(data[start : token.start()])
            start = token.end()
        if depth == 0:
            return elements if start == len(data) and sign == b"]" else None
    return None


def _csv(file: IO[bytes], name: str, usual: str) -> Iterator[Item]:
    """Rows of a CSV file. Empty cells are omitted. usual: the separator, unless line 1 contains another one more often.

    Spreadsheets write an empty row as only separators.
    """
    csv.field_size_limit(MAX_ROW_BYTES)
    lines = (line.decode(errors="surrogateescape").removeprefix("\ufeff") for line in file)
    first = next(lines, "")
    counts = Counter(re.sub('"[^"]*"', "", first))
    delimiter = max((usual, *",;\t"), key=lambda sign: counts[sign])
    reader = csv.reader(chain([first] if first else [], lines), delimiter=delimiter, strict=True)
    header: list[str] = []
    while True:
        where = f"{name}:{reader.line_num + 1}"
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            cause = 'a quote (") opens here and is not closed' if "unexpected end" in str(error) else error
            yield _wrong(where, None, f"must be CSV: {cause}")
            continue
        if not header:
            header = cells
            if not first.isascii() and _has_bytes(cells):
                raise UserError(f"data file {name}: the first line {_UTF_8}")
            if len(set(header)) < len(header) or not all(header):
                raise UserError(f"data file {name}: the first line must name every column once, not {header}")
        elif len(cells) != len(header) and cells:
            yield _wrong(where, delimiter.join(cells), f"must have {len(header)} cells, not {len(cells)}")
        elif _has_bytes(cells):
            text = delimiter.join(cells).encode(errors="surrogateescape").decode(errors="replace")
            yield _wrong(where, text, _UTF_8)
        elif cells:
            row = {column: cell for column, cell in zip(header, cells, strict=True) if cell}
            yield RawRow(where, row, is_empty=not any(cell.strip() for cell in cells))


def _has_bytes(cells: Iterable[str]) -> bool:
    """Whether texts that were decoded with `surrogateescape` contain bytes that are not UTF-8."""
    return any("\udc80" <= character <= "\udcff" for cell in cells for character in cell)


def _text_row(file: IO[bytes], name: str) -> Item:
    data = file.read(_MAX_DOCUMENT_BYTES + 1)
    if len(data) > _MAX_DOCUMENT_BYTES:
        return _wrong(name, None, f"must have at most {_MAX_DOCUMENT_BYTES} bytes")
    try:
        return RawRow(name, {"text": data.decode("utf-8-sig")})
    except UnicodeDecodeError as error:
        return _wrong(name, data[:80].decode(errors="replace"), f"{_UTF_8} ({error})")


def _table(file: IO[bytes], name: str, kind: str) -> Iterator[Item]:
    import pyarrow as pa  # imported here because it takes half a second, and readers of lines do not need it
    import pyarrow.parquet as pq

    batches: Iterable[pa.RecordBatch]
    if kind == "parquet":
        table = pq.ParquetFile(file)
        columns, batches = table.schema_arrow.names, table.iter_batches(_BATCH)
    elif file.read(len(_ARROW_FILE)) == _ARROW_FILE:
        whole = pa.ipc.open_file(file)
        columns, batches = whole.schema.names, map(whole.get_batch, range(whole.num_record_batches))
    else:
        file.seek(0)
        stream = pa.ipc.open_stream(file)
        columns, batches = stream.schema.names, stream
    if len(set(columns)) < len(columns):
        raise UserError(f"data file {name}: must name every column once, not {columns}")
    unreadable = (ValueError, OverflowError, pa.ArrowException)  # UnicodeDecodeError is a ValueError
    number = 0
    for batch in batches:
        try:
            rows = batch.to_pylist()
        except unreadable:
            rows = [None] * batch.num_rows
        for i, row in enumerate(rows):
            number += 1
            try:
                value = batch.slice(i, 1).to_pylist()[0] if row is None else row
                kept = _without_nulls(value)
                yield RawRow(f"{name}:{number}", kept, is_empty=not kept)
            except unreadable as error:
                yield _wrong(f"{name}:{number}", None, f"must be UTF-8 and values of Python ({error})")


def _without_nulls(value: Any) -> Any:
    """The value without null fields. In a table's columns of objects, null stands for an absent field."""
    if isinstance(value, dict):
        return {name: _without_nulls(held) for name, held in value.items() if held is not None}
    return [_without_nulls(held) for held in value] if isinstance(value, list) else value
