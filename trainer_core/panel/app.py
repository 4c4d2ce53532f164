"""The gradio twin: the panel outside ComfyUI, as an application of its own or as a tab of AUTOMATIC1111 and Forge.

Of gradio only `Blocks` and `HTML` are used, the same from 3.41 to 6; what is shown is the panel's own page in a
frame (`web_app.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError, Problem, ResourceError
from .api import PanelApi
from .web_app import LOOPBACK, PAGE, mount

DEFAULT_PORT = 7862

_FRAME = (
    f'<iframe src=".{PAGE}" title="Safe-Scaler: training runs" '
    'style="border:0;display:block;height:calc(100vh - 140px);min-height:600px;width:100%"></iframe>'
)


def blocks() -> Any:
    """gradio `Blocks` that show the panel. The routes of `web_app.mount` must be on the same server."""
    gradio = _gradio()
    with gradio.Blocks(title="Safe-Scaler") as interface:
        gradio.HTML(_FRAME)
    return interface


def application(roots: Sequence[Path], hosts: Sequence[str] = ()) -> Any:
    """A FastAPI application with the panel at `/`, for runs below the folders `roots`."""
    gradio = _gradio()
    from fastapi import FastAPI  # pyright: ignore[reportMissingImports]

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    mount(app, PanelApi(lambda: roots), hosts)
    return gradio.mount_gradio_app(app, blocks(), path="/")


def serve(roots: Sequence[Path], host: str, port: int, ready: Callable[[], None] = lambda: None) -> None:
    """Serve the panel until Ctrl-C; `ready` is called when it can be reached. ConfigError for a port that is taken or
    none, or a host that is none of this machine."""
    import socket

    _gradio()  # which brings the server along: its absence is told first
    import uvicorn  # pyright: ignore[reportMissingImports]

    app = application(roots, LOOPBACK if host in LOOPBACK else ())
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name != "nt":  # on Windows this would share a port that is in use
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        why = f"the panel cannot be served there ({getattr(error, 'strerror', None) or error})"
        raise ConfigError([Problem("--host, --port", f"{host}:{port}", why, "Give another --port.")]) from error
    ready()
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])


def _gradio() -> Any:
    # gradio asks its own server about versions and sends statistics unless told not to.
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    try:
        import gradio  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ResourceError(
            f"The panel outside ComfyUI needs gradio, which cannot be imported ({error}). "
            "Install it: pip install gradio (or pip install 'safe-scaler-lora[panel]')."
        ) from error
    return gradio
