"""The previews of a step in a run: made, recorded one by one, and told when one fails."""

from __future__ import annotations

from collections.abc import Callable
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
