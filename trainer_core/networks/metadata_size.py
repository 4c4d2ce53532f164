"""Shortening metadata so that a file's header stays below the length that ComfyUI reads (1 MiB)."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch

from .kohya_file import HEADER_LIMIT

_RESERVE = 4096
"""Room for the hashes and for the escapes of JSON inside JSON."""

_DROP_IN_ORDER = ("modelspec.thumbnail", "workflow", "ss_datasets", "safe_scaler_health", "ss_bucket_info")


def fit_metadata(
    metadata: Mapping[str, str], state: Mapping[str, torch.Tensor], limit: int = HEADER_LIMIT
) -> tuple[dict[str, str], tuple[str, ...]]:
    """(metadata that fits beside the tensors' names, what was left out in plain words).

    The rarest tags of `ss_tag_frequency` go first, then the longest optional entries.
    """
    kept, notes = dict(metadata), []
    budget = limit - _RESERVE - _names_size(state)
    if _size(kept) > budget and "ss_tag_frequency" in kept:
        room = budget - (_size(kept) - _size({"ss_tag_frequency": kept["ss_tag_frequency"]}))
        kept["ss_tag_frequency"], left_out = _commonest_tags(kept["ss_tag_frequency"], room)
        notes.append(f"{left_out} rare tags were left out of the file's tag list, which was too long for its header.")
    for key in _DROP_IN_ORDER:
        if _size(kept) > budget and key in kept:
            del kept[key]
            notes.append(f"'{key}' was left out of the file's metadata, which was too long for its header.")
    return kept, tuple(notes)


def _names_size(state: Mapping[str, torch.Tensor]) -> int:
    entry = '"":{"dtype":"BF16","shape":[],"data_offsets":[,]},'
    return sum(len(key) + len(entry) + 2 * 12 + len(str(list(value.shape))) for key, value in state.items())


def _size(metadata: Mapping[str, str]) -> int:
    return len(json.dumps(dict(metadata), ensure_ascii=False).encode("utf-8"))


def _commonest_tags(text: str, room: int) -> tuple[str, int]:
    """The tag table with its most frequent tags within `room` bytes, and how many tags were left out."""
    table: dict[str, dict[str, int]] = json.loads(text)
    ranked = sorted(
        ((count, folder, tag) for folder, tags in table.items() for tag, count in tags.items()),
        key=lambda entry: (-entry[0], entry[1], entry[2]),
    )
    kept: dict[str, dict[str, int]] = {folder: {} for folder in table}
    used = _size({"ss_tag_frequency": json.dumps(kept, ensure_ascii=False)})
    for position, (count, folder, tag) in enumerate(ranked):
        # The table is JSON inside a JSON string, so every quote and backslash is escaped once more.
        quoted = json.dumps(json.dumps({tag: count}, ensure_ascii=False), ensure_ascii=False)
        used += len(quoted.encode("utf-8")) - 2
        if used > room:
            return json.dumps(kept, ensure_ascii=False), len(ranked) - position
        kept[folder][tag] = count
    return json.dumps(kept, ensure_ascii=False), 0
