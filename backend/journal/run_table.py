"""The table of training runs that people search, sort, group and archive. The API's list is in training_runs.py."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement
from sqlmodel import col

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.core.ids import EMBEDDED, EMBEDDED_FOLDER
from tinkerflow.backend.core.suggest import did_you_mean
from tinkerflow.backend.journal.checkpoints import Page
from tinkerflow.backend.journal.database import Aggregate, as_view, fetch_page, in_id_order, owned_by
from tinkerflow.backend.journal.run_metrics import REWARD, RunMetric, RunMetricValue
from tinkerflow.backend.journal.tables import Model, TrainingStep
from tinkerflow.backend.journal.training_runs import RUN_NAME, WITH_SESSION, ModelView, nothing_made

MOST_COLUMNS = 8  # additional columns of one table
_RUN_ID = col(Model.id)
_METADATA = col(Model.user_metadata)


def _at_newest_step(figure: sa.ColumnElement[float | None]) -> sa.ScalarSelect[Any]:
    """The figure at the newest step of a run. One seek in the primary key per run, even if the run is long."""
    of_run = (col(TrainingStep.model_id) == _RUN_ID, col(TrainingStep.seq_id) >= 0)
    newest = sa.select(figure).where(*of_run).order_by(col(TrainingStep.seq_id).desc()).limit(1)
    return newest.correlate(Model).scalar_subquery()


def _last_value(metric: str) -> sa.ScalarSelect[Any]:
    """The value of a stored metric at its newest step, as in `_at_newest_step`."""
    of_run = (col(RunMetricValue.model_id) == _RUN_ID, col(RunMetricValue.name) == metric)
    newest = sa.select(col(RunMetricValue.value)).where(*of_run).order_by(col(RunMetricValue.step).desc()).limit(1)
    return newest.correlate(Model).scalar_subquery()


class _MetadataText(FunctionElement[str]):
    """The text under a key of the metadata; NULL if there is none. clauses: the column and the key."""

    type = sa.String()
    inherit_cache = True


@compiles(_MetadataText)
def _metadata_text(element: _MetadataText, compiler: SQLCompiler, **options: Any) -> str:
    column, key = (compiler.process(clause, **options) for clause in element.clauses)
    return f"({column} ->> {key})"


@compiles(_MetadataText, "sqlite")
def _metadata_text_on_sqlite(element: _MetadataText, compiler: SQLCompiler, **options: Any) -> str:
    # A path of SQLite's JSON functions cannot contain a key with a quote, nor, before 3.45, a key that JSON escapes.
    column, key = (compiler.process(clause, **options) for clause in element.clauses)
    return f"(SELECT value FROM json_each({column}) WHERE key = {key})"


def _in_metadata(key: str) -> sa.SQLColumnExpression[str]:
    """The text under a key of the run's metadata."""
    return _MetadataText(_METADATA, sa.literal(key, sa.String))


_REWARD = _last_value(REWARD)
_LOSS = _at_newest_step(col(TrainingStep.loss) / sa.func.nullif(col(TrainingStep.weight), 0.0))
SORTS: dict[str, tuple[sa.SQLColumnExpression[Any], ...]] = {
    "created": (col(Model.created_at),),
    "used": (col(Model.last_request_at),),
    "name": (sa.func.lower(RUN_NAME),),
    "model": (col(Model.base_model),),
    "state": (col(Model.state),),
    "steps": (col(Model.step),),
    "loss": (_REWARD, _LOSS),
}
_FIELDS = {"model": col(Model.base_model), "state": col(Model.state), "project": col(Model.owner), "name": RUN_NAME}


@dataclass(frozen=True)
class RunQuery:
    """The runs that a table shows, and their order.

    search: words that must all occur, in any case, in a run's id, name, base model or metadata. `KEY=VALUE` finds runs
    with that value under a key of their metadata, or with that model (the last part of its name is enough), state,
    project or name. Quotes group words. If there are no words and no session, runs that ended without a step, a
    checkpoint or an outcome are left out: refused runs, and runs that only exported weights. archived: list only the
    archived runs instead of the others. session_id: only runs of this session. columns: names of stored metrics or keys
    of metadata, which are shown with their last values. sort: a key of SORTS, or a column. descending: largest first.
    group: a field as in `search`; runs with equal values are listed together.
    """

    search: str = ""
    archived: bool = False
    session_id: str | None = None
    columns: tuple[str, ...] = ()
    sort: str = "created"
    descending: bool = True
    group: str = ""

    def __post_init__(self) -> None:
        """UserError: the sort is unknown, or there are too many columns."""
        if len(self.columns) > MOST_COLUMNS:
            raise UserError(f"column is given {len(self.columns)} times: must be at most {MOST_COLUMNS}")
        if self.sort not in (known := [*SORTS, *self.columns]):
            hint = did_you_mean(self.sort, known)
            raise UserError(f"sort {self.sort!r}: must be a column, which are {', '.join(known)}{hint}")


