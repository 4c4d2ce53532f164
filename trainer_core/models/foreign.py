"""Naming files that are no safetensors file by their first bytes, so that a refusal says what was given."""

from __future__ import annotations

from pathlib import Path

PICKLE_ENDINGS = (".ckpt", ".pt", ".pth", ".bin", ".pkl")

HOW_TO_CONVERT = (
    "Pickle files can run any code when they are opened, so they are not read here. Convert it once, on a machine "
    "where you trust the file: python -c \"import torch, safetensors.torch as s; d = torch.load(r'IN.ckpt', "
    "map_location='cpu', weights_only=True); d = d.get('state_dict', d); s.save_file({k: v.clone().contiguous() "
    "for k, v in d.items() if hasattr(v, 'dtype')}, r'OUT.safetensors')\" - or use 'Save checkpoint' in ComfyUI - and "
    "give the .safetensors file."
)


_MAGIC: tuple[tuple[tuple[bytes, ...], str], ...] = (
    (
        (b"<!doctype", b"<html", b"<?xml", b"<head"),
        "is a web page, not a model: the download saved a login or error page. "
        "Download it again while signed in, or with the site's own download button.",
    ),
    (
        (b"version https://git-lfs",),
        "is a Git LFS pointer of a few bytes, not the model itself. "
        "Run 'git lfs pull' in its folder or download the file.",
    ),
    ((b"gguf",), "is a GGUF file (quantised for inference). Training needs the .safetensors checkpoint."),
    (
        (b"\x89png", b"\xff\xd8\xff", b"riff", b"gif8"),
        "is a picture or media file, not a model. Give the .safetensors checkpoint.",
    ),
    (
        (b"{", b"["),
        "is a text file (JSON), not a model. Give the .safetensors checkpoint or the model's folder.",
    ),
)


def describe_foreign(path: Path, head: bytes, size: int) -> str | None:
    """What the file is, when its first bytes (up to 512) show that it is no safetensors file; None if it may be one."""
    if size == 0:
        return f"'{path}' is empty (0 bytes): the download or copy failed. Get the file again."
    if _looks_like_header(head):
        return None
    pickle = _describe_pickle(path, head)
    if pickle is not None:
        return f"'{path}' {pickle}"
    text = head.lstrip().lower()
    for beginnings, what in _MAGIC:
        if text.startswith(beginnings):
            return f"'{path}' {what}"
    return (
        f"'{path}' is not a safetensors file: it does not begin with a header of tensor names. "
        "It is damaged or of another kind. Give an SDXL .safetensors checkpoint or a diffusers folder."
    )


def _describe_pickle(path: Path, head: bytes) -> str | None:
    if head.startswith(b"PK\x03\x04"):
        if path.suffix.lower() in PICKLE_ENDINGS or b"data.pkl" in head:
            return f"is a PyTorch pickle file. {HOW_TO_CONVERT}"
        return "is a zip archive, not a model. Unpack it and give the .safetensors file inside."
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return f"is a pickle file. {HOW_TO_CONVERT}"
    if path.suffix.lower() in PICKLE_ENDINGS:
        return f"has the ending of a pickle file. {HOW_TO_CONVERT}"
    return None


def _looks_like_header(head: bytes) -> bool:
    """Bytes 8.. of a safetensors file open a JSON table."""
    return head[8:9] == b"{"
