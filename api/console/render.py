"""Renders templates to HTML, and formats times, sizes and numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import datetime, timedelta
from functools import cache
from importlib import resources
from pathlib import Path
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from tinkerflow import __version__
from tinkerflow.backend.catalog.model_card import public_name
from tinkerflow.backend.core.clock import SystemClock

_UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"))
NONE = "\N{EN DASH}"  # shown where a value is missing
WEBSITE = Path(__file__).parent / "website"
STATIC = {"console.css": "text/css", "console.js": "text/javascript"}


def render(template: str, values: Mapping[str, object]) -> str:
    """Render a template of `templates/` to HTML. Values are escaped unless they are Markup."""
    return _environment().get_template(template).render(values)


@cache
def static_file(name: str) -> tuple[bytes, str]:
    """The content of a file in `static/`, and a hash of it."""
    content = resources.files("tinkerflow.api.console").joinpath("static", name).read_bytes()
    return content, hashlib.sha256(content).hexdigest()[:12]


@cache
def _environment() -> Environment:
    loader = PackageLoader("tinkerflow.api.console")
    found = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    found.filters |= {"when": when, "size": size, "number": number, "seconds": seconds, "model_name": public_name}
    found.globals |= {
        "version": __version__,
        "path_parts": path_parts,
        "website": website,
        "marks": {name: static_file(name)[1] for name in STATIC},
    }
    return found


def when(moment: datetime | None) -> Markup | str:
    """A moment relative to now, with the exact time as a tooltip and as a machine-readable attribute."""
    if moment is None:
        return NONE
    away = SystemClock().now() - moment
    text = f"in {seconds(-away)}" if away < timedelta() else f"{seconds(away)} ago"
    exact = moment.strftime("%Y-%m-%d %H:%M:%S UTC")
    return Markup('<time datetime="{}" title="{}">{}</time>').format(moment.isoformat(), exact, text)


def seconds(span: timedelta | float) -> str:
    """A length of time in its largest unit, rounded."""
    total = span.total_seconds() if isinstance(span, timedelta) else span
    for unit, name in _UNITS:
        if total >= unit:
            return f"{total / unit:.0f} {name}"
    return f"{total:.0f} s" if total >= 1 or total <= 0 else f"{total * 1000:.0f} ms"


def size(count: float) -> str:
    """A number of bytes."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def website() -> Path | None:
    """The folder with the website of the documentation, or None if this installation has none."""
    return WEBSITE if WEBSITE.is_dir() else None


def number(value: float | None) -> str:
    """A number for people: integers with thousands separators, others with at least three significant digits."""
    if value is None:
        return NONE
    if isinstance(value, int) or (float(value).is_integer() and 1 <= abs(value) < 1e15):
        return f"{int(value):,}"
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.3g}"
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def path_parts(path: str) -> str:
    """A `tinker://` path in the form of the console's URLs: the run, and the rest as a single part."""
    run, _, rest = path.removeprefix("tinker://").partition("/")
    return f"{quote(run, safe='')}/{quote(rest, safe='')}"
