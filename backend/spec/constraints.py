"""Constraints of what is generated: a JSON schema, a regular expression or a Lark grammar, checked before it runs.

llguidance does the work (https://github.com/guidance-ai/llguidance). It computes the allowed tokens from a grammar and
a tokenizer in a fraction of a millisecond and without a start-up per schema, in Rust and alone: no torch, no time, no
threads in what it decides. xgrammar needs torch at run time; outlines-core compiles a schema to an automaton, which
takes seconds for a large one, and knows no grammars. Everything that it may spend is limited by counts, not by
seconds, so every process of a group refuses alike.

The API, the engine and the sampler use this module. It loads the library when a constraint comes.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from tinkerflow.backend.core.errors import UserError

if TYPE_CHECKING:
    from llguidance import LLParserLimits

T = TypeVar("T")
Kind = Literal["json_schema", "regex", "grammar"]

MAX_CHARACTERS = 65_536  # of a constraint's text
_STACK = 256 * 2**20  # bytes, reserved and not used: 8,000 rules that name each other take 28 MB, and the usual 8 crash
_ROOM = threading.Lock()
_LONGEST = 300  # characters of an error's text
# Of a JSON schema: a string that must match several takes time and memory exponential in their number.
_FEW_PATTERNS = 8
_SECONDS = 2  # of a processor, for a schema with more of them, or a grammar with a schema in it

# A token's mask takes 0.3 ms of one processor usually and some 50 ms at worst, and a grammar's automaton at most 40 MB.
_STEP_FUEL, _STEP_ITEMS, _ROW_ITEMS = 100_000, 30_000, 1_000
_STATES, _SYMBOLS = 20_000, 200_000


def limits() -> LLParserLimits:
    """What a grammar may spend, in counts."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=_ROW_ITEMS,
        step_lexer_fuel=_STEP_FUEL,
        step_max_items=_STEP_ITEMS,
        max_lexer_states=_STATES,
        max_grammar_size=_SYMBOLS,
        verbose_errors=False,
    )


def grammar_of(kind: Kind, text: str) -> str:
    """The constraint as llguidance reads grammars. ValueError for a text that is no JSON object."""
    from llguidance import LLMatcher

    if kind == "json_schema":
        # Without a bound a model may write spaces for ever.
        return LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,40}"})
    return LLMatcher.grammar_from_regex(text) if kind == "regex" else LLMatcher.grammar_from_lark(text)


def check_constraint(name: str, kind: Kind, text: str) -> None:
    """UserError, which names the field `name`, unless the text is a constraint of this kind within the limits."""
    if len(text) > MAX_CHARACTERS:
        raise UserError(f"{name} has {len(text)} characters: must have at most {MAX_CHARACTERS}")

    patterns = text.count('"pattern') + text.count('"format"')
    apart = patterns > _FEW_PATTERNS if kind == "json_schema" else kind == "grammar" and "%json" in text
    if wrong := _wrong_apart(kind, text) if apart else on_large_stack(lambda: _wrong_with(kind, text)):
        raise UserError(f"{name} is no {kind} that can be obeyed: {first_lines(wrong)}")


def _wrong_with(kind: Kind, text: str) -> str:
    """What is wrong with a constraint; empty when it can be obeyed."""
    from llguidance import LLMatcher

    try:
        return str(LLMatcher.validate_grammar(grammar_of(kind, text), limits=limits()))
    except ValueError as error:
        return str(error)


def _wrong_apart(kind: Kind, text: str) -> str:
    """The same, in a process of its own, which ends when it has used its time."""
    command = (sys.executable, "-X", "utf8", "-m", __name__, kind)
    done = subprocess.run(command, input=text, capture_output=True, text=True, encoding="utf-8", check=False)
    if done.returncode:
        return f"it takes more than {_SECONDS} seconds to check; patterns that one string must match take the longest"
    return done.stdout


def first_lines(text: str) -> str:
    """An error's text on one line, cut to what a person reads."""
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else line[:_LONGEST] + "…"


def on_large_stack(function: Callable[[], T]) -> T:
    """`function()` in a thread with room for deep recursion: the library overflows a usual stack, and with it ends us.

    What the function raises is raised here.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:  # noqa: BLE001  it is raised in the caller's thread
            errors.append(error)

    with _ROOM:  # the size is that of every thread that is made meanwhile
        before = threading.stack_size(_STACK)
        try:
            thread = threading.Thread(target=run, name="constraint")
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS))
    asked: Any = sys.argv[1]
    print(end=on_large_stack(lambda: _wrong_with(asked, sys.stdin.read())))
