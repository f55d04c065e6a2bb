"""The table of docs/compatibility.md is complete: everything that the SDK offers is exercised by a test or refused."""

from __future__ import annotations

import tinker
from tests.compat.refused import ELSEWHERE, REFUSED
from tests.compat.registry import chunks, commands, declared, methods, watched
from tests.compat.table import read_tests, table
from tests.docs.pages import DOCS


def test_every_sdk_name_is_exercised_or_refused() -> None:
    read_tests()
    offered = {*methods(), *commands(), *chunks()}
    assert len(offered) > 120
    assert offered - declared() - REFUSED.keys() == set(), "neither exercised nor refused"
    assert (declared() | REFUSED.keys()) - offered == set(), "not in the SDK"
    assert declared() & REFUSED.keys() == set(), "a test shows that it works: no more refused"
    assert declared() >= ELSEWHERE.keys(), "a test calls it all the same"


def test_the_page_has_the_table() -> None:
    read_tests()
    assert table() in (DOCS / "compatibility.md").read_text(), "run `python -m tests.docs.generate`"


def test_watching_records_called_methods(rest: tinker.RestClient) -> None:
    name = "RestClient.get_server_capabilities"
    with watched((name,)) as called:
        assert called == set()
        rest.get_server_capabilities().result()
        assert called == {name}
