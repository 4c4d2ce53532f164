"""One data set of a run: where it lies, how its pictures are taken and how they are trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ..config import BucketConfig, DatasetConfig
from .buckets import BucketLimits, resolve_limits
from .captions import CaptionRules
from .decode import parse_background
from .folders import clean_folder


@dataclass(frozen=True, kw_only=True)
class SetSpec:
    """Settings shared by all pictures of one set.

    `prefix` stands before the POSIX path of every file of the set and makes it unique in the run. `numbered`: kohya's
    `N_class tokens` sub-folders are taken as sets of their own. `batch_size`, `validation_split` None = the
    run's. `background` is RGB.
    """

    folder: Path
    prefix: str = ""
    is_prior: bool = False
    loss_weight: float = 1.0
    repeats: int = 1
    recursive: bool = False
    numbered: bool = True
    class_tokens: str = ""
    default_caption: str = ""
    caption_extensions: tuple[str, ...] = (".txt", ".caption")
    caption_encoding: str | None = None
    max_token_length: int = 75
    rules: CaptionRules = field(default_factory=CaptionRules)
    limits: BucketLimits = field(default_factory=lambda: BucketLimits((1024, 1024), 256, 2048, 64))
    max_ratio: float = 8.0
    crop_values: str = "letterbox"
    batch_size: int | None = None
    flip: bool = False
    background: tuple[int, int, int] = (255, 255, 255)
    interpolation: str = "lanczos"
    mask: str | None = None
    metadata_file: str | None = None
    validation_split: float | None = None

    @property
    def keeps_lines(self) -> bool:
        """Whether line ends of caption files are kept for the caption rules."""
        return self.rules.keeps_lines


def sets_from_config(dataset: DatasetConfig, bucket: BucketConfig, native_size: int) -> list[SetSpec]:
    """The sets that a config asks for: its folder and its prior folder, or those of its data-set config file.

    Raises DatasetError for a folder that does not exist, ConfigError for contradictory sizes or a bad config file.
    """
    if dataset.config_file:
        from .dataset_file import read_dataset_file

        return read_dataset_file(dataset.config_file, dataset, bucket, native_size)
    own = base_spec(clean_folder(dataset.path), dataset, bucket, native_size)
    if not dataset.prior_path:
        return [own]
    prior = base_spec(
        clean_folder(dataset.prior_path),
        dataset,
        bucket,
        native_size,
        prefix="prior:",
        is_prior=True,
        loss_weight=dataset.prior_loss_weight,
        metadata_file=None,
    )
    return [own, prior]


def base_spec(
    folder: Path, dataset: DatasetConfig, bucket: BucketConfig, native_size: int, **changes: object
) -> SetSpec:
    """A set in `folder` with the run's settings, apart from `changes` (fields of SetSpec)."""
    fields: dict[str, object] = {
        "folder": folder,
        "repeats": dataset.repeats,
        "recursive": dataset.recursive,
        "default_caption": dataset.default_caption,
        "caption_extensions": tuple(dataset.caption_extensions),
        "caption_encoding": dataset.caption_encoding,
        "max_token_length": dataset.max_token_length,
        "rules": CaptionRules.from_config(dataset),
        "limits": resolve_limits(dataset.resolution, bucket, native_size),
        "max_ratio": bucket.max_aspect_ratio,
        "crop_values": bucket.crop_values,
        "flip": dataset.flip,
        "background": parse_background(dataset.background),
        "interpolation": dataset.interpolation,
        "mask": dataset.mask,
        "metadata_file": dataset.metadata_file,
    }
    return SetSpec(**{**fields, **changes})  # type: ignore[arg-type]
