"""Text-encoder outputs, encoded once and kept by what was encoded.

An entry's key holds caption, both text encoders' weights, their number format and the token limit. The encoded empty
caption (for dropout) is an entry like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from ..errors import NonFiniteError
from ..models import SDXLModel, TextEmbeds, encode_captions
from .cache_files import ShardStore, digest
from .records import StopRequested

_FORMAT = "text-1"
_BATCH = 8
_SHARD_BYTES = 64 * 2**20


class TextCache:
    """Cache in `folder` for the text encoders of `model`, which must not be trained.

    Raises ResourceError when the folder cannot be made or written.
    """

    def __init__(
        self, folder: str | Path, model: SDXLModel, max_token_length: int = 75, *, weighted: bool = False
    ) -> None:
        self.model = model
        self.weighted = weighted
        self.max_token_length = max_token_length
        self.store = ShardStore(Path(folder), "text", ("context", "pooled"))
        parts = model.fingerprints
        self._encoders = (parts["te1"], parts["te2"], str(model.dtype))

    def key(self, caption: str) -> str:
        """Name of the caption's entry: equal keys mean equal outputs."""
        weights = ("weighted",) if self.weighted else ()
        return digest(_FORMAT, caption, *self._encoders, self.max_token_length, *weights)

    def ensure(
        self,
        captions: Iterable[str],
        *,
        progress: Callable[[int, int, str], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> int:
        """Encode what is missing, the empty caption included; returns how many were made.

        Raises:
            NonFiniteError: a caption (named) has no finite encoding; it is not written.
            StopRequested: `should_stop` answered True; what was encoded is kept.
        """
        missing = [text for text in dict.fromkeys([*captions, ""]) if self.key(text) not in self.store]
        pending: dict[str, dict[str, torch.Tensor]] = {}
        size = 0
        for at in range(0, len(missing), _BATCH):
            batch = missing[at : at + _BATCH]
            if should_stop and should_stop():
                self.store.put(pending)
                raise StopRequested
            entries = self._encode(batch)
            pending.update(entries)
            size += sum(t.nbytes for parts in entries.values() for t in parts.values())
            if size >= _SHARD_BYTES:
                self.store.put(pending)
                pending, size = {}, 0
            if progress:
                progress(at + len(batch), len(missing), batch[-1])
        self.store.put(pending)
        return len(missing)

    def encode(self, captions: Sequence[str]) -> TextEmbeds:
        """Context (B, T, D) and pooled (B, D) on the CPU; captions that are not there yet are encoded and kept."""
        rows = [self._row(caption) for caption in captions]
        return TextEmbeds(torch.stack([row["context"] for row in rows]), torch.stack([row["pooled"] for row in rows]))

    def _row(self, caption: str) -> dict[str, torch.Tensor]:
        key = self.key(caption)
        row = self.store.get(key)
        if row is None:
            entries = self._encode([caption])
            self.store.put(entries)
            row = entries[key]
        return row

    def _encode(self, captions: Sequence[str]) -> dict[str, dict[str, torch.Tensor]]:
        """Entries of up to `_BATCH` captions. The batch is filled up: another shape would round differently."""
        device_type = self.model.device.type
        padded = [*captions, *[""] * (_BATCH - len(captions))]
        with torch.no_grad(), torch.autocast(device_type=device_type, enabled=False):
            context_BTD, pooled_BD = encode_captions(
                self.model, padded, max_token_length=self.max_token_length, weighted=self.weighted
            )
        context_BTD, pooled_BD = context_BTD.cpu(), pooled_BD.cpu()
        entries: dict[str, dict[str, torch.Tensor]] = {}
        for at, caption in enumerate(captions):
            row = {"context": context_BTD[at].clone(), "pooled": pooled_BD[at].clone()}
            if not all(bool(torch.isfinite(tensor).all()) for tensor in row.values()):
                raise NonFiniteError(
                    f"The text encoders give NaN or infinity for the caption {caption[:200]!r}. The model file may be "
                    "damaged, or its number format too small: try precision.compute = 'fp32'.",
                    sample_ids=(caption[:200],),
                )
            entries[self.key(caption)] = row
        return entries
