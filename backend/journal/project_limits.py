"""A project's own limits, which replace the limits in the settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import sqlalchemy as sa
from sqlmodel import Field, col

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.core.suggest import did_you_mean
from tinkerflow.backend.journal import audit
from tinkerflow.backend.journal.database import NAME_BYTES, Aggregate, Json, Table, Text
from tinkerflow.backend.journal.quotas import Limits, lock_project, use_of

SETTINGS = [f"max_{limit.name}" for limit in fields(Limits)]
_MOST = 2**62
LONGEST_NAME = 128  # characters of a name or a project


def checked_name(field: str, value: str) -> str:
    """The value without surrounding spaces. field: "name" or "project". UserError: the value is empty or too long."""
    value = value.strip()
    if not 1 <= len(value) <= LONGEST_NAME:
        raise UserError(f"{field} is {value!r}: must have 1 to {LONGEST_NAME} characters")
    return value


class ProjectLimit(Table, table=True):
    """A project's own limits: values by the field names of `Limits`."""

    __tablename__ = "project_limit"

    project: str = Field(primary_key=True, sa_type=Text(NAME_BYTES))
    limits: dict[str, int] = Field(sa_type=Json())


@dataclass(frozen=True)
class LimitUse:
    """A limit that applies to a project. setting: its name. own: the project's own value replaces the setting's."""

    setting: str
    used: int
    most: int
    own: bool


class ProjectLimits(Aggregate):
    def set(self, project: str, changes: Mapping[str, int | None], actor: str = audit.SERVICE) -> Mapping[str, int]:
        """Change a project's own limits, and return all of them.

        changes: by setting (`max_stored_bytes`). 0: no limit. None: the setting's value applies again. actor: for the
        audit log. UserError: the project's name is empty or too long, a name is not a limit of projects, or a value is
        out of range.
        """
        project = checked_name("project", project)
        for name, value in changes.items():
            if name not in SETTINGS:
                raise UserError(f"limit {name!r}: must be one of {', '.join(SETTINGS)}{did_you_mean(name, SETTINGS)}")
            if value is not None and not 0 <= value <= _MOST:
                raise UserError(f"limit {name}: {value} must be from 0 to {_MOST}")
        short = {name.removeprefix("max_"): value for name, value in changes.items()}
        with self._write() as connection:
            lock_project(connection, project)
            before = connection.execute(_OF_PROJECT, {"project": project}).scalar_one_or_none()
            after = {name: value for name, value in ((before or {}) | short).items() if value is not None}
            connection.execute(sa.delete(ProjectLimit).where(col(ProjectLimit.project) == project))
            if after:
                connection.execute(sa.insert(ProjectLimit).values(project=project, limits=after))
            event = audit.AuditedEvent.PROJECT_LIMITS_SET
            audit.write_event(connection, self._now(), owner=project, event=event, actor=actor, details={**changes})
        return after

    def all(self) -> dict[str, dict[str, int]]:
        """The own limits of all projects that have any, by project."""
        with self._read() as connection:
            rows = connection.execute(sa.select(ProjectLimit).order_by(col(ProjectLimit.project)))
            return {row.project: row.limits for row in rows}

    def of(self, project: str, settings: Limits) -> Limits:
        """The limits that apply to a project. settings: the limits of projects without limits of their own."""
        with self._read() as connection:
            own = connection.execute(_OF_PROJECT, {"project": project}).scalar_one_or_none()
        return replace(settings, **(own or {}))

    def use(self, project: str, settings: Limits) -> list[LimitUse]:
        """The limits that apply to a project, with its current usage. settings: as in `of`."""
        with self._read() as connection:
            own = connection.execute(_OF_PROJECT, {"project": project}).scalar_one_or_none() or {}
            limits = replace(settings, **own)
            used = use_of(connection, project, limits, self._now())
        return [LimitUse(f"max_{name}", n, getattr(limits, name), name in own) for name, n in used.items()]


_OF_PROJECT = sa.select(col(ProjectLimit.limits)).where(col(ProjectLimit.project) == sa.bindparam("project"))
