"""Write the generated parts of pages, `docs/llms.txt`, and the schema of the Helm chart's values.

    python -m tests.docs.generate

A page consists of prose and of blocks between `<!-- generated: NAME -->` and `<!-- end -->`. `BLOCKS` maps a block's
name to the function that makes it. `test_generated.py` compares the committed pages with the code.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import textwrap
from collections.abc import Callable, Mapping
from copy import copy
from typing import Any, get_args, get_origin

import annotated_types
import typer
from msgspec.structs import fields
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from tests.compat import table as compatibility
from tests.docs import accelerators, python_api, sizing, verified
from tests.docs.metrics import families
from tests.docs.pages import DOCS, ROOT, written
from tests.docs.website import page_map, summary

from tinkerflow.api.chat import parsers as chat_parsers
from tinkerflow.api.chat.parsers import PARSERS
from tinkerflow.backend.compute.models.families import registered
from tinkerflow.backend.journal.quotas import Limits
from tinkerflow.backend.settings import Settings, variable_of
from tinkerflow.backend.spec.losses import LOSSES
from tinkerflow.backend.spec.optimizers import OPTIMIZERS
from tinkerflow.deployments.commands import every_command
from tinkerflow.flows.pipelines import pipelines
from tinkerflow.tasks.pipelines.parameters import PipelineParameters

LLMS = DOCS / "llms.txt"
CHART_SCHEMA = ROOT / "deployments" / "kubernetes" / "values.schema.json"
_BLOCK = re.compile(r"<!-- generated: ([\w-]+) -->\n.*?<!-- end -->", re.S)


def rewritten(page: str) -> str:
    """The page with newly generated blocks. KeyError: BLOCKS does not contain a block's name."""
    return _BLOCK.sub(lambda found: f"<!-- generated: {found[1]} -->\n\n{BLOCKS[found[1]]()}\n\n<!-- end -->", page)


def blocks_of(page: str) -> list[str]:
    """The names of a page's blocks."""
    return _BLOCK.findall(page)


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def cell(text: str) -> str:
    """Text for a table's cell: on one line, beginning with a capital if it begins with a word."""
    text = " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
    return text[:1].upper() + text[1:] if re.match(r"[a-z]+[ ,;.](?!=)", text) else text


# ---------------------------------------------------------------------- settings
def settings() -> str:
    """Every setting: its variable and option, default, bounds and meaning."""
    options = {parameter.name for parameter in parameters(command_line()["tinkerflow up"])}
    rows = [
        (f"`TINKERFLOW_{name.upper()}`{_option(name, options)}", _default(field), _allowed(field), _meaning(field))
        for name, field in Settings.model_fields.items()
    ]
    return table(("variable", "default", "allowed", "meaning"), rows)


