"""The panel's HTTP routes in ComfyUI, `/safe_scaler/api/v1/...`, and the heartbeat on ComfyUI's socket.

What is asked and answered is `trainer_core.panel.api`; here requests are only carried over. ComfyUI serves every route
also below `/api`. Handlers run in the server's event loop, so the answers are made in a thread.
"""

# pyright: reportMissingImports=false
# ComfyUI's own modules, which are there only inside it.
from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .. import trainer_core as core
from . import host, live
from .scans import scanned
from .waiting import waiting_runs

if TYPE_CHECKING:
    from aiohttp import web

HEARTBEAT = "safe_scaler.ping"

_METHODS = ("GET", "POST", "PATCH", "DELETE")

log = logging.getLogger(__name__)


def register(on_interval: Callable[[int], object] = lambda _: None) -> core.PanelApi | None:
    """Add the routes and the heartbeat to the running server. None where no server is (tests, headless imports).

    `on_interval(milliseconds)` is told when a panel sets the refresh rate. To be called once, while ComfyUI loads its
    packs: routes cannot be added later.
    """
    server = host.prompt_server()
    if server is None:
        return None
    api = core.PanelApi(live.output_folders, live.live_runs, on_interval, scanned, waiting_runs)
    handler = _handler(api)
    for method in _METHODS:
        server.routes.route(method, core.PANEL_PREFIX + "/{rest:.*}")(handler)
    server.app.on_startup.append(_start_heartbeat)
    return api


def _handler(api: core.PanelApi) -> Callable[[web.Request], Any]:
    from aiohttp import web

    async def handle(request: web.Request) -> web.StreamResponse:
        body = await _read(request)
        asked = core.PanelRequest(
            method=request.method,
            path="/" + request.match_info["rest"],
            query=dict(request.query),
            headers={name.lower(): value for name, value in request.headers.items()},
            body=body,
        )
        reply = await asyncio.to_thread(api.handle, asked)
        headers = {**reply.headers, "Content-Type": reply.content_type}
        if reply.file is not None:
            return web.FileResponse(reply.file, headers=headers)
        return web.Response(status=reply.status, body=reply.body(), headers=headers)

    return handle


async def _read(request: web.Request) -> bytes:
    """The body, read no further than the first byte too many; `PanelApi` then refuses it."""
    parts: list[bytes] = []
    size = 0
    while size <= core.PANEL_MAX_BODY:
        part = await request.content.read(core.PANEL_MAX_BODY + 1 - size)
        if not part:
            break
        parts.append(part)
        size += len(part)
    return b"".join(parts)


async def _start_heartbeat(_: web.Application) -> None:
    task = asyncio.get_running_loop().create_task(_heartbeat(), name="safe_scaler heartbeat")
    _tasks.add(task)  # a loop keeps only weak references to its tasks
    task.add_done_callback(_tasks.discard)


_tasks: set[asyncio.Task[None]] = set()


async def _heartbeat() -> None:
    """Tell browsers that the server lives, so that a panel can say when it does not hear from it."""
    while True:
        host.send_event(HEARTBEAT, {"type": "ping", "ts": time.time()})
        await asyncio.sleep(core.PANEL_HEARTBEAT_S)
