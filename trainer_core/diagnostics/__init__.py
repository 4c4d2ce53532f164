"""What is learnt from a run after it: the report page. Nothing here imports torch."""

from __future__ import annotations

from .report import write_report

__all__ = ["write_report"]