@dataclass(frozen=True)
class RunRow:
    """One row. name: "" if the client gave none. loss: per unit of weight, at the newest step.

    reward: the last value of the metric `reward`; None if the run has none. values: the values of the additional
    columns; None if the run has none. group: the value of the grouping field.
    """

    model: ModelView
    name: str
    loss: float | None
    reward: float | None
    values: tuple[float | str | None, ...]
    group: str


class RunTable(Aggregate):
    def page(self, owner: str | None, query: RunQuery, *, limit: int, offset: int) -> Page[RunRow]:
        """Rows of the table, and the total number. Two statements.

        owner: the runs' owner; None: any. limit: the most rows; fewer if metadata is long. offset: rows to skip.
        """
        wanted = [*owned_by(Model, owner), col(Model.archived).is_(query.archived), *_found_by(query.search)]
        if query.session_id is not None:
            wanted.append(col(Model.session_id) == query.session_id)
        elif not query.search:
            wanted.append(sa.not_(nothing_made(self._now())))
        further = [
            column.label(f"{kind}_{i}")
            for i, name in enumerate(query.columns)
            for kind, column in (("metric", _last_value(name)), ("metadata", _in_metadata(name)))
        ]
        group = _field(query.group) if query.group else sa.literal("")
        figures = (_LOSS.label("run_loss"), _REWARD.label("run_reward"))
        columns = (RUN_NAME.label("run_name"), *figures, group.label("run_group"), *further)
        sorts = SORTS.get(query.sort) or (_last_value(query.sort), _in_metadata(query.sort))
        order = [
            *((group.is_(None), group) if query.group else ()),
            *(by for sort in sorts for by in (sort.is_(None), sort.desc() if query.descending else sort.asc())),
            _RUN_ID,
        ]
        rows = sa.select(Model, *columns).select_from(WITH_SESSION).where(*wanted).order_by(*order)
        count = sa.select(sa.func.count()).select_from(WITH_SESSION).where(*wanted)
        with self._read() as connection:
            total = connection.execute(count).scalar_one()
            found, cut = fetch_page(connection, rows.limit(limit).offset(offset))
        return Page(tuple(_row(row, len(query.columns)) for row in found), total, cut)

    def names_of_columns(self, run_ids: Collection[str]) -> list[str]:
        """The names of the metrics that these runs stored, offered as columns in addition to keys of metadata."""
        names = sa.select(col(RunMetric.name)).where(col(RunMetric.model_id).in_(run_ids)).distinct()
        return sorted(self._column(names))

    def archive(self, run_ids: Collection[str], owner: str, *, archived: bool = True) -> int:
        """Archive or unarchive the project's runs. Returns how many of `run_ids` belong to the project."""
        with self._write() as connection:
            mine = in_id_order(Model, _RUN_ID.in_(run_ids), col(Model.owner) == owner)
            return connection.execute(sa.update(Model).where(mine).values(archived=archived)).rowcount


def _field(name: str) -> sa.SQLColumnExpression[str]:
    return _FIELDS[name] if name in _FIELDS else _in_metadata(name)


def _found_by(search: str) -> list[sa.ColumnElement[bool]]:
    try:
        words = shlex.split(search)
    except ValueError:  # an unclosed quote
        words = search.split()
    return [_has(word) for word in words]


def _has(word: str) -> sa.ColumnElement[bool]:
    texts, metadata = (_RUN_ID, RUN_NAME, col(Model.base_model)), sa.cast(_METADATA, sa.Text)
    anywhere = [text.icontains(one, autoescape=True) for one in _cases(word) for text in texts]
    # as stored in the column
    anywhere += [metadata.icontains(json.dumps(one)[1:-1], autoescape=True) for one in _cases(word)]
    key, equals, value = word.partition("=")
    if equals and key:
        anywhere += [sa.func.lower(_field(key)) == sa.func.lower(one) for one in _cases(value)]
        if key == "model":  # the last part of the name, as the table shows it
            anywhere.append(col(Model.base_model).iendswith(f"/{value}", autoescape=True))
            if f"/{EMBEDDED}".endswith(f"/{value.lower()}"):
                anywhere.append(col(Model.base_model).endswith("/".join(EMBEDDED_FOLDER)))
    return sa.or_(*anywhere)


def _cases(word: str) -> Collection[str]:
    """The word in the usual cases, because SQLite ignores the case of ASCII letters only, and JSON has escapes."""
    cases = (word, word.lower(), word.upper(), word.capitalize())
    return (word,) if word.isascii() else dict.fromkeys(cases)


def _row(row: sa.Row[tuple[object, ...]], columns: int) -> RunRow:
    values = row._mapping
    further = (
        values[f"metadata_{i}"] if values[f"metric_{i}"] is None else values[f"metric_{i}"] for i in range(columns)
    )
    figures = (row.run_loss, row.run_reward)
    return RunRow(as_view(ModelView, row), row.run_name, *figures, tuple(further), row.run_group or "")
