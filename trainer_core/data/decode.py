"""From a file to upright 8-bit RGB pixels, the same way everywhere: scan, caching, masks.

The content decides the format, not the ending. Orientation tags are applied, 16-bit grey is scaled, CMYK is read with
Adobe's inverted inks, alpha and palette transparency are laid over a background colour, and of an animation the first
frame is used. Formats that run programs (EPS, PDF) are never opened. This module imports neither torch nor anything
that does: worker processes start with it.
"""

from __future__ import annotations

import struct
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image, ImageColor, ImageFile, ImageOps, UnidentifiedImageError

from ..errors import DatasetError
from .locations import file_of, hash_bytes, hash_location, read_location, shown_name, size_of
from .looks_like import NO_JXL_DECODER, is_jxl, what_it_is

FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "BMP", "DIB", "GIF", "TIFF", "AVIF", "JXL")
ENDINGS = (
    ".png", ".apng", ".jpg", ".jpeg", ".jpe", ".jfif", ".webp", ".bmp", ".dib", ".gif", ".tif", ".tiff", ".avif",
    ".jxl",
)  # fmt: skip
UNREADABLE_ENDINGS = (
    ".heic",
    ".heif",
    ".psd",
    ".svg",
    ".jp2",
    ".raw",
    ".cr2",
    ".nef",
    ".arw",
    ".dng",
    ".tga",
    ".exr",
    ".hdr",
)
MAX_PIXELS = 178_956_970
"""Largest picture that is opened: 512 MiB of RGB pixels, the size at which Pillow itself refuses."""
MIN_SIDE = 8
_WHOLE_READ = 256 * 2**20
_ORIENTATION = 0x0112
_ANIMATED = ("GIF", "WEBP", "PNG", "TIFF", "AVIF", "JXL")

DECODE_ERRORS: tuple[type[BaseException], ...] = (
    OSError,
    SyntaxError,  # Pillow's word for a broken PNG or EXIF block
    ValueError,
    TypeError,
    LookupError,
    EOFError,
    ArithmeticError,
    AttributeError,
    RuntimeError,
    AssertionError,
    MemoryError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)
"""What Pillow raises on damaged files, one decoder or another."""


class PictureError(Exception):
    """A picture that cannot be trained; the text is the reason without the file's name."""


class DecoderMissing(PictureError):
    """A picture of a format whose decoder is not installed: the reason may be another one at the next start."""


@dataclass(frozen=True, slots=True)
class PictureFacts:
    """What a full decode of one file found. `size` is (width, height) upright; `reason` is set when it is unusable."""

    content_hash: str
    size: tuple[int, int]
    format: str = ""
    notes: tuple[str, ...] = ()
    reason: str | None = None


def parse_background(colour: str) -> tuple[int, int, int]:
    """RGB of a colour word, `#rrggbb` or `r,g,b`; DatasetError on anything else."""
    try:
        parts = [int(part) for part in colour.split(",")]
        if len(parts) == 3 and all(0 <= part <= 255 for part in parts):
            return parts[0], parts[1], parts[2]
    except ValueError:
        pass
    try:
        rgb = ImageColor.getrgb(colour.strip())
    except ValueError as error:
        raise DatasetError(
            f"background = {colour!r} is no colour. Use a word such as white, '#rrggbb' or 'r,g,b'."
        ) from error
    return rgb[0], rgb[1], rgb[2]


def examine_picture(location: str | Path, background: tuple[int, int, int] = (255, 255, 255)) -> PictureFacts:
    """Hash and decode the picture in full, so that nothing about it can fail later. Never raises for a bad file."""
    location, content_hash = str(location), ""
    try:
        if size_of(location) > _WHOLE_READ and file_of(location) == location:
            content_hash = hash_location(location)
            source: Path | BytesIO = Path(location)
        else:
            data = read_location(location)
            content_hash = hash_bytes(data)
            if not data:
                return PictureFacts(content_hash, (0, 0), reason="empty file (0 bytes)")
            source = BytesIO(data)
        pixels, facts = _decode(source, background)
    except DecoderMissing as error:
        return PictureFacts("", (0, 0), reason=str(error))  # without a hash it is not remembered
    except PictureError as error:
        return PictureFacts(content_hash, (0, 0), reason=str(error))
    except FileNotFoundError:
        return PictureFacts(content_hash, (0, 0), reason=_missing_reason(Path(file_of(location))))
    except PermissionError:
        return PictureFacts(content_hash, (0, 0), reason="cannot be read: permission denied")
    except OSError as error:
        return PictureFacts(content_hash, (0, 0), reason=f"cannot be read: {error.strerror or error}")
    height, width = pixels.shape[:2]
    reason = None
    if min(width, height) < MIN_SIDE:
        reason = f"too small: {width}x{height} pixels, each side needs at least {MIN_SIDE}"
    return PictureFacts(content_hash, (width, height), facts.format, facts.notes, reason)


