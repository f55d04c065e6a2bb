"""Links to Prefect's pages, if this process can find their address."""

from __future__ import annotations

import os
from dataclasses import dataclass
from urllib.parse import urlencode

from tinkerflow.api.console.visit import Visit, base_of
from tinkerflow.backend.core.prefect_access import find_server, page_command, server_for_clients
from tinkerflow.backend.settings import Settings


@dataclass(frozen=True)
class PrefectLink:
    """A link to a page of Prefect. command: a command that prints a link that signs the browser in; "": none needed."""

    url: str
    command: str = ""


def prefect_pages(settings: Settings) -> str | None:
    """The address of Prefect's pages; None if there is no Prefect or this process cannot find its address."""
    match settings.prefect:
        case "external":
            server = server_for_clients(settings.data_dir, os.environ)
            return server.pages_url if server is not None else None
        case "embedded" if server := find_server(settings.data_dir):
            return server.pages_url
    return None


def prefect_link(visit: Visit, pages: str | None, flow_run: str = "") -> PrefectLink | None:
    """The link to a flow run, or to Prefect's first page; None if `pages` is None.

    pages: the address of Prefect's pages (`prefect_pages`).
    """
    services, path = visit.call.services, page_of(flow_run)
    if pages is None:
        return None
    if services.settings.prefect == "external":
        return PrefectLink(f"{pages}{path}")
    if visit.identity.admin and visit.identity.key_id:
        query = f"?{urlencode({'flow_run': flow_run})}" if flow_run else ""
        return PrefectLink(f"{base_of(services)}/prefect{query}")
    command = f"tinkerflow prefect --page {path}"
    default = Settings.model_fields["data_dir"].default  # the reader's shell may not set this process's variable
    if visit.identity.admin and services.settings.data_dir != Settings(data_dir=default).data_dir:
        command = page_command(path, services.settings.data_dir)
    return PrefectLink(f"{pages}{path}", command)


def page_of(flow_run: str) -> str:
    """The path of a flow run's page, or of the first page if `flow_run` is empty."""
    return f"/runs/flow-run/{flow_run}" if flow_run else "/"