def _option(name: str, options: set[str]) -> str:
    found = next((option for option in (name, name.removesuffix("s")) if option in options), None)
    return f"<br>`--{found.replace('_', '-')}`" if found else ""


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value}`" if str(value) not in {"", "()", "[]", "None"} else "empty"


def _allowed(field: FieldInfo) -> str:
    choices = getattr(field.annotation, "__args__", ()) if "Literal" in str(field.annotation) else ()
    bounds = {annotated_types.Ge: ">= {.ge}", annotated_types.Gt: "> {.gt}", annotated_types.Le: "<= {.le}"}
    found = [text.format(rule) for rule in field.metadata for kind, text in bounds.items() if isinstance(rule, kind)]
    if field.annotation is bool:
        choices = ("true", "false")
    if get_origin(field.annotation) is tuple:
        found.append("names: `a,b`")
    return ", ".join([*(f"`{choice}`" for choice in choices), *found])


def _meaning(field: FieldInfo) -> str:
    return cell(field.description or "")


_BEYOND = {
    "max_sampling_requests": "a sample gets 429 with `Retry-After`; the SDK waits and retries",
    "max_queued_tokens": "the training operation fails, with the reason",
    "max_queued_bytes": "a sample gets 429 with `Retry-After`, and a training operation fails, with the reason",
    "max_live_models": "the new model fails, with the reason. Models of a program that ended without "
    '`service.close("success").result()` count until `TINKERFLOW_SESSION_TIMEOUT` (300 s)',
    "max_stored_bytes": "new checkpoints and images are refused until some are deleted; the save that exceeds it stays",
    "max_feedback_per_day": "`POST /v1/feedback` gets 429 until ratings are 24 hours old",
    "max_history_bytes": "the oldest histories are deleted",
    "max_body_bytes": "413; for `forward_backward` a failed future",
}


def limits() -> str:
    """Every limit of a project, and the limit of a request, each with its default and its effect."""
    kept = "the request that would add more is refused, with the reason"
    names = [f"max_{field.name}" for field in dataclasses.fields(Limits)]
    rows = [
        (
            f"`TINKERFLOW_{name.upper()}`" + (", for each request" if name == "max_body_bytes" else ""),
            _default(Settings.model_fields[name]),
            _BEYOND.get(name, kept),
        )
        for name in (*names, "max_history_bytes", "max_body_bytes")
    ]
    return table(("setting", "default", "effect"), rows)


def chart_schema() -> str:
    """The schema of the Helm chart's values, with the name of every setting."""
    names = textwrap.fill(", ".join(f'"{variable_of(name)}"' for name in Settings.model_fields), 108)
    start, _, rest = CHART_SCHEMA.read_text().partition('"then": {"enum": [\n')
    end = rest[rest.index("        ]}") :]
    return f'{start}"then": {{"enum": [\n{textwrap.indent(names, " " * 10)}\n{end}'


# ---------------------------------------------------------------------- commands
def command_line() -> dict[str, Any]:
    """Every command of ours that is not a group, by its full name, such as `tinkerflow key create`.

    Commands belong to click or to typer's own copy of click, so nothing here depends on their class.
    """
    return _below(typer.main.get_command(every_command()), "tinkerflow")


def _below(command: Any, path: str) -> dict[str, Any]:
    children = getattr(command, "commands", None)
    if children is None:
        return {path: command}
    found: dict[str, Any] = {}
    for name, child in children.items():
        found |= _below(child, f"{path} {name}")
    return found


def parameters(command: Any) -> list[Any]:
    """The arguments and options of a command that its help shows."""
    return [one for one in command.params if one.name != "help" and not getattr(one, "hidden", False)]


def commands() -> str:
    """Every command with its arguments and options."""
    parts = []
    for path, command in command_line().items():
        shown = parameters(command)
        words = [_usage(one) for one in shown if one.param_type_name == "argument"]
        usage = " ".join([path, *words, *(["[OPTIONS]"] if len(words) < len(shown) else [])])
        parts += [f"## `{path}`", cell(command.help or ""), f"    {usage}"]
        if shown:
            parts.append(table(("argument or option", "meaning"), [_parameter(one) for one in shown]))
    return "\n\n".join(parts)


def _usage(argument: Any) -> str:
    """An argument in the line of usage: `NAME`, `NAME...` for several values, in brackets if it may be left out."""
    word = argument.name.upper() + ("..." if argument.nargs == -1 else "")
    return word if argument.required else f"[{word}]"


def _parameter(parameter: Any) -> tuple[str, str]:
    text = str(getattr(parameter, "help", None) or "")
    is_option = parameter.param_type_name == "option"
    name = "`, `".join([*parameter.opts, *parameter.secondary_opts]) if is_option else parameter.name.upper()
    default = parameter.default
    if isinstance(default, int | float | str) and not isinstance(default, bool) and default != "":
        text += f" [default: {default}]"
    if is_option and parameter.required:
        text += " [required]"
    return f"`{name}`", cell(text)


# ---------------------------------------------------------------------- metrics
def metrics() -> str:
    """Every metric family with its type, labels and meaning."""
    rows = [(f"`{one.name}`", one.kind, ", ".join(f"`{x}`" for x in one.labels), cell(one.text)) for one in families()]
    return table(("metric", "type", "labels", "meaning"), rows)


# ---------------------------------------------------------------------- compatibility
def compatible() -> str:
    """Every method, command and chunk of the SDK, with the tests that show that it works."""
    compatibility.read_tests()
    return compatibility.table()


# ---------------------------------------------------------------------- pipelines
def pipeline_table() -> str:
    """Every pipeline with its summary and its deployment in prefect.yaml."""
    rows = [
        (f"`{name}`", one.summary, f"`{one.deployment}`" + (f", at `{one.cron}` (cron, UTC)" if one.cron else ""))
        for name, one in pipelines().items()
    ]
    return table(("pipeline", "what it does", "deployment"), rows)


def pipeline_parameters() -> str:
    """The parameters that all training pipelines share, then each pipeline's own parameters."""
    shared = _flat(PipelineParameters)
    parts = ["### All training pipelines", _parameter_table(shared)]
    for name, one in pipelines().items():
        found = _flat(one.parameters)
        own = {key: field for key, field in found.items() if not _same(field, shared.get(key))}
        parts += [f"### `{name}`", _parameter_table(own)] if own else []
        if not issubclass(one.parameters, PipelineParameters):
            again = ", ".join(f"`{key}`" for key in found if key not in own)
            parts.append(f"These parameters are the same as in all training pipelines: {again}.")
    return "\n\n".join(parts)


def _flat(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """The fields of a model and of the models inside it, by dotted name; a repeated model is described once."""
    found: dict[str, FieldInfo] = {}
    told: dict[type[BaseModel], str] = {}

    def add(inside: type[BaseModel], prefix: str) -> None:
        for name, field in inside.model_fields.items():
            kind = next((kind for kind in (field.annotation, *get_args(field.annotation)) if _is_model(kind)), None)
            if kind is None:
                found[prefix + name] = field
            elif (base := next((one for one in told if issubclass(kind, one)), None)) is not None:
                again = copy(field)
                differs = "" if kind is base else f" {(kind.__doc__ or '').splitlines()[0]}"
                again.description = f"{field.description or ''} Fields as in `{told[base]}`.{differs}"
                found[prefix + name] = again
            else:
                told[kind] = prefix + name
                add(kind, f"{prefix}{name}.")

    add(model, "")
    return found


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _same(field: FieldInfo, other: FieldInfo | None) -> bool:
    return other is not None and (field.default, field.description) == (other.default, other.description)


def _parameter_table(found: Mapping[str, FieldInfo]) -> str:
    rows = [(f"`{name}`", _pipeline_default(field), _allowed(field), _meaning(field)) for name, field in found.items()]
    return table(("parameter", "default", "allowed", "meaning"), rows)


def _pipeline_default(field: FieldInfo) -> str:
    return "required" if field.is_required() else _default(field)


# ---------------------------------------------------------------------- base models
def model_families() -> str:
    """Every supported model family, with the `model_type` of its config.json."""
    rows = [(family.title, f"`{kind}`") for kind, family in registered().items()]
    return table(("family", "`model_type` in `config.json`"), rows)


# ---------------------------------------------------------------------- chats
def parsers() -> str:
    """Every parser of answers, with the first line of its docstring: the families, and how they write calls."""
    rows = []
    for name in PARSERS:
        text = str(sys.modules[f"{chat_parsers.__name__}.{name}"].__doc__)
        named, _, calls = text.partition("\n")[0].partition(": ")
        rows.append((f"`{name}`", named, calls.replace("|", "\\|")))
    return table(("parser", "families", "how they write calls"), rows)


# ---------------------------------------------------------------------- losses and optimizers
def losses() -> str:
    """Every loss with its inputs and its configuration."""
    rows = []
    for name, spec in LOSSES.items():
        needed = ", ".join(f"`{one.name}`" for one in spec.inputs if one.required)
        optional = ", ".join(f"`{one.name}`" for one in spec.inputs if not one.required)
        config = ", ".join(f"`{key}` = {value.default:g}" for key, value in spec.config.items())
        rows.append((f"`{name}`", needed, optional, config))
    return table(
        ("loss", "inputs besides `target_tokens`", "optional inputs", "`loss_fn_config` and its defaults"), rows
    )


def optimizers() -> str:
    """Every optimizer with its parameters, defaults and bounds."""
    rows = []
    for name, spec in OPTIMIZERS.items():
        for field in fields(spec.params):
            default = "required" if field.required else f"`{field.default}`"
            rows.append((f"`{name}`", f"`{field.name}`", default, spec.bounds[field.name].rule))
    return table(("optimizer", "parameter", "default", "must be"), rows)


# ---------------------------------------------------------------------- the map of the pages
def first_loop() -> str:
    """The program of the first tutorial, which CI executes."""
    page = (DOCS / "tutorials" / "first-fine-tune.md").read_text()
    found = re.search(r"^```python\n# first\.py\n.*?^```", page, re.M | re.S)
    assert found
    return found[0]


