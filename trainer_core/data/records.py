"""What a scan finds: pictures that can be trained, files that cannot, and everything worth saying about them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..draws import sample_key
from . import scan_warnings as say
from .captions import CaptionRules, fixed_captions
from .locations import file_of
from .sets import SetSpec


class StopRequested(Exception):
    """Somebody asked to stop while pictures were scanned or cached. A status, not an error: nothing was lost."""


UPSCALE_NOTED = 1.02
"""Enlarging by more than this is worth a warning."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One usable picture with its caption.

    `file` is its POSIX path inside the data set and unique in the report (prior pictures start with `prior:`); `source`
    is where it lies on disk. Sizes are (width, height) in pixels: `upright_size` of the decoded picture the right way
    up, `resized` after scaling to cover the bucket, `bucket` after the centre crop. `spec`: settings of its set.
    `mask`: path of its loss mask, "alpha" for its own alpha channel, or None.
    """

    file: str
    source: str
    content_hash: str
    upright_size: tuple[int, int]
    resized: tuple[int, int]
    bucket: tuple[int, int]
    spec: SetSpec
    caption: str = ""
    repeats: int = 1
    mask: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        return Path(file_of(self.source))

    @property
    def is_prior(self) -> bool:
        return self.spec.is_prior

    @property
    def loss_weight(self) -> float:
        return self.spec.loss_weight

    @property
    def rules(self) -> CaptionRules:
        return self.spec.rules

    @property
    def upscale(self) -> float:
        """How much the picture is enlarged to cover its bucket; below 1 it is shrunk."""
        return max(self.resized[0] / self.upright_size[0], self.resized[1] / self.upright_size[1])

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is worth saying about this picture."""
        if self.upscale <= UPSCALE_NOTED:
            return self.notes
        width, height = self.upright_size
        return (*self.notes, f"small: {width}x{height} is upscaled {self.upscale:.1f} times")

    def key(self, repeat: int = 0) -> str:
        """Identity of one sample of this picture in an epoch (`draws.sample_key`)."""
        return sample_key(self.file, self.content_hash, repeat)


@dataclass(frozen=True, slots=True)
class SampleRef:
    """One sample of an epoch: which item, which of its repeats, and the key of all its draws."""

    item_index: int
    repeat: int
    key: str


@dataclass(frozen=True, kw_only=True)
class ScanReport:
    """Outcome of a scan. `items` are in a deterministic order; every problem names its file.

    `refused` and `ignored` hold paths inside the data set. `folder` is the data set's folder, `size` the training size
    (width, height). `error` says why nothing can be trained, or is None. `decoded` pictures were read and decoded in
    `decode_seconds`; the others were known by size and time stamps.
    """

    folder: str
    size: tuple[int, int]
    items: Sequence[Item]
    refused: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    error: str | None = None
    seconds: float = 0.0
    decoded: int = 0
    decode_seconds: float = 0.0

    @property
    def bucket_counts(self) -> dict[tuple[int, int], int]:
        """Samples an epoch (pictures times repeats) of every bucket, by (width, height)."""
        counts: dict[tuple[int, int], int] = {}
        for item in self.items:
            counts[item.bucket] = counts.get(item.bucket, 0) + item.repeats
        return dict(sorted(counts.items()))

    def problem_lines(self) -> list[str]:
        """Everything that a person should know, one line each: refused files first, then warnings."""
        return [f"{file} is left out: {reason}" for file, reason in self.refused] + list(self.warnings)

    def content_digest(self) -> str:
        """Identity of what is trained: files, contents, captions, sizes, repeats and weights of all items."""
        total = hashlib.blake2b(digest_size=16)
        for item in self.items:
            facts = (item.file, item.content_hash, item.caption, item.bucket, item.repeats, item.loss_weight)
            total.update(repr(facts).encode("utf-8", "surrogatepass"))
        return total.hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Plain data for scripts: `{"items": [...], "ignored": [...], "warnings": [...], "error": null}`."""
        rows: list[dict[str, Any]] = [
            {
                "file": item.file,
                "usable": True,
                "reason": None,
                "upright_size": list(item.upright_size),
                "bucket": list(item.bucket),
                "caption": item.caption,
                "warnings": list(item.warnings),
            }
            for item in self.items
        ]
        rows += [
            {
                "file": file,
                "usable": False,
                "reason": reason,
                "upright_size": None,
                "bucket": None,
                "caption": None,
                "warnings": [],
            }
            for file, reason in self.refused
        ]
        rows.sort(key=lambda row: row["file"])
        return {"items": rows, "ignored": list(self.ignored), "warnings": list(self.warnings), "error": self.error}

    def summary(self) -> str:
        """The report in a few plain lines: counts, buckets, and every problem with its file."""
        prior = sum(1 for item in self.items if item.is_prior)
        samples = sum(item.repeats for item in self.items)
        lines = [
            f"{say.counted(len(self.items), 'picture')} usable ({say.counted(samples, 'sample')} an epoch"
            + (f", {prior} prior pictures" if prior else "")
            + f"), {len(self.refused)} refused, {say.counted(len(self.ignored), 'other file')} passed over"
        ]
        if self.decoded and self.decode_seconds > 0:
            lines.append(f"  {self.decoded} read and decoded, {self.decoded / self.decode_seconds:.0f} pictures/s")
        lines += [f"  bucket {w}x{h}: {say.counted(count, 'sample')}" for (w, h), count in self.bucket_counts.items()]
        lines += [f"  refused: {file}: {reason}" for file, reason in self.refused]
        lines += [f"  note: {warning}" for warning in self.warnings]
        lines += [self.error] if self.error else []
        return "\n".join(lines)


def captions_to_encode(items: Iterable[Item]) -> list[str] | None:
    """Every caption that can come up in training, sorted, the empty one included; None when there is no end of them."""
    found = {""}
    for item in items:
        captions = fixed_captions(item.caption, item.rules)
        if captions is None:
            return None
        found.update(captions)
    return sorted(found)
