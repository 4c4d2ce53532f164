"""Pictures and captions: scan, buckets, caches, batches. The names of this facade are loaded when they are used.

Lazy, because decoding processes import from here and must not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .batches import Batch, BatchLoader, plain_caption
    from .buckets import BucketChooser, BucketLimits, bucket_list, crop_ltrb, resolve_limits
    from .captions import CaptionMoment, CaptionRules, caption_stream, fixed_captions, process_caption
    from .decode import decode_picture
    from .latent_cache import LatentCache, LatentEntry
    from .plan import BatchPlan
    from .records import Item, SampleRef, ScanReport, StopRequested, captions_to_encode
    from .scan import examine_dataset, scan_dataset, scan_folder_json
    from .text_cache import TextCache

_HOMES = {
    "Batch": "batches",
    "BatchLoader": "batches",
    "BatchPlan": "plan",
    "BucketChooser": "buckets",
    "BucketLimits": "buckets",
    "CaptionMoment": "captions",
    "CaptionRules": "captions",
    "Item": "records",
    "LatentCache": "latent_cache",
    "LatentEntry": "latent_cache",
    "SampleRef": "records",
    "ScanReport": "records",
    "StopRequested": "records",
    "TextCache": "text_cache",
    "bucket_list": "buckets",
    "caption_stream": "captions",
    "captions_to_encode": "records",
    "crop_ltrb": "buckets",
    "decode_picture": "decode",
    "examine_dataset": "scan",
    "fixed_captions": "captions",
    "plain_caption": "batches",
    "process_caption": "captions",
    "resolve_limits": "buckets",
    "scan_dataset": "scan",
    "scan_folder_json": "scan",
}

__all__ = [
    "Batch",
    "BatchLoader",
    "BatchPlan",
    "BucketChooser",
    "BucketLimits",
    "CaptionMoment",
    "CaptionRules",
    "Item",
    "LatentCache",
    "LatentEntry",
    "SampleRef",
    "ScanReport",
    "StopRequested",
    "TextCache",
    "bucket_list",
    "caption_stream",
    "captions_to_encode",
    "crop_ltrb",
    "decode_picture",
    "examine_dataset",
    "fixed_captions",
    "plain_caption",
    "process_caption",
    "resolve_limits",
    "scan_dataset",
    "scan_folder_json",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{home}", __name__), name)
