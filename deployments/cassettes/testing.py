"""A pytest fixture that tests a training loop without a model.

`pytest_plugins = ["tinkerflow.deployments.cassettes.testing"]` in conftest.py registers it. In a test, `with
cassette("loop.cassette"):` answers the tinker SDK from a recording. The test fails at the first request that differs.
The plugin loads neither JAX nor Prefect nor transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tinkerflow.deployments.cassettes.play import Playing


@pytest.fixture
def cassette(request: pytest.FixtureRequest) -> Callable[..., AbstractContextManager[Playing]]:
    """Return a function that opens a cassette in the folder of the test, with the options of `play`."""
    from tinkerflow.deployments.cassettes.play import play  # tests without a cassette skip this import

    def of_the_folder(
        file: str | Path, *, ignore: Collection[str] = (), partial: bool = False
    ) -> AbstractContextManager[Playing]:
        return play(request.path.parent / file, ignore=ignore, partial=partial)

    return of_the_folder
