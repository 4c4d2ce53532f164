"""A request and its reply, free of any web framework, and what is refused before a request is looked at."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

MAX_BODY = 64 * 1024
"""Bytes of a request's body; no request of ours needs more."""

CHANGES = ("POST", "PATCH", "DELETE")


class Refused(Exception):
    """A request that is not answered as asked. `code` is a fixed word for programs, the message is for people."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = int(status)
        self.code = code


@dataclass(frozen=True)
class Request:
    """`path` is what follows `/safe_scaler/api/v1`; header names are in lower case."""

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict[str, str])
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    body: bytes = b""

    def number(self, name: str, default: int, low: int, high: int) -> int:
        """A whole number of the query. Refused (400) when it is none or outside `low` to `high`."""
        text = self.query.get(name)
        if text is None:
            return default
        # isdecimal also takes digits of other scripts, which int() reads; the length bounds the work.
        if not (text.lstrip("-").isdecimal() and len(text) <= 16 and low <= int(text) <= high):
            raise Refused(400, "bad_query", f"{name} must be a whole number from {low} to {high}, got {text[:40]!r}.")
        return int(text)

    def json(self) -> dict[str, Any]:
        """The JSON object of the body; an empty body is an empty object. Refused (400) when it is something else."""
        if not self.body.strip():
            return {}
        try:
            loaded = json.loads(self.body.decode("utf-8"), parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise Refused(400, "bad_json", f"The body is no JSON object in UTF-8: {error}.") from error
        if not isinstance(loaded, dict):
            raise Refused(400, "bad_json", f"The body must be a JSON object, got {type(loaded).__name__}.")
        return cast("dict[str, Any]", loaded)


@dataclass(frozen=True)
class Reply:
    """Either `data` (sent as JSON), or `file` or `content` with its type."""

    status: int = 200
    data: Any = None
    file: Path | None = None
    content: bytes | None = None
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict[str, str])

    def body(self) -> bytes:
        """`content`, or the JSON text of `data`. ValueError for NaN and infinity, which no browser reads."""
        if self.content is not None:
            return self.content
        return json.dumps(self.data, allow_nan=False, separators=(",", ":")).encode("utf-8")


def refusal(error: Refused) -> Reply:
    return Reply(error.status, {"error": {"code": error.code, "message": str(error)}})


def check(request: Request) -> None:
    """Refuse requests of foreign pages, changes that are not JSON, and bodies that are too long.

    A page of another origin can make a browser send requests to this machine. Its `Origin` then differs from the
    `Host` it sends to; `Sec-Fetch-Site` says the same where a browser sends no `Origin`. Programs send neither.
    """
    origin = request.headers.get("origin")
    if origin is not None and not _same_host(origin, request.headers.get("host", "")):
        raise Refused(403, "foreign_origin", f"Requests from pages of {origin[:200]} are refused.")
    if origin is None and request.headers.get("sec-fetch-site") in ("cross-site", "same-site"):
        raise Refused(403, "foreign_origin", "Requests from pages of another origin are refused.")
    if len(request.body) > MAX_BODY:
        raise too_long()
    if request.method in CHANGES:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise Refused(
                415, "not_json", f"Changes take Content-Type: application/json, got {kind[:100] or 'none'!r}."
            )


def too_long() -> Refused:
    return Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "too_long", f"The body may have {MAX_BODY} bytes at most.")


def _same_host(origin: str, host: str) -> bool:
    try:
        parts = urlsplit(origin)
        port = parts.port
    except ValueError:
        return False
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return False
    default = 443 if parts.scheme == "https" else 80
    name, _, number = host.rpartition(":") if host.rpartition(":")[2].isdecimal() else (host, "", "")
    return parts.hostname == name.strip("[]").lower() and (port or default) == int(number or default)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
