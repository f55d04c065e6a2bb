"""`tinkerflow checkpoint`: tokens are shown once, listed without themselves, and revoked."""

from __future__ import annotations

import re
from pathlib import Path

from typer.testing import CliRunner

from backend.clock import SystemClock
from backend.errors import NotFoundError
from backend.journal import CheckpointKind, CheckpointSaved, CopyMade, access_hash
from backend.settings import Settings
from deployments.cli import app
from deployments.parts import open_journal

RUN = "copy-1:train:0"
PATH = f"tinker://{RUN}/weights/a"


def test_a_token_is_shown_once_and_opens_until_revoked(tmp_path: Path) -> None:
    settings, where = Settings(data_dir=tmp_path), ["--data-dir", str(tmp_path)]
    runner = CliRunner()
    missing = runner.invoke(app, ["checkpoint", "share", PATH, *where])
    assert isinstance(missing.exception, NotFoundError)
    with open_journal(settings) as journal:
        saved = CheckpointSaved(PATH, RUN, CheckpointKind.WEIGHTS, "a", "team", "tiny", 8, True, True, True, 1, 10)
        journal.record_copy(CopyMade("copy-1", saved, "tinker://elsewhere/weights/a"))
    share_id, token = (
        runner.invoke(app, ["checkpoint", "share", PATH, "--ttl", "3600", *where]).stdout.strip().split(": ")
    )
    with open_journal(settings) as journal:
        assert journal.checkpoint(PATH, "stranger", access=access_hash(token)).path == PATH
        (row,) = journal.shares(PATH)
        assert row.expires_at is not None and 3500 < (row.expires_at - SystemClock().now()).total_seconds() <= 3600
    listed = runner.invoke(app, ["checkpoint", "shares", *where], env={"COLUMNS": "200"}).stdout
    assert re.search(rf"{share_id}.*{re.escape(PATH)}", listed) and token not in listed
    assert runner.invoke(app, ["checkpoint", "unshare", share_id, *where]).stdout == f"revoked the token for {PATH}\n"
    with open_journal(settings) as journal:
        assert journal.shares()[0].revoked_at is not None