def decode_picture(
    location: str | Path, background: str | tuple[int, int, int] = "white", *, data: bytes | None = None
) -> np.ndarray:
    """uint8 array (height, width, 3) of the upright picture over `background`. `data`: its bytes, if read already.

    Raises DatasetError naming the file when it cannot be decoded.
    """
    colour = parse_background(background) if isinstance(background, str) else background
    try:
        return _decode(BytesIO(read_location(str(location)) if data is None else data), colour)[0]
    except (PictureError, OSError) as error:
        raise DatasetError(f"{shown_name(str(location))}: {error}", shown_name(str(location))) from error


def decode_mask(path: str | Path, *, alpha: bool) -> np.ndarray:
    """float32 (height, width) loss mask in 0..1: the alpha channel of a picture, or the red channel of a mask file.

    A picture without transparency is 1 everywhere. Raises DatasetError naming the file when it cannot be decoded.
    """
    if not alpha:
        return decode_picture(path, "black")[..., 0].astype(np.float32) / 255
    # Alpha is what white and black grounds differ by: out = colour x a + ground x (1 - a).
    black, white = (decode_picture(path, ground).astype(np.float32) for ground in ("black", "white"))
    return 1 - (white - black).max(axis=-1) / 255


def fit_picture(pixels: np.ndarray, resized: tuple[int, int], bucket: tuple[int, int], resample: str) -> np.ndarray:
    """uint8 (bucket height, bucket width, 3): `pixels` scaled to `resized`, cut centrally to `bucket` (w, h)."""
    height, width = pixels.shape[:2]
    if (width, height) != tuple(resized):
        image = Image.fromarray(pixels).resize(resized, Image.Resampling[resample.upper()])
        pixels = np.asarray(image)
    left, top = (resized[0] - bucket[0]) // 2, (resized[1] - bucket[1]) // 2
    return np.ascontiguousarray(pixels[top : top + bucket[1], left : left + bucket[0]])


@dataclass(frozen=True, slots=True)
class _Opened:
    format: str
    notes: tuple[str, ...]


def _decode(source: Path | BytesIO, background: tuple[int, int, int]) -> tuple[np.ndarray, _Opened]:
    """Pixels of the first frame; PictureError with a plain reason when there are none."""
    with _quiet_pillow(), _open(source) as image:
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise PictureError(f"too many pixels: {width}x{height}, the limit is {MAX_PIXELS}")
        if width == 0 or height == 0:
            raise PictureError(f"damaged: the header claims a size of {width}x{height}")
        try:
            notes = _frame_notes(image)
            image.load()
            if image.format == "PNG":
                _check_png_chunks(source)
            upright, note = _upright(image)
            pixels = _to_rgb(upright, background)
        except PictureError:
            raise
        except DECODE_ERRORS as error:
            raise PictureError(f"truncated or damaged: {_words(error)}") from error
        return pixels, _Opened(image.format or "", (*notes, *note))


def _open(source: Path | BytesIO) -> Image.Image:
    """The picture with its header read. OSError when the file is not there or may not be read."""
    try:
        return Image.open(source, formats=[name for name in FORMATS if name in _known_formats()])
    except UnidentifiedImageError:
        head = _head(source)
        if is_jxl(head) and "JXL" not in Image.OPEN:
            raise DecoderMissing(NO_JXL_DECODER) from None
        raise PictureError(what_it_is(head)) from None
    except Image.DecompressionBombError as error:
        raise PictureError(f"too many pixels: {error}") from None
    except (FileNotFoundError, PermissionError):
        raise
    except DECODE_ERRORS as error:
        if is_jxl(_head(source)):  # its decoder reads everything at once and speaks to its own programmers
            raise PictureError("truncated or damaged: its JPEG XL data cannot be decoded") from error
        raise PictureError(f"damaged: the header cannot be read ({_words(error)})") from error


@contextmanager
def _quiet_pillow() -> Iterator[None]:
    """Pillow's warnings off (each problem is reported by us) and its tolerance of cut files off, whoever set it."""
    tolerant = ImageFile.LOAD_TRUNCATED_IMAGES
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = tolerant


