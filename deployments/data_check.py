"""Checks of pipelines' input before anything starts, and `tinkerflow data check`."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.core.ids import EMBEDDED
from tinkerflow.backend.core.suggest import did_you_mean
from tinkerflow.backend.settings import Settings
from tinkerflow.backend.spec.checkpoint import CheckpointPath
from tinkerflow.deployments.config import import_beside, read_config
from tinkerflow.deployments.options import explain
from tinkerflow.tasks.pipelines.data import (
    DataCheckError,
    DataReport,
    ReadRows,
    Use,
    inspect,
    read_source,
    refuse_bad,
    refuse_unknown_fields,
)
from tinkerflow.tasks.pipelines.parameters import PARAMETERS, AnyParameters, JudgeParameters
from tinkerflow.tasks.pipelines.render import Format, Renderer, TokenizedExample
from tinkerflow.tasks.pipelines.server_address import offered_name, server_from_environment
from tinkerflow.tasks.pipelines.sources import DataSource

_FIRST_ROWS = 1000
_ANY_SCHEMA = Use("data check", ("chat", "prompt_completion", "preference", "prompt", "text"), 2048, extra=None)


@dataclass(frozen=True)
class Checked:
    """A data set to check. name: data or held_out. of_options: command-line options describe it, not a file."""

    name: str
    source: DataSource
    use: Use
    format: Format
    of_options: bool = False


def parameters_of(pipeline: str, values: Mapping[str, Any]) -> AnyParameters:
    """Validate the parameters of a pipeline. UserError, as one line: there is no such pipeline, or a value is wrong."""
    model = PARAMETERS.get(pipeline)
    if model is None:
        names = f"{', '.join(PARAMETERS)}{did_you_mean(pipeline, PARAMETERS)}"
        raise UserError(f"pipeline {pipeline!r}: must be one of {names}")
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise UserError(explain(error, model, names={"settings": f"parameters of {pipeline}"})) from error


def check_code(parameters: AnyParameters) -> None:
    """Raise UserError if the reward or the environment of a run cannot be imported."""
    from tinkerflow.tasks.pipelines.adapters import adapter_named, environment_maker

    if not isinstance(parameters, JudgeParameters) or not parameters.judge:
        return
    if adapter_named(parameters.environment.partition(":")[0]) is None:
        environment_maker(parameters.reward, parameters.environment)


def check_first_rows(parameters: AnyParameters) -> None:
    """Refuse data that a run would refuse, judged by its first rows on this machine, within a second.

    UserError: a file cannot be read. DataCheckError: too many rows are wrong.
    """
    for checked in data_sets(parameters):
        source = checked.source
        if _is_remote(source):
            continue  # remote data is checked when the run begins
        read = read_source(source, checked.use, min(source.limit or _FIRST_ROWS, _FIRST_ROWS))
        bad = len(read.quarantine)
        total = len(read.good) + bad
        if not total or (bad and (total < _FIRST_ROWS or not read.good)):
            report = DataReport(
                url=source.url, schema_name=read.reader.schema, digest="", rows=len(read.good), bad_rows=bad,
                duplicates=0, characters=0, first_errors=read.bad,
            )  # fmt: skip
            refuse_bad(source, report)
        read.refuse_schema(source, checked.use)


def _is_remote(source: DataSource) -> bool:
    return "://" in source.url and not source.url.startswith("file://")


def data_sets(parameters: AnyParameters) -> list[Checked]:
    _, format_ = parameters.base_model_and_format()
    return [Checked(name, source, parameters.use(), format_) for name, source in parameters.sources().items()]


def sources_of(url: str | None, config: Path | None, pipeline: str, options: Mapping[str, Any]) -> list[Checked]:
    """The data sets that the options of `tinkerflow data check` name.

    UserError: the options name no data or two data sets, or the reward or the environment of `config` cannot be
    imported.
    """
    if (url is None) == (config is None):
        raise UserError("data check: give either a file, folder or URL, or --config FILE")
    if config is not None:
        values = read_config(config)
        import_beside(config)
        parameters = parameters_of(pipeline or _pipeline_of(values), values)
        check_code(parameters)
        return data_sets(parameters)
    for pair in options["column"]:
        if "=" not in pair:
            raise UserError(f"--column {pair!r}: must be FIELD=COLUMN, as in prompt=question")
    columns = dict(pair.split("=", 1) for pair in options["column"])
    if not pipeline:  # the fields that a reward takes are known only to its pipeline
        refuse_unknown_fields("--column ", columns)
    data = {"url": url, "kind": options["kind"], "columns": columns, "ignore": options["ignore"]}
    use = _ANY_SCHEMA
    if pipeline:
        required: dict[str, dict[str, Any]] = {"sweep": {"grid": {"seed": [0]}}, "nightly": {"champion": "x"}}
        required["rl"] = {"reward": "a:b"}
        held_out = {"held_out": data} if pipeline in ("sweep", "nightly") else {}
        values = {"data": data, **required.get(pipeline, {}), **held_out}
        use = data_sets(parameters_of(pipeline, values))[0].use
    try:
        source = DataSource.model_validate(data)
    except ValidationError as error:
        raise UserError(explain(error, DataSource)) from error
    return [Checked("data", source, replace(use, max_tokens=options["max_tokens"]), options["format"], True)]


def _pipeline_of(values: Mapping[str, Any]) -> str:
    """The pipeline that has all of these parameters, preferably one with a characteristic parameter among them."""
    marks = {"champion": "nightly", "grid": "sweep", "beta": "dpo", "teacher": "distill", "reward": "rl"}
    best = next((name for mark, name in marks.items() if mark in values), "rl" if "environment" in values else "sft")
    fitting = [
        name
        for name, model in PARAMETERS.items()
        if {field for field, about in model.model_fields.items() if about.is_required()} <= set(values)
        if set(values) <= set(model.model_fields)
    ]
    return best if best in fitting or not fitting else fitting[0]


def check_files(
    console: Console, settings: Settings, sources: Sequence[Checked], base_model: str, show: int, against: str = ""
) -> bool:
    """Check data sets and print the findings. Returns whether a run with them would begin.

    base_model: provides the tokenizer; "" = the base model of `against`, or the first one that is served. show: rows to
    print as the model reads them. against: a run or checkpoint, or ""; the result is also False if it was trained on
    any row.
    """
    began, good = time.monotonic(), True
    for checked in sources:
        if not _is_remote(checked.source):
            read_source(checked.source, checked.use, 1)  # a wrong path is refused before a model is made
    if against and not base_model:
        base_model = _model_behind(settings, against)
    base_model = base_model or next(iter(settings.base_models), EMBEDDED)
    tokenizer = _tokenizer(settings, base_model)
    for checked in sources:
        renderer = Renderer(tokenizer, checked.format, checked.source.special_tokens)
        report, read, tokenized = inspect(checked.source, renderer, checked.use)
        _print_report(console, checked, report)
        for bad in report.first_errors:
            console.print(Text(f"wrong  {bad}", "red"), soft_wrap=True)
        if checked.of_options and (flags := _flags(report)):
            console.print(Text(f"fix    add to this command, for example: {flags}", "yellow"), soft_wrap=True)
        for note in report.notes + _unused_without_pipeline(checked, read):
            console.print(Text(f"note   {note}", "yellow"), soft_wrap=True)
        for example in tokenized.examples[:show]:
            _print_example(console, renderer, example)
        if against and tokenized.examples:
            places = [raw.where for (raw, _), n in zip(read.good, tokenized.counts, strict=True) for _ in range(n)]
            good &= _compare(console, settings, [one.tokens for one in tokenized.examples], places, against)
        try:
            refuse_bad(checked.source, report)
        except DataCheckError as error:
            console.print(Text(error.message.partition("; first:")[0], "red"), soft_wrap=True)
            good = False
        if report.rows and not tokenized.examples:
            console.print(Text(f"every sequence has more than {checked.use.max_tokens} tokens", "red"))
            good = False
    seconds = time.monotonic() - began
    console.print(f"checked in {seconds:.1f} s with the tokenizer of {base_model}", style="dim", highlight=False)
    return good


def _model_behind(settings: Settings, against: str) -> str:
    """The base model of a run or of a checkpoint's run, whose history must exist."""
    from tinkerflow.deployments.recorded_run import Api, RecordedRun

    run_id = CheckpointPath.parse(against).run_id if against.startswith("tinker://") else against
    with Api(*server_from_environment(settings)) as api:
        return str(RecordedRun.find(api, run_id).about["base_model"])


