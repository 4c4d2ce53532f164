"""The previews of a step in a run: made, recorded one by one, and told when one fails."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from .validation import make_previews

if TYPE_CHECKING:
    from .session import Session
    from .trainer import TrainerParts
    from .validation import PreviewResult


def preview_step(session: Session, parts: TrainerParts, step: int, warn: Callable[[str, str, int], None]) -> None:
    """Sample the run's prompts with the adapter of this moment. Whatever goes wrong is told by `warn`."""

    def tell(result: PreviewResult) -> None:
        if result.file is None:
            warn("preview", result.failure or "A preview failed.", step)
        else:
            session.preview_ready(step, result.file, result.prompt.text, result.index, result.prompt.seed)

    make_previews(
        parts.model,
        parts.network,
        session.prompts,
        step=step,
        folder=session.folder.previews,
        max_token_length=session.config.dataset.max_token_length,
        should_stop=session.should_stop,
        on_ready=tell,
        compute=parts.precision.autocast,
    )


def try_largest_preview(session: Session, parts: TrainerParts, warn: Callable[[str, str, int], None]) -> None:
    """Make the largest preview once, with two sampling steps and for nothing, so that what it lacks is told now and not
    in an hour. Run state is the same afterwards."""
    largest = max(session.prompts, key=lambda prompt: prompt.width * prompt.height)
    with tempfile.TemporaryDirectory() as folder:
        results = make_previews(
            parts.model,
            parts.network,
            [replace(largest, steps=min(2, largest.steps))],
            step=0,
            folder=Path(folder),
            max_token_length=session.config.dataset.max_token_length,
            should_stop=session.should_stop,
            compute=parts.precision.autocast,
        )
    for result in results:
        if result.failure is not None:
            what = f"A preview of {largest.width} x {largest.height} was tried before the first step: {result.failure}"
            warn("preview", what, 0 if session.trainer is None else session.trainer.state.step)
