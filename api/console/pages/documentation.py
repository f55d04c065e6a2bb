"""`/docs/`: the website of the documentation, if this installation contains it.

`python -m tests.docs.website` builds it into `website/`. The wheels of releases contain that folder.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path
from urllib.parse import quote

from fastapi import HTTPException, Request
from fastapi.responses import FileResponse, RedirectResponse, Response

from tinkerflow.api.console.render import website
from tinkerflow.api.console.visit import base_of, page_router

_CACHED = "max-age=600"
router = page_router()


@router.get("/docs")
@router.get("/docs/{page:path}")
async def documentation(request: Request, page: str = "") -> Response:
    """A file of the website, for all visitors. HTTPException 404: there is no such file, or no website."""
    if (folder := website()) is None:
        raise HTTPException(
            404,
            "this installation has no documentation: wheels of releases contain it, and in a checkout "
            "`python -m tests.docs.website` builds it (pip install '.[docs]')",
        )
    files, directory = _files(folder), request.scope["path"].endswith("/")
    if not directory and f"{page}/index.html".lstrip("/") in files:
        return RedirectResponse(f"{base_of(request.app.state.services)}/docs/{quote(page)}{'/' if page else ''}", 303)
    file = files.get(f"{page}index.html" if directory else page)
    if file is None:
        raise HTTPException(404, f"the documentation has no page {page!r}")
    headers = {"Cache-Control": _CACHED}
    if file.suffix == ".html":
        headers["Content-Security-Policy"] = _policy(file)
    return FileResponse(file, headers=headers)


@cache
def _files(folder: Path) -> dict[str, Path]:
    """All files in a folder and its subfolders, by their paths in URLs."""
    return {file.relative_to(folder).as_posix(): file for file in folder.rglob("*") if file.is_file()}


@cache
def _policy(file: Path) -> str:
    """A policy that allows only our own scripts: files, and the inline scripts of the page as it is on disk."""
    inline = re.findall(r"<script>(.*?)</script>", file.read_text(), re.S)
    digests = {base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in inline}
    scripts = " ".join(("'self'", *(f"'sha256-{digest}'" for digest in sorted(digests))))
    return (
        f"default-src 'none'; script-src {scripts}; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
        "connect-src 'self'; worker-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    )
