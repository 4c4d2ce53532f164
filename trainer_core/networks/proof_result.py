"""What a proof after saving found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import AdapterError

PROBE_TOLERANCE = 1e-5
FILE_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class ProofResult:
    """What was proven about a file. `probe_errors` are relative to the norm of the live network's output."""

    path: str
    dtype: str
    modules: int
    tensors: int
    probe_errors: Mapping[str, float]
    changed_modules: int
    does_something: bool

    @property
    def probe_error(self) -> float:
        return max(self.probe_errors.values(), default=0.0)

    @property
    def text(self) -> str:
        """One line for log and report."""
        cast = "equal" if self.dtype == "fp32" else f"equal after the cast to {self.dtype}"
        effect = f"{self.changed_modules} of {self.modules} modules changed"
        return (
            f"Proven '{Path(self.path).name}': {self.tensors} tensors {cast}; output of the re-applied file within "
            f"{self.probe_error:.1e} of the live network; "
            f"{effect if self.does_something else f'it changes nothing ({effect})'}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the run record."""
        return {**asdict(self), "probe_error": self.probe_error, "text": self.text}


def check_result(result: ProofResult, *, require_effect: bool) -> ProofResult:
    """`result`, if it holds.

    Raises:
        AdapterError: the probe differs, or (with `require_effect`) the file changes nothing.
    """
    if not result.probe_error <= PROBE_TOLERANCE:
        raise AdapterError(
            f"'{result.path}' failed its proof: applied to the model again, it computes something else than the "
            f"network that was trained (relative difference {result.probe_error:.2e}, allowed {PROBE_TOLERANCE:.0e}). "
            "Do not use this file; report this with the log."
        )
    if require_effect and not result.does_something:
        raise AdapterError(
            f"'{result.path}' changes nothing: every lora_up weight that could have an effect is still zero. "
            "No step was applied, or no gradient reached the adapters. Look for rejected steps in the log, and check "
            "the learning rate."
        )
    return result
