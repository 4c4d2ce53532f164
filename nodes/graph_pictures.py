"""Pictures of a graph as files and back: training pictures that come by link, thumbnails, IMAGE batches."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import trainer_core as core
from . import host

THUMBNAIL = 192

Shown = list[dict[str, str]]


def write_pictures(images: Sequence[Any], captions: Sequence[str], parent: Path) -> Path:
    """Write IMAGE tensors (each [B, H, W, C] in 0..1) as PNG with caption files into a folder named by their content.

    The same pictures and captions give the same folder, which is then left as it is. DatasetError when the counts of
    pictures and captions do not agree, or a picture is not finite.
    """
    import numpy as np
    from PIL import Image

    pictures = [picture for batch in images for picture in np.asarray(batch.detach().cpu())]
    if not pictures:
        raise core.DatasetError("The linked list of images is empty. Link at least one picture, or give a folder.")
    if captions and len(captions) not in (1, len(pictures)):
        raise core.DatasetError(
            f"There are {len(pictures)} pictures and {len(captions)} captions in the graph. "
            "Give one caption for each picture, or one for all."
        )
    for index, picture in enumerate(pictures):
        if not np.isfinite(picture).all():
            raise core.DatasetError(
                f"Picture {index + 1} of {len(pictures)} from the graph holds NaN or infinity: the node that made it "
                "failed (a VAE in half precision is the usual reason). Look at it with Preview Image."
            )
    words = [captions[0]] * len(pictures) if len(captions) == 1 else list(captions) or [""] * len(pictures)
    pixels = [(picture.clip(0, 1) * 255).round().astype(np.uint8) for picture in pictures]
    digest = hashlib.blake2b(digest_size=8)
    for picture, caption in zip(pixels, words, strict=True):
        digest.update(f"{picture.shape}{caption}\0".encode())
        digest.update(np.ascontiguousarray(picture).data)
    folder = parent / f"graph-{digest.hexdigest()}"
    done = folder / ".complete"
    if done.exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    for index, (picture, caption) in enumerate(zip(pixels, words, strict=True)):
        Image.fromarray(picture.squeeze(-1) if picture.shape[-1] == 1 else picture).save(folder / f"{index:05d}.png")
        (folder / f"{index:05d}.txt").write_text(caption, encoding="utf-8")
    done.touch()
    return folder


def thumbnails(files: Sequence[Path], name: str) -> Shown:
    """Small copies of `files` in ComfyUI's temporary folder, as its preview list wants them."""
    from PIL import Image, ImageOps

    folder = host.temp_folder() / "safe_scaler"
    folder.mkdir(parents=True, exist_ok=True)
    shown: Shown = []
    for index, file in enumerate(files):
        target = folder / f"{name}-{index:02d}.png"
        with Image.open(file) as picture:
            small = ImageOps.exif_transpose(picture).convert("RGB")
            small.thumbnail((THUMBNAIL, THUMBNAIL))
            small.save(target)
        shown.append({"filename": target.name, "subfolder": "safe_scaler", "type": "temp"})
    return shown


def image_batch(files: Sequence[Path]) -> Any:
    """PNG files as one IMAGE batch, float32 [B, H, W, 3] in 0..1 on the CPU, all brought to the first one's size."""
    from PIL import Image

    pictures: list[Any] = []
    for file in files:
        with Image.open(file) as opened:
            pictures.append(opened.convert("RGB"))
    return pixels_batch(pictures)


def pixels_batch(pictures: Sequence[Any]) -> Any:
    """PIL pictures as one IMAGE batch."""
    import numpy as np
    import torch
    from PIL import Image

    size = pictures[0].size
    fitting = [p if p.size == size else p.resize(size, Image.Resampling.LANCZOS) for p in pictures]
    rows = [np.asarray(picture, dtype=np.float32) / 255.0 for picture in fitting]
    with torch.inference_mode(False):
        return torch.from_numpy(np.stack(rows))


def shown_files(files: Sequence[Path]) -> Shown:
    """Files below ComfyUI's output or temporary folder as its preview list wants them; others are left out."""
    shown: Shown = []
    for file in files:
        for kind, root in (("output", host.output_folder()), ("temp", host.temp_folder())):
            try:
                relative = file.resolve().relative_to(root.resolve())
            except ValueError:
                continue
            shown.append({"filename": relative.name, "subfolder": relative.parent.as_posix(), "type": kind})
            break
    return shown
