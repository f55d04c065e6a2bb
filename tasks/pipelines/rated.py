"""Rows from people's ratings of answers: the data source `journal://`.

    journal://?rated=true&since=7d            the server of TINKER_BASE_URL, or of the data dir
    journal://BLOCK?rated=true&since=2026-01-31    the server of a Tinkerflow Connection block

Only the newest feedback on an answer counts. A better text that someone wrote is the best answer. Otherwise answers are
ordered by reward, where good is 1 and bad is 0.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import httpx

from tinkerflow.backend.core.errors import UserError, broken
from tinkerflow.backend.settings import Settings
from tinkerflow.tasks.pipelines.server_address import server_from_environment

_PAGE = 1000
_GOOD = 0.5  # answers with a higher reward are worth imitating
_AGO = re.compile(r"(\d{1,5})([dh])")


def rated_rows(url: str, kind: str) -> Iterator[dict[str, Any]]:
    """Rows of the schema `kind`, oldest first.

    chat, prompt_completion (also for `auto`): the answers that were rated good, or the better text. preference: for a
    prompt whose answers were rated differently, the best and the worst. prompt: every prompt once, with the best
    answer as `answer`, for rewards that compare.
    UserError: the URL is wrong, or the server does not answer or refuses the request.
    """
    block, since = _parse(url)
    base_url, key = _address(block) if block else server_from_environment(Settings())
    by_prompt: dict[str, dict[str, dict[str, Any]]] = {}
    for one in _read(base_url, key, since):
        by_prompt.setdefault(json.dumps(one["prompt"]), {})[one["sample_id"]] = one
    for prompt, samples in by_prompt.items():
        answers = sorted((answer for one in samples.values() for answer in _answers(one)), reverse=True)
        yield from _rows(kind, json.loads(prompt), answers)


def _rows(kind: str, prompt: Any, answers: list[tuple[float, str]]) -> Iterator[dict[str, Any]]:
    (best, text), (worst, other) = answers[0], answers[-1]
    match kind:
        case "preference":
            if best > worst and text != other:
                yield {"prompt": prompt, "chosen": text, "rejected": other}
        case "prompt":
            yield {"prompt": prompt, "answer": text if best > _GOOD else ""}
        case _ if best > _GOOD:
            asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            said = {"role": "assistant", "content": text}
            yield {"messages": [*asked, said]} if kind == "chat" else {"prompt": prompt, "completion": text}


def _answers(one: Mapping[str, Any]) -> list[tuple[float, str]]:
    """The answers in a feedback entry, each with its reward. A written answer is better than every sample."""
    reward = one["reward"]
    if reward is None:
        reward = 0.0 if one["label"] == "bad" or one["text"] is not None else 1.0
    written = [] if one["text"] is None else [(float("inf"), one["text"])]
    return [*written, (reward, one["answer"])]


def _address(block: str) -> tuple[str, str]:
    try:
        from tinkerflow.tasks.pipelines.connection import address  # needs Prefect, which the client lacks
    except ModuleNotFoundError as error:
        absent = f"{error.name} is not installed: pip install 'tinkerflow[pipelines]'"
        raise UserError(f"data.url: the Prefect block {block!r} cannot be read, because {absent}") from error
    return address(block)


def _parse(url: str) -> tuple[str, datetime | None]:
    """The block and the time of a `journal://` URL."""
    parts = urlsplit(url)
    given = dict(parse_qsl(parts.query, keep_blank_values=True))
    if parts.path.strip("/") or set(given) - {"rated", "since"}:
        raise broken("data.url", url, "journal://[BLOCK]?rated=true[&since=TIME]")
    if given.get("rated") != "true":
        raise broken("data.url", url, "journal://…?rated=true: only rated answers are data")
    return parts.netloc, _time(given["since"], url) if "since" in given else None


def _time(text: str, url: str) -> datetime:
    if (ago := _AGO.fullmatch(text)) is not None:
        hours = int(ago[1]) * (24 if ago[2] == "d" else 1)
        return datetime.now(UTC) - timedelta(hours=hours)
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise broken("data.url", url, "with a since such as 24h, 7d or 2026-01-31") from error
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _read(base_url: str, key: str, since: datetime | None) -> Iterator[dict[str, Any]]:
    asked: dict[str, str | int] = {"limit": _PAGE} | ({} if since is None else {"since": since.isoformat()})
    with httpx.Client(base_url=base_url, headers={"X-API-Key": key}, timeout=60) as http:
        while True:
            try:
                answer = http.get("v1/feedback", params=asked)
            except httpx.HTTPError as error:
                raise UserError(f"data.url: no server answers at {base_url} ({error})") from error
            if answer.status_code != 200:
                raise UserError(f"data.url: {base_url} answered {answer.status_code}: {answer.text[:200]}")
            page = answer.json()["data"]
            if not page:  # a page of long rows is shorter than _PAGE
                return
            yield from page
            asked["after"] = page[-1]["id"]
