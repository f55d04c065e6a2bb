"""The help of a command, and the answer to a wrong command line: a line with the command, the option and a fix.

The errors are those of click, or of the copy of click in typer, so they are distinguished by their attributes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from tinkerflow.backend.core.suggest import did_you_mean


def help_of(command: Any, words: Sequence[str]) -> str | None:
    """The help that `words` request, such as `["key", "list", "--help"]`; None if they request something else.

    Parsing the words would import pydantic, which takes 0.3 s of CPU time.
    """
    *path, last = words
    ctx = command.context_class(command, info_name="tinkerflow")
    for word in path:
        if (command := getattr(command, "commands", {}).get(word)) is None:
            return None
        ctx = command.context_class(command, info_name=word, parent=ctx)
    return str(ctx.get_help()) if last == "--help" else None


def is_usage_error(error: Exception) -> bool:
    """Whether the command line was wrong."""
    return hasattr(error, "format_message") and hasattr(error, "exit_code")


def usage_line(error: Any, words: Sequence[str]) -> str:
    """The line for a usage error, or the whole help for a group of commands that was called without a command.

    words: the command line, which contains the wrong value.
    """
    ctx, param = getattr(error, "ctx", None), getattr(error, "param", None)
    command = "tinkerflow" if ctx is None else ctx.command_path
    if type(error).__name__ == "NoArgsIsHelpError":
        return str(error.format_message())
    if (name := getattr(error, "option_name", "")) and ctx is not None:
        known = [option for one in ctx.command.params for option in one.opts if not getattr(one, "hidden", False)]
        return _with_fix(f"{command}: no option {name}{did_you_mean(name, known)}", command)
    if param is not None and error.message:
        place = param.opts[-1] if param.param_type_name == "option" else param.name.upper()
        given = value_of(param, words)
        rule = " ".join(error.message.removeprefix("Value error, ").rstrip(".").split())
        if rule.endswith("is not readable"):
            rule += ": run as its owner"
        return f"{command}: {place}{'' if given is None else f' {given!r}'}: {rule}"
    text = error.format_message().rstrip(".")
    return _with_fix(f"{command}: {text[:1].lower()}{' '.join(text[1:].split())}", command)


def _with_fix(line: str, command: str) -> str:
    return f"{line}; `{command} --help` explains it"


def value_of(param: Any, words: Sequence[str]) -> str | None:
    """The value of an option on the command line; None for an argument."""
    for word, after in pairwise([*words, ""]):
        name, given, value = word.partition("=")
        if param.param_type_name == "option" and name in param.opts:
            return value if given else after
    return None