def _compare(
    console: Console, settings: Settings, rows: Sequence[Any], places: Sequence[str], against: str, most: int = 10
) -> bool:
    """Print which rows a run or a checkpoint was trained on. Returns whether it was trained on none of them.

    rows: each row's tokens. places: the rows' places in the data. most: rows to print.
    """
    from tinkerflow.deployments.contamination import CONTAMINATED, NGRAM, Comparison, trained_rows
    from tinkerflow.deployments.recorded_run import Api

    comparison, trained = Comparison(rows), 0

    def unknown(path: str) -> None:
        text = f"note   {against} began with {path}, whose rows are in no history"
        console.print(Text(text, "yellow"), soft_wrap=True)

    with Api(*server_from_environment(settings)) as api:
        for where, tokens in trained_rows(api, against, unknown):
            comparison.add(where, tokens)
            trained += 1
    found = sorted(zip(comparison.overlaps, places, strict=True), key=lambda one: (not one[0].exact, -one[0].share))
    exact = sum(overlap.exact is not None for overlap, _ in found)
    bad = sum(overlap.contaminated for overlap, _ in found)
    console.print(f"{against} was trained on {trained} different rows", highlight=False, soft_wrap=True)
    text = f"{exact} of {len(rows)} rows are identical to one of them; {bad - exact} others have at least"
    text += f" {CONTAMINATED:.0%} of their tokens in {NGRAM}-grams of them"
    console.print(Text(text, "red" if bad else ""), soft_wrap=True)
    if any(overlap.nearest for overlap, _ in found):
        table = Table("row", "tokens trained on", "in step:row")
        for overlap, place in found[:most]:
            if overlap.nearest is not None:
                table.add_row(place, "all" if overlap.exact else f"{overlap.share:.0%}", str(overlap.nearest))
        console.print(table)
    return not bad


