"""The page of a run: its device, wrong results first, and a table for each stage."""

from __future__ import annotations

from html import escape
from typing import Any

_STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; width: 100% } td, th { text-align: left; padding: .2rem .6rem; vertical-align: top }
tr { border-bottom: 1px solid #8884 } .no { color: #b00020; font-weight: 600 } .bar { background: #8883; width: 8rem }
.bar div { background: #2a7ae2; height: .8rem } td.figures { font: 12px ui-monospace, monospace }
"""
_MARKS = {True: "right", False: '<span class="no">wrong</span>', None: ""}


def page(about: dict[str, str], results: list[dict[str, Any]]) -> str:
    """The page as HTML, without scripts or other files. about: facts about the run. results: as in results.jsonl."""
    wrong = [result for result in results if result["ok"] is False]
    stages = dict.fromkeys(result["stage"] for result in results)
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>Tinkerflow on a device</title>",
        f"<style>{_STYLE}</style><h1>Tinkerflow on {escape(about['device'])}</h1>",
        "<p>" + "<br>".join(f"{escape(name)}: {escape(value)}" for name, value in about.items()) + "</p>",
        f"<p>{len(results)} results, <b>{len(wrong)} wrong</b></p>",
        _table(wrong) if wrong else "",
        *(f"<h2>{escape(stage)}</h2>" + _table([r for r in results if r["stage"] == stage]) for stage in stages),
    ]
    return "\n".join(parts) + "\n</html>\n"


def _table(results: list[dict[str, Any]]) -> str:
    rows = "\n".join(_row(**result) for result in results)
    return f"<table><tr><th>result<th><th>share of the peak<th>figures</tr>\n{rows}\n</table>"


def _row(stage: str, name: str, ok: bool | None, share: float | None = None, **figures: Any) -> str:
    shown = ", ".join(f"{key} {value}" for key, value in figures.items())
    bar = ""
    if share is not None:
        bar = f'<div class="bar"><div style="width:{min(100.0, 100 * share):.0f}%"></div></div>{100 * share:.0f} %'
    return f'<tr><td>{escape(name)}<td>{_MARKS[ok]}<td>{bar}<td class="figures">{escape(shown)}</tr>'
