"""Errors a user can act on. Everything else (`ValueError`, `TypeError`, an assertion) is a bug and keeps its traceback.

Message shape: what is wrong; what was received; what is allowed; what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


class TrainerError(Exception):
    """Base of all errors whose text is shown to the user without a traceback."""


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a config: where, what was received, why it cannot be, and what to do."""

    field: str
    value: object
    why: str
    fix: str

    def __str__(self) -> str:
        return f"{self.field} = {self.value!r}: {self.why.rstrip('.')}. {self.fix}".rstrip()


class ConfigError(TrainerError):
    """All problems of a config, found before anything is loaded."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        head = "The settings have 1 problem:" if count == 1 else f"The settings have {count} problems:"
        super().__init__("\n".join([head, *(f"  - {problem}" for problem in self.problems)]))


class DatasetError(TrainerError):
    """The pictures or captions cannot be used."""

    def __init__(self, message: str, path: str | Path | None = None) -> None:
        super().__init__(message)
        self.path = path


class ModelFileError(TrainerError):
    """A file given as the base model (or VAE) cannot be used as one; the message says what it is instead."""

    def __init__(self, message: str, path: str | Path | None = None) -> None:
        super().__init__(message)
        self.path = path


class AdapterError(TrainerError):
    """An adapter matches nothing, cannot be loaded, or failed its proof after saving."""


class CheckpointError(TrainerError):
    """A checkpoint is missing, damaged, or belongs to other settings (`differences` lists them by name)."""

    def __init__(self, message: str, differences: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.differences = tuple(differences)


class NonFiniteError(TrainerError):
    """NaN or infinity where the run cannot go on."""

    def __init__(
        self, message: str, *, step: int | None = None, report: object = None, sample_ids: Sequence[str] = ()
    ) -> None:
        super().__init__(message)
        self.step = step
        self.report = report
        self.sample_ids = tuple(sample_ids)


class HealthError(TrainerError):
    """Gradient health says that going on is of no use: something does not train, or the user asked to stop on it."""


class HardwareError(TrainerError):
    """The device fails: what it computed lately may be wrong, so the present state is not kept."""


class ResourceError(TrainerError):
    """Out of memory or disk, with the sizes and what to try."""


class ProcessError(TrainerError):
    """Processes of one run cannot reach each other, do not answer, or do not agree on what they train."""


class WeightsDifferError(ProcessError):
    """Processes hold other weights than process 0: nobody knows whose are right, so the present state is not kept."""
