"""Configuration as frozen data: one dataclass a section, gathered in `TrainConfig`.

A config is plain data (numbers, strings, tuples, paths as strings), JSON both ways. Every field carries its help text,
range and unit, from which command-line flags, node widgets and tables are made. Reading and checking live in
`config_io.py` and `config_rules.py`; a config never changes after it was checked.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass

from .config_freezing import FreezingConfig as FreezingConfig
from .config_hardware import HardwareConfig as HardwareConfig
from .config_health import HealthConfig as HealthConfig
from .config_memory import MemoryConfig as MemoryConfig
from .config_option import STEPS_OR_SHARE as STEPS_OR_SHARE
from .config_option import option
from .config_safety import GradientConfig as GradientConfig
from .config_safety import PrecisionConfig as PrecisionConfig
from .config_safety import SafetyConfig as SafetyConfig
from .config_training import ObjectiveConfig as ObjectiveConfig
from .config_training import OptimizerConfig as OptimizerConfig
from .config_training import ScheduleConfig as ScheduleConfig

FORMAT_VERSION = 1

PARTS = ("unet", "te1", "te2")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    path: str = option("", "base model: an SDXL .safetensors file, a diffusers folder, or the word 'toy'")
    vae: str | None = option(None, "another VAE: a file or folder")
    config_dir: str | None = option(
        None, "folder with config JSONs and tokenizers that override the detected ones", advanced=True
    )
    prediction_type: str = option("auto", "what the model predicts", choices=("auto", "epsilon", "v"))
    zero_terminal_snr: str = option(
        "auto", "whether the noise schedule ends in pure noise", choices=("auto", "true", "false"), advanced=True
    )


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    rank: int = option(16, "rank of every adapter", min=1, max=1024)
    alpha: float | None = option(None, "scale = alpha / rank; unset means rank / 2", min=0.0)
    unet_rank: int | None = option(
        None, "rank in the UNet; unset = rank, 0 = not trained", min=0, max=1024, advanced=True
    )
    te1_rank: int | None = option(
        None, "rank in text encoder 1; unset = rank, 0 = not trained", min=0, max=1024, advanced=True
    )
    te2_rank: int | None = option(
        None, "rank in text encoder 2; unset = rank, 0 = not trained", min=0, max=1024, advanced=True
    )
    unet_alpha: float | None = option(
        None, "alpha in the UNet; unset = the same share of the rank", min=0.0, advanced=True
    )
    te1_alpha: float | None = option(None, "alpha in text encoder 1", min=0.0, advanced=True)
    te2_alpha: float | None = option(None, "alpha in text encoder 2", min=0.0, advanced=True)
    conv_rank: int = option(
        0, "rank for the 3x3 convolutions of the UNet; 0 = linear and 1x1 layers only", min=0, max=1024
    )
    conv_alpha: float | None = option(
        None, "alpha for the 3x3 convolutions; unset = the same share of the rank", min=0.0, advanced=True
    )
    dropout: float = option(0.0, "neuron dropout after lora_down", min=0.0, max=0.99)
    rank_dropout: float = option(0.0, "dropout of whole ranks", min=0.0, max=0.99, advanced=True)
    module_dropout: float = option(0.0, "dropout of whole modules", min=0.0, max=0.99, advanced=True)
    max_norm: float = option(
        0.0, "scale an adapter down when its weight norm passes this; 0 = off", min=0.0, advanced=True
    )
    weights: str | None = option(None, "LoRA file to start from (warm start)")
    network: str = option(
        "native",
        "our own LoRA, 'peft:dora' (or loha, lokr, oft, lora), or a kohya network module such as 'lycoris.kohya'",
        advanced=True,
    )
    network_args: tuple[str, ...] = option(
        (), "arguments of a kohya network module or of PEFT, as key=value", advanced=True
    )
    sd_scripts_path: str | None = option(
        None, "sd-scripts checkout that 'networks.*' comes from; unset = SD_SCRIPTS_PATH", advanced=True
    )
    preset: str = option(
        "default",
        "which layers get adapters",
        choices=(
            "default",
            "full",
            "attention",
            "attention_mlp",
            "style_blocks",
            "subject_blocks",
            "b_lora",
            "text_encoders",
        ),
    )
    targets: tuple[str, ...] = option(
        (), "rules such as 'IN07-IN08 cross rank=32 alpha=16 lr=0.5'; rank=0 leaves layers out", advanced=True
    )
    init: str = option(
        "default",
        "first weights: random down and zero up, or the base weight's principal part (PiSSA; the file has twice the rank)",
        choices=("default", "pissa"),
        advanced=True,
    )
    clamp: float = option(
        0.0, "limit of an adapter's output while training, 0 = off; files cannot hold it", min=0.0, advanced=True
    )
    rs_lora: bool = option(False, "scale by alpha / sqrt(rank) instead of alpha / rank (rsLoRA)", advanced=True)
    block_dims: str = option("", "kohya's ranks of the 23 UNet blocks, with commas", advanced=True)
    block_alphas: str = option("", "kohya's alphas of the 23 UNet blocks", advanced=True)
    conv_block_dims: str = option("", "kohya's ranks of the 3x3 convolutions by block", advanced=True)
    conv_block_alphas: str = option("", "kohya's alphas of the 3x3 convolutions by block", advanced=True)
    down_lr_weight: str = option(
        "", "kohya's rate factors of the 9 input blocks, or cosine, sine, linear, reverse_linear, zeros", advanced=True
    )
    mid_lr_weight: str = option("", "kohya's rate factors of the 3 middle blocks", advanced=True)
    up_lr_weight: str = option("", "kohya's rate factors of the 9 output blocks, or a named curve", advanced=True)
    block_lr_zero_threshold: float = option(
        0.0, "blocks whose rate factor is not above this get no adapters", min=0.0, advanced=True
    )


@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    path: str = option("", "folder of pictures with caption files, or of kohya 'N_name' folders")
    prior_path: str | None = option(None, "folder of prior (regularisation) pictures")
    prior_loss_weight: float = option(1.0, "loss weight of prior pictures", min=0.0, max=100.0)
    resolution: tuple[int, int] | None = option(
        None, "training size (width, height); unset = the model's own", unit="px"
    )
    batch_size: int = option(1, "pictures in one micro-batch", min=1, max=1024)
    repeats: int = option(1, "times every picture is seen in an epoch", min=1, max=100000)
    recursive: bool = option(False, "also look into sub-folders")
    caption_extensions: tuple[str, ...] = option(
        (".txt", ".caption"), "endings of caption files; a set uses the first that it has"
    )
    default_caption: str = option("", "caption of pictures that have none")
    caption_prefix: str = option("", "text before every caption")
    caption_suffix: str = option("", "text after every caption")
    caption_encoding: str | None = option(
        None, "encoding of caption files without a byte-order mark; unset = UTF-8", advanced=True
    )
    shuffle_caption: bool = option(False, "shuffle the tags of a caption")
    keep_tokens: int = option(0, "tags at the front that stay in place", min=0)
    caption_separator: str = option(",", "what separates tags", advanced=True)
    caption_dropout: float = option(0.0, "share of samples trained with an empty caption", min=0.0, max=1.0)
    tag_dropout: float = option(0.0, "share of tags left out", min=0.0, max=1.0, advanced=True)
    max_token_length: int = option(75, "longest caption the text encoders see", choices=(75, 150, 225), unit="tokens")
    weighted_captions: bool = option(
        False, "brackets in captions are weights: (word), [word], (word:1.2); else plain text", advanced=True
    )
    flip: bool = option(False, "mirror half of the samples")
    background: str = option("white", "colour laid under transparent pictures")
    strict: bool = option(False, "refuse the whole set when one picture is bad")
    cache_dir: str | None = option(
        None, "folder of the latent and text caches; unset = in the output folder", advanced=True
    )
    cache_text: str = option(
        "auto",
        "cache text-encoder outputs; auto = when no text encoder is trained",
        choices=("auto", "true", "false"),
        advanced=True,
    )
    caption_dropout_every_n_epochs: int = option(
        0, "every n-th epoch is trained with empty captions; 0 = off", min=0, advanced=True
    )
    wildcards: bool = option(False, "train one line of a caption file, with one word of each {a|b|c}", advanced=True)
    keep_tokens_separator: str = option("", "mark between tags that stay and tags that move, e.g. |||", advanced=True)
    secondary_separator: str = option("", "separator inside groups of tags that stay together", advanced=True)
    token_warmup_min: int = option(1, "tags used at the start of a token warm-up", min=0, advanced=True)
    token_warmup_step: float = option(
        0.0, "applied steps until all tags are used; below 1 = share of the run, 0 = off", min=0.0, advanced=True
    )
    config_file: str | None = option(
        None, "TOML or JSON file that describes several data sets with sd-scripts' keys; replaces path and prior_path"
    )
    metadata_file: str | None = option(
        None, "file with the captions of many pictures; unset = metadata.jsonl or .json in the folder", advanced=True
    )
    mask: str | None = option(
        None, "loss masks: 'alpha', or a folder with a mask of the same name for each picture", advanced=True
    )
    kohya_cache: str = option(
        "off",
        "sd-scripts' .npz latents beside the pictures: use valid ones, or write them too",
        choices=("off", "read", "write"),
        advanced=True,
    )
    verify: bool = option(False, "read every picture again instead of trusting its size and time stamps", advanced=True)
    compat: str = option(
        "none",
        "whose caption rules and prior balance to follow to the letter",
        choices=("none", "kohya"),
        advanced=True,
    )
    interpolation: str = option(
        "lanczos",
        "how pictures are scaled",
        choices=("lanczos", "bicubic", "bilinear", "box", "hamming", "nearest"),
        advanced=True,
    )
    workers: int | None = option(
        None,
        "processes that decode pictures while latents are cached; unset = measured on the first ones, 0 = none",
        min=0,
        max=64,
        advanced=True,
    )


@dataclass(frozen=True, kw_only=True)
class BucketConfig:
    enabled: bool = option(True, "group pictures by aspect ratio instead of cropping all to one size")
    min_size: int | None = option(None, "shortest bucket side; unset = a quarter of the model's size", min=8, unit="px")
    max_size: int | None = option(None, "longest bucket side; unset = twice the model's size", min=8, unit="px")
    step: int | None = option(
        None, "bucket sides are multiples of this; unset = 64, or 8 for tiny models", min=8, unit="px"
    )
    upscale: bool = option(True, "allow small pictures to be enlarged")
    crop_values: str = option(
        "letterbox",
        "crop offsets told to the model: kohya's letterbox margins, or the pixels really cut",
        choices=("letterbox", "true"),
        advanced=True,
    )
    max_aspect_ratio: float = option(
        8.0, "pictures more extreme than this are left out, and named", min=1.0, advanced=True
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    every_steps: int = option(250, "steps between checkpoints; 0 = by minutes, at the end and on stop only", min=0)
    every_minutes: float = option(10.0, "minutes between checkpoints; 0 = by steps only", min=0.0)
    keep_last: int = option(3, "checkpoints kept", min=1)
    keep_best: bool = option(True, "save and keep the checkpoint of the lowest validation loss", advanced=True)
    milestone_every: int = option(
        0, "keep the first checkpoint at or after every multiple of this many steps; 0 = off", min=0, advanced=True
    )
    lora_every_steps: int = option(0, "steps between exported LoRA files; 0 = only at the end and on stop", min=0)
    save_precision: str = option("fp32", "number format of exported LoRA files", choices=("fp32", "fp16", "bf16"))
    save_format: str = option(
        "kohya",
        "a second copy beside kohya's file (which every tool reads), with diffusers', ComfyUI's or PEFT's names",
        choices=("kohya", "diffusers", "comfyui", "peft"),
        advanced=True,
    )


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    every_steps: int = option(0, "steps between validations; 0 = at start and end only", min=0)
    split: float = option(0.1, "share of the pictures held out", min=0.0, max=0.9)
    max_pictures: int = option(16, "pictures of the validation set at most", min=1, max=10000)
    bands: int = option(4, "fixed noise levels a picture, spread over the whole range", min=1, max=64)
    enabled: bool = option(True, "measure a stable validation loss")


@dataclass(frozen=True, kw_only=True)
class PreviewConfig:
    prompts: tuple[str, ...] = option((), "prompts with kohya's flags (--n --w --h --s --l --d --ss)")
    prompt_file: str | None = option(None, "text file with one prompt a line")
    every_steps: int = option(0, "steps between previews; 0 = at start and end only", min=0)
    at_start: bool = option(True, "also make previews before the first step")
    sampler: str = option("euler", "sampler", choices=("euler", "euler_a", "dpmpp_2m", "ddim"))
    steps: int = option(25, "sampling steps", min=1, max=1000)
    guidance: float = option(6.0, "classifier-free guidance scale", min=0.0, max=100.0)
    width: int | None = option(None, "width; unset = the model's own", min=8, unit="px")
    height: int | None = option(None, "height; unset = the model's own", min=8, unit="px")
    negative: str = option("", "negative prompt")
    seed: int = option(0, "seed of the first preview", min=0, max=2**63 - 1)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    output_dir: str = option("output", "folder for results")
    output_name: str = option("lora", "name of the LoRA file")
    max_train_steps: int | None = option(None, "steps of the run; unset = max_train_epochs", min=1)
    max_train_epochs: int | None = option(None, "epochs of the run, when max_train_steps is unset", min=1)
    seed: int | None = option(None, "seed of all draws; unset = drawn once, printed and stored", min=0, max=2**63 - 1)
    device: str = option("auto", "auto, cpu, cuda, cuda:1, mps")
    process_timeout: float = option(
        10.0, "minutes that a process waits for another's answer or sign of life", min=0.01, advanced=True
    )
    drill: str = option(
        "",
        "put this fault into the run on purpose, to see what is noticed (names: safe-scaler drill --list); with the "
        "built-in toy only",
        advanced=True,
    )


@dataclass(frozen=True, kw_only=True)
class MetadataConfig:
    title: str = option("", "title in the LoRA file", advanced=True)
    author: str = option("", "author in the LoRA file", advanced=True)
    description: str = option("", "description in the LoRA file", advanced=True)
    license: str = option("", "licence in the LoRA file", advanced=True)
    tags: str = option("", "tags in the LoRA file", advanced=True)
    trigger_phrase: str = option("", "trigger words in the LoRA file", advanced=True)
    comment: str = option("", "comment in the LoRA file", advanced=True)
    minimal: bool = option(False, "write no captions, folder names or data-set statistics into the LoRA file")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The whole config of a run; sections are `[model] [lora] ...` in TOML."""

    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    bucket: BucketConfig = field(default_factory=BucketConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    gradient: GradientConfig = field(default_factory=GradientConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    safety: SafetyConfig = field(default_factory=SafetyConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    freezing: FreezingConfig = field(default_factory=FreezingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    preview: PreviewConfig = field(default_factory=PreviewConfig)
    run: RunConfig = field(default_factory=RunConfig)
    metadata: MetadataConfig = field(default_factory=MetadataConfig)


SECTIONS: dict[str, type] = {
    f.name: f.default_factory
    for f in fields(TrainConfig)
    if is_dataclass(f.default_factory)  # type: ignore[misc]
}


def part_rate(optimizer: OptimizerConfig, part: str) -> float:
    """Learning rate of `part` ("unet", "te1", "te2"): its own, or `learning_rate` when unset. 0 = not trained."""
    own = getattr(optimizer, f"{part}_lr")
    return optimizer.learning_rate if own is None else own


def part_rank(lora: LoraConfig, part: str) -> int:
    """Rank of `part`: its own, or `rank` when unset. 0 = not trained."""
    own = getattr(lora, f"{part}_rank")
    return lora.rank if own is None else own


def part_alpha(lora: LoraConfig, part: str) -> float:
    """Alpha of `part`: its own, else the same share of its rank as `alpha` is of `rank` (default one half)."""
    own = getattr(lora, f"{part}_alpha")
    return part_rank(lora, part) * alpha_share(lora) if own is None else own


def alpha_share(lora: LoraConfig) -> float:
    """alpha / rank of the run; one half unless set."""
    return 0.5 if lora.alpha is None else lora.alpha / lora.rank


def trained_parts(config: TrainConfig) -> tuple[str, ...]:
    """The parts that are trained: learning rate and rank both above 0."""
    return tuple(part for part in PARTS if part_rate(config.optimizer, part) > 0 and part_rank(config.lora, part) > 0)
