"""The errors of rejected rows, and their fixes: columns to map and fields to ignore."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import yaml

from tinkerflow.backend.core.errors import UserError

_SHOWN = 80  # characters of a wrong value that an error shows
FEW = 3  # most errors on one line
PLACEHOLDER = "COLUMN"  # the column in an example if no column has a likely name
_LIKELY = {  # names of columns, in lower case, that usually hold a field
    "prompt": ("prompt", "question", "instruction", "input", "query", "q", "frage", "pregunta"),
    "completion": ("completion", "answer", "response", "output", "reply", "a", "antwort", "respuesta"),
    "chosen": ("chosen", "accepted", "better", "preferred"),
    "rejected": ("rejected", "worse", "dispreferred"),
    "text": ("text", "content", "document", "body"),
}


def likely_columns(fields: Sequence[str], columns: Sequence[str]) -> dict[str, str]:
    """Field -> the column that probably contains it, by its name in any case, or PLACEHOLDER."""
    by_name = {column.strip().lower(): column for column in reversed(columns)}
    likely = {name: next((by_name[one] for one in _LIKELY.get(name, ()) if one in by_name), "") for name in fields}
    return {name: column or PLACEHOLDER for name, column in likely.items()}


class RowError(UserError):
    """A row is rejected. The message names the field, the value and the rule.

    problem: equal for rows with the same problem, even if their values differ.
    """

    def __init__(
        self,
        name: str,
        value: object,
        rule: str,
        *,
        row: str = "",
        columns: Mapping[str, str] | None = None,
        ignore: Sequence[str] = (),
    ) -> None:
        """An error of one row.

        name: the field, as in messages[2].content. value: shown unless it is None. rule: follows the value. row: the
        rest of the rule, which concerns only this row. columns, ignore: a fix, as in `DataSource`.
        """
        self.columns, self.ignore = dict(columns or {}), list(ignore)
        self.problem = re.sub(r"\[\d+\]", "", name) + rule
        self._text = f"{name}: {'' if value is None else f'{shorten(show(value))}: '}{rule}{row}"
        super().__init__(self.of("data"))

    def of(self, parameter: str) -> str:
        """The message with the fix for a data set. parameter: data or held_out."""
        if self.columns:
            ignored = f" and {parameter}.ignore: {_flow(self.ignore)}" if self.ignore else ""
            return f"{self._text}; for example {parameter}.columns: {_flow(self.columns)}{ignored}"
        if self.ignore:
            names, them = ", ".join(map(repr, self.ignore)), "it" if len(self.ignore) == 1 else "them"
            return f"{self._text}; add {names} to {parameter}.ignore to leave {them} out"
        return self._text


def left_out(errors: Sequence[str], everywhere: str) -> str:
    """The first few errors on one line. everywhere: the place of all errors; "" = there is none."""
    more = [f"and {len(errors) - FEW} more"] if len(errors) > FEW else []
    return "; ".join([*errors[:FEW], *more, *([f"all: {everywhere}"] if everywhere else [])])


def too_many_wrong(wrong: int, rows: int, most: float, parameter: str) -> str:
    """The beginning of the error for more wrong rows than the data set `parameter` allows."""
    verb = "is" if wrong == 1 else "are"
    return f"{wrong} of {rows} rows {verb} wrong, at most {most:.1%} may be left out ({parameter}.max_bad_fraction)"


def shorten(text: str, most: int = _SHOWN) -> str:
    """The text, cut after `most` characters."""
    return text[:most] + "..." if len(text) > most else text


def show(value: object) -> str:
    """`repr(value)`, or "..." for a value that is nested too deeply for `repr`."""
    try:
        return repr(value)
    except RecursionError:
        return "..."


def _flow(value: object) -> str:
    """A list or a mapping as YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=2**20, sort_keys=False)
    return str(text).strip()