def _unused_without_pipeline(checked: Checked, read: ReadRows) -> list[str]:
    """A note about columns that most pipelines refuse, if the check is for no particular pipeline."""
    if checked.use.name != _ANY_SCHEMA.name:
        return []
    names = dict.fromkeys(name for _, row in read.good for name, value in row.extra.items() if value is not None)
    if not names:
        return []
    flags = shlex.join(word for name in names for word in ("--ignore", name))
    return [
        f"not used: {', '.join(names)}: rl gives them to the reward, and other pipelines refuse the rows; "
        f"check again with --pipeline sft, or add: {flags}"
    ]


def _flags(report: DataReport) -> str:
    """The options of `data check` that would repair wrong rows; empty if there are none."""
    columns = next((bad.columns for bad in report.first_errors if bad.columns), {})
    ignored = dict.fromkeys(name for bad in report.first_errors for name in bad.ignore)
    pairs = [("--column", f"{name}={column}") for name, column in columns.items()]
    pairs += [("--ignore", name) for name in ignored]
    return shlex.join(word for pair in pairs for word in pair)


def _print_report(console: Console, checked: Checked, report: DataReport) -> None:
    lengths = "shortest {}, median {}, 95 % up to {}, longest {}".format(*report.lengths) if report.lengths else "none"
    facts = {
        "form": f"{report.form} (schema {report.schema_name}) for {checked.use.name}" if report.form else "none",
        "rows": f"{report.rows} good, {report.bad_rows} wrong, {report.duplicates} duplicates",
        "tokens": f"{report.tokens}, of which {report.trained_tokens} are trained on",
        "sequences": f"{lengths}; {report.too_long} over {checked.use.max_tokens} tokens are left out",
    }
    table = Table(show_header=False, box=None, title=f"{checked.name}: {checked.source.url}", title_justify="left")
    for name, value in facts.items():
        table.add_row(name, Text(value))
    console.print(table)


def _print_example(console: Console, renderer: Renderer, example: TokenizedExample) -> None:
    """Print a sequence with the trained parts in green, or in brackets if the console has no colors."""
    colors = console.is_terminal and not console.no_color
    text = Text()
    for piece, trained in renderer.pieces(example):
        text.append(piece if colors or not trained else f"⟦{piece}⟧", "green" if trained else "dim")
    console.print(Text("trained on: green" if colors else "trained on: in ⟦brackets⟧", "italic"))
    console.print(text, soft_wrap=True)


def _tokenizer(settings: Settings, name: str) -> Any:
    """The tokenizer of a base model. The embedded model's is made in a scratch folder, so a check leaves no files."""
    from transformers import PreTrainedTokenizerFast

    from tinkerflow.backend.catalog.model_source import TEXT_FILES, find_model

    if name != EMBEDDED:
        return PreTrainedTokenizerFast.from_pretrained(find_model(name, TEXT_FILES))
    from tinkerflow.deployments.tiny_model import write_tokenizer

    with TemporaryDirectory() as scratch:
        write_tokenizer(Path(scratch))
        return PreTrainedTokenizerFast.from_pretrained(scratch)


def check_server(parameters: AnyParameters, url: str, key: str) -> None:
    """Raise UserError, with the fix, if no server answers, or it refuses the key, the base model or a checkpoint."""
    try:
        answer = httpx.get(f"{url}/api/v1/get_server_capabilities", headers={"X-API-Key": key}, timeout=10)
    except httpx.HTTPError as error:
        fix = "start it with `tinkerflow up`, set TINKER_BASE_URL, or use --example"
        raise UserError(f"no server answers at {url} ({error}): {fix}") from error
    if answer.status_code == 401:
        given = "the key in TINKER_API_KEY" if os.environ.get("TINKER_API_KEY") else "a request without TINKER_API_KEY"
        raise UserError(f"{url} refuses {given}: {answer.text[:200]}")
    wanted, _ = parameters.base_model_and_format()
    if answer.is_success and wanted:
        offered_name(wanted, [model["model_name"] for model in answer.json().get("supported_models", [])])
    for name, path in _checkpoints_of(parameters.model_dump()):
        found = httpx.post(
            f"{url}/api/v1/weights_info", json={"tinker_path": path}, headers={"X-API-Key": key}, timeout=10
        )
        if found.is_client_error:
            is_json = found.headers.get("content-type", "").startswith("application/json")
            reason = found.json()["detail"] if is_json else found.text[:200]
            raise UserError(f"{name}: {reason}; `tinkerflow checkpoint list` shows the checkpoints")


def _checkpoints_of(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The checkpoints among the parameters, as pairs of a parameter's name and a path."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _checkpoints_of(value, f"{prefix}{name}.")
        elif name in ("start_from", "weights", "against") and str(value).startswith("tinker://"):
            yield f"{prefix}{name}", str(value)