def listed(above: str = "") -> str:
    """All pages by section, in Markdown. above: the path from the file to `docs/`."""
    sections = page_map()
    return "\n\n".join(
        f"## {kind}\n\n" + "\n".join(f"- [{one.title}]({above}{one.file}): {one.text}" for one in sections[kind])
        for kind in sections
    )


def llms() -> str:
    """The text of `docs/llms.txt`, in the form of llmstxt.org."""
    return f"# Tinkerflow\n\n> {summary()}\n\n{listed()}\n"


BLOCKS: Mapping[str, Callable[[], str]] = {
    "what-ran-where": lambda: table(verified.HEAD, verified.ROWS),
    "first-loop": first_loop,
    "page-map": lambda: listed("../../").replace("## ", "### "),
    "python-api": python_api.reference,
    "settings": settings,
    "limits": limits,
    "commands": commands,
    "metrics": metrics,
    "families": model_families,
    "parsers": parsers,
    "losses": losses,
    "optimizers": optimizers,
    "pipelines": pipeline_table,
    "pipeline-parameters": pipeline_parameters,
    "compatibility": compatible,
    "accelerator-devices": lambda: table(*accelerators.devices()),
    "accelerator-budgets": lambda: table(*accelerators.budgets()),
    "accelerator-programs": lambda: table(*accelerators.programs()),
    "accelerator-kernels": lambda: table(*accelerators.kernels()),
    "accelerator-efficiencies": lambda: table(*accelerators.efficiencies()),
    "accelerator-parts": lambda: table(*accelerators.parts()),
    "sizing-long-sequence": accelerators.long_sequence,
    "sizing-needs": sizing.needs,
    "sizing-fits": lambda: sizing.fits("full"),
    "sizing-fits-int8": lambda: sizing.fits("int8"),
    "sizing-fits-nf4": lambda: sizing.fits("nf4"),
}


def main() -> None:
    pages = ((file, rewritten(file.read_text())) for file in written())
    for file, new in [*pages, (LLMS, llms()), (CHART_SCHEMA, chart_schema())]:
        if not file.exists() or file.read_text() != new:
            file.write_text(new)
            print(f"written: {file.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
