"""The extras `pipelines` and `server` of the package, without which a command or a function cannot run."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires, version

from tinkerflow.backend.core.errors import UserError


def require_extra(extra: str, user: str) -> None:
    """Check that the packages of an extra are installed.

    extra: its name in pyproject.toml. user: the command or function that needs it, for people. UserError: a package is
    absent; the message has the command that installs the extra.
    """
    for requirement in _requirements():
        if f"extra == '{extra}'" not in requirement.replace('"', "'"):
            continue
        name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
        try:
            version(name)
        except PackageNotFoundError:
            absent = f"{user} needs packages that are not installed, such as {name}"
            raise UserError(f"{absent}: pip install 'tinkerflow[{extra}]'") from None


def _requirements() -> list[str]:
    """The requirements of this package; none if it is only on the Python path."""
    try:
        return requires("tinkerflow") or []
    except PackageNotFoundError:
        return []
