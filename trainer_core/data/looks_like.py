"""What the first bytes of a file say about it: the reason for refusing one that no decoder knows."""

from __future__ import annotations

_LOOKS_LIKE: tuple[tuple[bytes, str], ...] = (
    (b"<!doctype", "a web page"),
    (b"<html", "a web page"),
    (b"<svg", "an SVG drawing"),
    (b"<?xml", "XML text"),
    (b"version https://git-lfs", "a Git LFS pointer: fetch the real file with 'git lfs pull'"),
    (b"%pdf", "a PDF document"),
    (b"%!ps", "a PostScript file"),
    (b"8bps", "a Photoshop file"),
    (b"pk\x03\x04", "a zip archive"),
)


_PICTURE_MARKS: tuple[tuple[bytes, str], ...] = (
    (b"\x89PNG", "PNG"),
    (b"\xff\xd8\xff", "JPEG"),
    (b"GIF8", "GIF"),
    (b"BM", "BMP"),
    (b"RIFF", "WebP"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"\0\0\0\x20ftypavi", "AVIF"),
    (b"\0\0\0\x1cftypavi", "AVIF"),
)

_JXL_MARKS = (b"\xff\x0a", b"\x00\x00\x00\x0cJXL ")
NO_JXL_DECODER = "a JPEG XL picture, and no decoder is installed for these: pip install pillow-jxl-plugin"


def is_jxl(head: bytes) -> bool:
    """Whether `head` starts a JPEG XL codestream or container (ISO/IEC 18181-2)."""
    return head.startswith(_JXL_MARKS)


def what_it_is(head: bytes) -> str:
    """Reason for a file that no decoder knows, from its first bytes."""
    start = head.lstrip().lower()
    known = next((name for mark, name in _LOOKS_LIKE if start.startswith(mark)), "")
    if head[4:8] == b"ftyp" and head[8:12] in (b"heic", b"heix", b"mif1", b"hevc"):
        known = "HEIC: save it as JPEG or PNG"
    broken = next((name for mark, name in _PICTURE_MARKS if head.startswith(mark)), None)
    if broken and not known:
        return f"damaged: it starts as a {broken} picture but cannot be read"
    if not known:
        known = "zero bytes only" if head and not head.strip(b"\0") else f"its first bytes are {head[:8].hex(' ')}"
        return f"not an image in a format that is read here, or damaged from its start ({known})"
    return f"not an image: the content looks like {known}"
