"""The table is whole and true: what the SDK offers is exercised or refused, and the README says so."""

from __future__ import annotations

import tinker
from tests.compat.refused import REFUSED
from tests.compat.registry import chunks, commands, declared, methods, watched
from tests.compat.table import README, read_tests, rewritten


def test_everything_offered_is_exercised_or_refused() -> None:
    read_tests()
    offered = {*methods(), *commands(), *chunks()}
    assert len(offered) > 120
    assert offered - declared() - REFUSED.keys() == set(), "neither exercised nor refused"
    assert (declared() | REFUSED.keys()) - offered == set(), "not in the SDK"
    assert declared() & REFUSED.keys() == set(), "a test shows that it works: no more refused"


def test_the_readme_has_the_table() -> None:
    read_tests()
    text = README.read_text()
    assert text == rewritten(text), "run `python -m tests.compat.table`"


def test_watching_sees_who_calls(rest: tinker.RestClient) -> None:
    name = "RestClient.get_server_capabilities"
    with watched((name,)) as called:
        assert called == set()
        rest.get_server_capabilities().result()
        assert called == {name}
