"""Errors in messages between processes."""

from __future__ import annotations

import pytest

from tinkerflow.backend.core import errors
from tinkerflow.backend.pool.protocol.messages import Failed, same_outcome, to_error, to_failed

USER_ERRORS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.UserError) and kind is not errors.ContextExceededError
]


@pytest.mark.parametrize("kind", [*USER_ERRORS, errors.StateLostError, errors.StoreError, errors.ServerError])
def test_errors_of_the_tree_keep_class_and_message(kind: type[errors.TinkerflowError]) -> None:
    back = to_error(to_failed(kind("data[0]: 3 is too much")))
    assert type(back) is kind
    assert back.message == "data[0]: 3 is too much"


def test_other_exceptions_become_server_errors() -> None:
    assert to_failed(KeyError("a")) == Failed("ServerError", "KeyError: 'a'")
    assert type(to_error(Failed("Exit", "x"))) is errors.ServerError
    # an executor cannot pretend that the group failed
    assert to_failed(errors.GroupFailedError("x")).error == "ServerError"
    # a message has no fields for its numbers
    assert type(to_error(Failed("ContextExceededError", "x"))) is errors.ServerError


def test_a_message_has_a_longest_length() -> None:
    assert len(to_failed(ValueError("x" * 10**6)).message) == 10_000


def test_ranks_agree_or_differ() -> None:
    user, other = Failed("UserError", "a"), Failed("UserError", "b")
    assert same_outcome(None, None)
    assert same_outcome(user, user)
    assert same_outcome(Failed("ServerError", "port 1"), Failed("ServerError", "port 2"))
    assert not same_outcome(user, other)
    assert not same_outcome(user, None)
    assert not same_outcome(None, user)
    assert not same_outcome(user, Failed("ServerError", "a"))
    assert not same_outcome(user, Failed("NotFoundError", "a"))