def _known_formats() -> Mapping[str, object]:
    Image.init()
    if "JXL" not in Image.OPEN:
        _try_jxl_plugin()
    return Image.OPEN


def _head(source: Path | BytesIO) -> bytes:
    """The first 64 bytes."""
    if isinstance(source, BytesIO):
        return source.getvalue()[:64]
    with source.open("rb") as stream:
        return stream.read(64)


_jxl_tried = False


def _try_jxl_plugin() -> None:
    """JPEG XL comes from the package `pillow-jxl-plugin`, which registers itself on import."""
    global _jxl_tried
    if _jxl_tried:
        return
    _jxl_tried = True
    with suppress(ImportError):
        import pillow_jxl  # type: ignore[import-not-found]  # noqa: F401


def _frame_notes(image: Image.Image) -> tuple[str, ...]:
    if image.format not in _ANIMATED:
        return ()
    try:
        frames = getattr(image, "n_frames", 1)
        image.seek(0)
    except DECODE_ERRORS:
        return ("animated, later frames are damaged; the first frame is used",)
    return (f"animated ({frames} frames); the first frame is used",) if frames > 1 else ()


def _upright(image: Image.Image) -> tuple[Image.Image, tuple[str, ...]]:
    """The picture turned as its orientation tag says; a broken tag block is noted, not fatal."""
    try:
        orientation = image.getexif().get(_ORIENTATION, 1)
    except DECODE_ERRORS:
        return image, ("damaged EXIF block: orientation unknown, taken as upright",)
    if orientation in (None, 1):
        return image, ()
    turned = ImageOps.exif_transpose(image)
    return turned, ()


def _to_rgb(image: Image.Image, background: tuple[int, int, int]) -> np.ndarray:
    if image.mode.startswith("I") or image.mode == "F":
        return _from_wide_grey(image, background)
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        front = image.convert("RGBA")
        under = Image.new("RGBA", front.size, (*background, 255))
        image = Image.alpha_composite(under, front)
    elif image.mode == "LAB":
        raise PictureError("its colours are stored as Lab; save it as RGB")
    return np.asarray(image.convert("RGB"))


def _from_wide_grey(image: Image.Image, background: tuple[int, int, int]) -> np.ndarray:
    """Grey with more than 8 bits, scaled to 0..255; kohya and plain Pillow clip it to white instead."""
    values = np.asarray(image).astype(np.float64)
    low, high = (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)
    if not np.isfinite(values).all():
        raise PictureError("its pixels hold NaN or infinity")
    if image.mode == "F":
        if low < 0 or high > 1:
            raise PictureError(
                f"32-bit float pixels between {low:g} and {high:g} have no known range; save it with 8 or 16 bits"
            )
        grey = values * 255
    else:
        if low < 0 or high > 65535:
            raise PictureError(
                f"32-bit integer pixels between {low:g} and {high:g} have no known range; save it with 8 or 16 bits"
            )
        grey = values / 257
    rgb = np.repeat((grey + 0.5).clip(0, 255).astype(np.uint8)[..., None], 3, axis=2)
    clear = image.info.get("transparency")
    if isinstance(clear, int):
        rgb[values == clear] = background
    return rgb


_PNG_CRITICAL = (b"IHDR", b"PLTE", b"IDAT", b"IEND", b"tRNS")


def _check_png_chunks(source: Path | BytesIO) -> None:
    """PictureError where a checksum of the picture's own data is wrong or the file stops before its end mark."""
    data = source.getvalue() if isinstance(source, BytesIO) else source.read_bytes()
    at, kinds = 8, set[bytes]()
    while at + 12 <= len(data):
        (length,) = struct.unpack_from(">I", data, at)
        kind, end = data[at + 4 : at + 8], at + 8 + length
        if end + 4 > len(data):
            break
        kinds.add(kind)
        if kind in _PNG_CRITICAL and zlib.crc32(data[at + 4 : end]) != struct.unpack_from(">I", data, end)[0]:
            raise PictureError(f"damaged: wrong checksum in its {kind.decode('latin-1')} block at byte {at}")
        at = end + 4
        if kind == b"IEND":
            return
    raise PictureError(f"truncated: the file stops at byte {len(data)} before the end of the picture")


def _missing_reason(path: Path) -> str:
    if path.is_symlink():
        return "broken link: the file it points to does not exist"
    return "does not exist any more (no such file)"


def _words(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text[:200] or type(error).__name__
