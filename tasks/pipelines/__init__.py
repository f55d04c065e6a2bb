"""The steps of fine-tuning pipelines: clients of our API through the `tinker` SDK, apart from the engine's operations.

Steps of a flow are Prefect tasks; tests and notebooks call their `.fn`. Steps exchange only names of objects in the
work folder or on the server, never data. The names below do not import Prefect.
"""

from tinkerflow.tasks.pipelines.data import (
    DataCheckError,
    DataReport,
    Use,
    check_source,
    inspect,
    load_examples,
    load_rows,
    read_source,
)
from tinkerflow.tasks.pipelines.render import Renderer, TokenizedExample
from tinkerflow.tasks.pipelines.row_errors import RowError
from tinkerflow.tasks.pipelines.rows import Form, Message, Row, RowReader, Schema, guess_form
from tinkerflow.tasks.pipelines.sources import DataSource

__all__ = [
    "DataCheckError",
    "DataReport",
    "DataSource",
    "Form",
    "Message",
    "Renderer",
    "Row",
    "RowError",
    "RowReader",
    "Schema",
    "TokenizedExample",
    "Use",
    "check_source",
    "guess_form",
    "inspect",
    "load_examples",
    "load_rows",
    "read_source",
]
