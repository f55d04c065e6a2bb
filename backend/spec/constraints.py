"""Constraints on generated text: a JSON schema, a regular expression or a Lark grammar, checked before it is used.

llguidance (https://github.com/guidance-ai/llguidance) computes the allowed tokens from a grammar and a tokenizer, in a
fraction of a millisecond and without a start-up phase for each schema. It is written in Rust and does not need torch.
Its results do not depend on time or threads. xgrammar needs torch at run time. outlines-core compiles a schema to an
automaton, which takes seconds for a large schema, and does not support grammars. Work for a token is limited by counts,
not by seconds, so every process of a group refuses the same requests.

The API, the engine and the sampler use this module. It loads the library at the first constraint.
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.spec.json_schemas import ExactSchema, exact_schema

if TYPE_CHECKING:
    from llguidance import LLParserLimits, LLTokenizer
    from llguidance._lib import JsonCompileOptions

T = TypeVar("T")
Kind = Literal["json_schema", "regex", "grammar"]

MAX_CHARACTERS = 65_536  # of a constraint's text
KEPT_CONSTRAINTS = 32  # the most recent ones that a sampler keeps compiled, because compiling takes up to a second
_STACK = 256 * 2**20  # bytes, mostly unused: 8,000 nested rules take 28 MB, which overflows the usual 8 MB
_STACK_SIZE_LOCK = threading.Lock()
_LONGEST = 300  # characters of an error's text
# At most one space follows a comma or a colon. With more white space allowed, a weak model would fill its answer with
# it. Without \u escapes, a name or a text has only one spelling.
_JSON_OPTIONS: JsonCompileOptions = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "json_allowed_escapes": 'nrbtf\\"',
}

# A constraint within both limits is checked in this process. Other constraints are checked in a separate process.
_SMALL = 4_096  # characters
_FEW_EXPRESSIONS = 8  # several patterns for one string take time and memory exponential in their number
_SECONDS, _BYTES = 1, 2**30  # limits of this process: CPU time and memory

# A token's mask usually takes 0.3 ms of CPU time, at worst about 50 ms, and a grammar's automaton at most 40 MB.
_STEP_FUEL, _STEP_ITEMS, _ROW_ITEMS = 100_000, 30_000, 1_000
_STATES, _SYMBOLS = 20_000, 200_000


def limits() -> LLParserLimits:
    """The limits on the work for a grammar, as counts."""
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
    """The constraint in llguidance's format. ValueError: the library cannot enforce it."""
    from llguidance import LLMatcher

    if kind == "json_schema":
        schema = json.dumps(exact_schema(json.loads(text)).schema, ensure_ascii=False)
        return LLMatcher.grammar_from_json_schema(schema, overrides=_JSON_OPTIONS)
    return LLMatcher.grammar_from_regex(text) if kind == "regex" else LLMatcher.grammar_from_lark(text)


def check_constraint(name: str, kind: Kind, text: str) -> None:
    """Raise UserError unless the text is a constraint of this kind within the limits. name: the field, for errors."""
    if len(text) > MAX_CHARACTERS:
        raise UserError(f"{name} has {len(text)} characters: must have at most {MAX_CHARACTERS}")
    try:
        if kind == "json_schema":
            small = len(text) <= _SMALL and _is_small(exact_schema(json.loads(text)))
        else:
            small = len(text) <= _SMALL and not (kind == "grammar" and "%json" in text)
        problem = on_large_stack(lambda: _problem_of(kind, text)) if small else _problem_in_process(kind, text)
    except ValueError as error:
        problem = str(error)
    if problem:
        raise UserError(f"{name} is not a {kind} that can be enforced: {first_lines(problem)}")


def _is_small(exact: ExactSchema) -> bool:
    return exact.inlined <= _SMALL and exact.expressions <= _FEW_EXPRESSIONS


def _problem_of(kind: Kind, text: str) -> str:
    """The reason why a constraint cannot be compiled or allows no text; empty if it can be enforced."""
    from llguidance import LLMatcher

    matcher = LLMatcher(_byte_tokenizer(), grammar_of(kind, text), limits=limits(), log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return describe_error(matcher.get_error()) if matcher.is_error() else ""


def _problem_in_process(kind: Kind, text: str) -> str:
    """Like `_problem_of`, in a process that ends if it exceeds its time or memory."""
    command = (sys.executable, "-X", "utf8", "-m", __name__, kind)
    done = subprocess.run(command, input=text, capture_output=True, text=True, encoding="utf-8", check=False)
    if done.returncode:
        limit = f"more than {_SECONDS} second or {_BYTES >> 30} GB"
        return f"it takes {limit} to compile; several patterns for one string take the longest"
    return done.stdout


def describe_error(text: str) -> str:
    """An error of the library as one readable line."""
    return "no text satisfies it" if "NoExtension" in text else first_lines(text.removesuffix("<non-verbose/>"))


def first_lines(text: str) -> str:
    """A text on one line, cut to a readable length."""
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else line[:_LONGEST] + "…"


def on_large_stack(function: Callable[[], T]) -> T:
    """Call `function` in a thread whose stack is large enough for the library's deep recursion. Returns its result.

    A stack overflow would end the process. An error of the function is raised here.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:  # noqa: BLE001  it is raised in the caller's thread
            errors.append(error)

    with _STACK_SIZE_LOCK:  # the size applies to every thread that starts meanwhile
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


@cache
def _byte_tokenizer() -> LLTokenizer:
    """A tokenizer with a token for each byte, because the texts that a grammar allows do not depend on the tokens."""
    from llguidance import LLTokenizer

    return LLTokenizer("byte")


def _main(kind: Any) -> None:
    """Print the problem of the constraint on standard input, within the limits of a process."""
    text = sys.stdin.read()
    _byte_tokenizer()
    resource.setrlimit(resource.RLIMIT_AS, (_BYTES, _BYTES))
    signal.setitimer(signal.ITIMER_PROF, _SECONDS)  # its signal ends the process
    try:
        print(end=on_large_stack(lambda: _problem_of(kind, text)))
    except ValueError as error:
        print(end=str(error))


if __name__ == "__main__":
    _main(sys.argv[1])
