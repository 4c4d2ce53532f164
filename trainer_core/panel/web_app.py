"""The panel's page, files and API as routes of a Starlette application (gradio's, FastAPI's, AUTOMATIC1111's).

The page is the one of ComfyUI's sidebar (`web/js`), fed by polling in place of ComfyUI's socket.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import ResourceError
from .api import PREFIX, PanelApi
from .exchange import MAX_BODY, Refused, Reply, Request, refusal

WEB = Path(__file__).resolve().parents[2] / "web"
PAGE = "/safe_scaler/panel/"
FILES = "/safe_scaler/web"
LOOPBACK = ("127.0.0.1", "localhost", "::1")

_TYPES = {".js": "text/javascript", ".mjs": "text/javascript", ".css": "text/css"}
_FOLDERS = ("js", "css")
_FILE_NAME = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)+")
_HTML = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Safe-Scaler</title>
<link rel="stylesheet" href="../web/css/standalone.css">
</head>
<body>
<main id="safe-scaler">Loading…</main>
<script type="module" src="../web/js/standalone_boot.mjs"></script>
</body>
</html>
"""
_SAFE = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self'"
    " data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'self'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def mount(app: Any, api: PanelApi, hosts: Sequence[str] = ()) -> None:
    """Put page, files and API of the panel in front of the other routes of `app`.

    Args:
        app: a Starlette or FastAPI application that may already be serving.
        hosts: names under which the server may be addressed; a page of another name that was made to resolve to this
            machine is refused. Empty: any.

    Raises:
        ResourceError: the panel's files are not where they should be.
    """
    from starlette.routing import Route  # pyright: ignore[reportMissingImports]

    if not (WEB / "js" / "standalone.js").is_file():
        raise ResourceError(
            f"The panel's files are not at {WEB}: they are part of the repository, not of the installed package. "
            "Install with pip install -e . in a copy of the repository."
        )
    site = _Site(app, api, tuple(hosts))
    app.router.routes[:0] = [
        Route(PREFIX + "/{rest:path}", site.answer, methods=["GET", "POST", "PATCH", "DELETE"]),
        Route(PAGE, site.page, methods=["GET"]),
        Route(FILES + "/{rest:path}", site.file, methods=["GET"]),
    ]


class _Site:
    def __init__(self, app: Any, api: PanelApi, hosts: tuple[str, ...]) -> None:
        self._app = app
        self._api = api
        self._hosts = hosts

    async def answer(self, request: Any) -> Any:
        refused = self._refusal(request)
        if refused is not None:
            return _response(refused)
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY:
                break  # the API refuses it; the rest is not read
        asked = Request(
            method=request.method,
            path="/" + request.path_params["rest"],
            query=dict(request.query_params),
            headers={name.lower(): value for name, value in request.headers.items()},
            body=body,
        )
        return _response(await asyncio.to_thread(self._api.handle, asked))

    async def page(self, request: Any) -> Any:
        from starlette.responses import HTMLResponse  # pyright: ignore[reportMissingImports]

        refused = self._refusal(request)
        return HTMLResponse(_HTML, headers=_SAFE) if refused is None else _response(refused)

    async def file(self, request: Any) -> Any:
        refused = self._refusal(request)
        path = web_file(request.path_params["rest"])
        if refused is None and path is None:
            refused = refusal(Refused(404, "no_such_file", "There is no such file of the panel."))
        if refused is not None:
            return _response(refused)
        assert path is not None
        return _response(Reply(file=path, content_type=_TYPES[path.suffix], headers=_SAFE))

    def _refusal(self, request: Any) -> Reply | None:
        name = request.url.hostname or ""
        if self._hosts and name not in self._hosts:
            return refusal(Refused(403, "foreign_host", f"This panel is not served under the name {name[:100]!r}."))
        if not signed_in(self._app, request.cookies):
            return refusal(Refused(401, "sign_in", "Sign in to the page that holds this panel first."))
        return None


def signed_in(app: Any, cookies: dict[str, str]) -> bool:
    """Whether a request may pass where the application asks for a password (gradio's `auth`).

    gradio gives each session a token in a cookie whose name begins with `access-token` and keeps them in `app.tokens`.
    """
    if getattr(app, "auth", None) is None and getattr(app, "auth_dependency", None) is None:
        return True
    tokens = getattr(app, "tokens", {})
    return any(name.startswith("access-token") and value in tokens for name, value in cookies.items())


def web_file(name: str) -> Path | None:
    """The panel's file of that name below `web/js` or `web/css`; None for everything else."""
    if not _FILE_NAME.fullmatch(name):
        return None
    path = (WEB / name).resolve()
    inside = any(path.is_relative_to((WEB / folder).resolve()) for folder in _FOLDERS)
    return path if inside and path.suffix in _TYPES and path.is_file() else None


def _response(reply: Reply) -> Any:
    from starlette.responses import FileResponse, Response  # pyright: ignore[reportMissingImports]

    if reply.file is not None:
        return FileResponse(str(reply.file), media_type=reply.content_type, headers=dict(reply.headers))
    headers = dict(reply.headers)
    return Response(reply.body(), status_code=reply.status, media_type=reply.content_type, headers=headers)
