"""Pictures whose loss was not finite: counted by content, left out after the second time, and listed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..config import SafetyConfig


@dataclass(frozen=True)
class Hit:
    """One time that a picture failed. `excluded`: this was the time after which it is left out."""

    file: str
    count: int
    excluded: bool


class Quarantine:
    """Counts by picture (path and content, whatever the repeat). In checkpoints under "quarantine"."""

    def __init__(self, config: SafetyConfig, pictures: int) -> None:
        self._limit = config.quarantine_after
        self.pictures = pictures
        self._hits: dict[str, dict[str, Any]] = {}

    def hit(self, key: str, file: str) -> Hit:
        """Count the picture of sample `key`."""
        entry = self._hits.setdefault(_picture(key), {"file": file, "hits": 0})
        entry["hits"] += 1
        return Hit(file, entry["hits"], entry["hits"] == self._limit)

    def excludes(self, key: str) -> bool:
        """Whether the picture of sample `key` is left out."""
        entry = self._hits.get(_picture(key))
        return entry is not None and entry["hits"] >= self._limit

    @property
    def hits(self) -> dict[str, int]:
        """Times by picture file."""
        return {entry["file"]: entry["hits"] for entry in self._hits.values()}

    @property
    def excluded(self) -> tuple[str, ...]:
        """Files that are left out."""
        return tuple(entry["file"] for entry in self._hits.values() if entry["hits"] >= self._limit)

    @property
    def share(self) -> float:
        """Share of the pictures that is left out."""
        return len(self.excluded) / self.pictures if self.pictures else 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"hits": {key: dict(entry) for key, entry in self._hits.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._hits = {key: dict(entry) for key, entry in state["hits"].items()}


def _picture(key: str) -> str:
    return key.partition(":")[0]
