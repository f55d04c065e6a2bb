"""The steps of fine-tuning pipelines: clients of our API through the `tinker` SDK, apart from the engine's operations.

Each step is a Prefect task; tests and notebooks call its `.fn`. Between steps go only names of what is in the work
folder or on the server, never data.
"""

from tinkerflow.tasks.pipelines.data import DataCheckError, DataReport, DataSource, check_data, load_rows
from tinkerflow.tasks.pipelines.render import Rendered, Renderer, TokenizedExample, load_examples, render
from tinkerflow.tasks.pipelines.rows import Message, Row, RowError, Schema, guess_schema, parse_row

__all__ = [
    "DataCheckError",
    "DataReport",
    "DataSource",
    "Message",
    "Rendered",
    "Renderer",
    "Row",
    "RowError",
    "Schema",
    "TokenizedExample",
    "check_data",
    "guess_schema",
    "load_examples",
    "load_rows",
    "parse_row",
    "render",
]
