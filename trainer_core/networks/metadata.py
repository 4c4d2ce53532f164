"""Metadata of exported LoRA files: `ss_*` as sd-scripts writes them and `modelspec.*` (kohya.md 2.5).

All values are `str(python value)`, dictionaries and lists are JSON. `ss_base_model_version` must say "sdxl_base_v1-0":
without it A1111 and Forge take the file for SD 1.x and hide it (kohya.md 2.7).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ..config import TrainConfig, alpha_share, part_alpha, part_rank, part_rate
from ..config_optimizers import describe as describe_optimizer

NETWORK_MODULE = "networks.lora"
"""The module of sd-scripts whose format the file has."""

BASE_MODEL_VERSION = "sdxl_base_v1-0"
ARCHITECTURE = "stable-diffusion-xl-v1-base/lora"
IMPLEMENTATION = "https://github.com/Stability-AI/generative-models"
MODELSPEC_VERSION = "1.0.1"

_MINIMAL = (
    "ss_v2",
    "ss_base_model_version",
    "ss_network_module",
    "ss_network_dim",
    "ss_network_alpha",
    "ss_network_args",
)
"""What stays with `[metadata] minimal`, besides modelspec and hashes (sd-scripts' `--no_metadata`)."""


_NETWORK_ARGUMENTS = (
    "rank_dropout",
    "module_dropout",
    "rs_lora",
    "block_dims",
    "block_alphas",
    "conv_block_dims",
    "conv_block_alphas",
    "down_lr_weight",
    "mid_lr_weight",
    "up_lr_weight",
)


@dataclass(frozen=True, kw_only=True)
class FolderFacts:
    """One picture folder: repeats and pictures (not multiplied by the repeats)."""

    repeats: int
    pictures: int


@dataclass(frozen=True, kw_only=True)
class TrainingFacts:
    """What the config does not say. Times are Unix seconds; folders are named by their last path part."""

    run_id: str
    started_at: float
    finished_at: float
    step: int
    epoch: int
    max_train_steps: int
    epochs: int
    batches_per_epoch: int
    output_name: str
    parts: Sequence[str]
    prediction_type: str = "epsilon"
    resolution: tuple[int, int] = (1024, 1024)
    compute: str = "no"
    clip_skip: int | None = None
    model_hashes: tuple[str, str] | None = None
    folders: Mapping[str, FolderFacts] = field(default_factory=dict)
    prior_folders: Mapping[str, FolderFacts] = field(default_factory=dict)
    validation_pictures: int = 0
    tag_frequency: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    buckets: Sequence[tuple[tuple[int, int], int]] = ()
    mean_aspect_error: float = 0.0
    dataset_hash: str | None = None
    health: Mapping[str, Any] | None = None
    workflow: str | None = None
    version: str = ""


def build_metadata(config: TrainConfig, facts: TrainingFacts) -> dict[str, str]:
    """Everything but the hashes, which depend on the tensors and are added when the file is written."""
    values = {**_run(config, facts), **_network(config), **_optimizer(config, facts), **_objective(config)}
    values |= _captions(config) | _dataset(config, facts) | _own(facts)
    metadata = {key: value if isinstance(value, str) else str(value) for key, value in values.items()}
    if config.metadata.minimal:
        metadata = {key: value for key, value in metadata.items() if key in _MINIMAL}
    return dict(sorted((metadata | modelspec(config, facts)).items()))


def session_id(run_id: str) -> int:
    """A number in the range of sd-scripts' random one, but derived from the run, so that a re-run writes the same."""
    return int.from_bytes(hashlib.blake2b(run_id.encode("utf-8"), digest_size=4).digest(), "big")


def tag_frequency(captions: Sequence[str]) -> dict[str, int]:
    """How often each tag occurs: captions split at commas, stripped, lower case, a picture counted once."""
    counts: dict[str, int] = {}
    for caption in captions:
        for tag in (part.strip().lower() for part in caption.split(",")):
            if tag:
                counts[tag] = counts.get(tag, 0) + 1
    return counts


def model_file_hashes(path: str | Path) -> tuple[str, str]:
    """(old A1111 hash, SHA-256) of a base model file; sd-scripts' words for a folder or a missing file.

    Reads the whole file: about ten seconds for 7 GB from a fast disk.
    """
    file = Path(path)
    if file.is_dir():
        return "IsADirectory", "IsADirectory"
    if not file.is_file():
        return "NOFILE", "NOFILE"
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        stream.seek(0x100000)
        old = hashlib.sha256(stream.read(0x10000)).hexdigest()[:8]
        stream.seek(0)
        while chunk := stream.read(1 << 22):
            digest.update(chunk)
    return old, digest.hexdigest()


def modelspec(config: TrainConfig, facts: TrainingFacts) -> dict[str, str]:
    """Stability's model spec fields (https://github.com/Stability-AI/ModelSpec)."""
    given = config.metadata
    width, height = facts.resolution
    date = datetime.fromtimestamp(int(facts.finished_at), tz=timezone.utc).isoformat()
    spec = {
        "sai_model_spec": MODELSPEC_VERSION,
        "architecture": ARCHITECTURE,
        "implementation": IMPLEMENTATION,
        "title": given.title or facts.output_name or f"LoRA@{date}",
        "resolution": f"{width}x{height}",
        "date": date,
        "prediction_type": "v" if facts.prediction_type == "v" else "epsilon",
        "author": given.author,
        "description": given.description,
        "license": given.license,
        "tags": given.tags,
        "trigger_phrase": given.trigger_phrase,
        "implementation_version": f"safe-scaler/{facts.version}" if facts.version else "",
    }
    if (config.objective.min_timestep, config.objective.max_timestep) != (0, 1000):
        spec["timestep_range"] = f"{config.objective.min_timestep},{config.objective.max_timestep}"
    return {f"modelspec.{key}": value for key, value in spec.items() if value}


def _run(config: TrainConfig, facts: TrainingFacts) -> dict[str, Any]:
    model = Path(config.model.path)
    values: dict[str, Any] = {
        "ss_session_id": session_id(facts.run_id),
        "ss_training_started_at": facts.started_at,
        "ss_training_finished_at": facts.finished_at,
        "ss_output_name": facts.output_name,
        "ss_training_comment": config.metadata.comment or None,
        "ss_seed": config.run.seed,
        "ss_steps": facts.step,
        "ss_epoch": facts.epoch,
        "ss_sd_model_name": model.name,
        "ss_v2": False,
        "ss_base_model_version": BASE_MODEL_VERSION,
        "ss_max_train_steps": facts.max_train_steps,
        "ss_num_epochs": facts.epochs,
        "ss_num_batches_per_epoch": facts.batches_per_epoch,
    }
    if facts.model_hashes is not None:
        values["ss_sd_model_hash"], values["ss_new_sd_model_hash"] = facts.model_hashes
    if config.model.vae:
        values["ss_vae_name"] = Path(config.model.vae).name
    return values


def _network(config: TrainConfig) -> dict[str, Any]:
    lora = config.lora
    arguments: dict[str, Any] = {}
    if lora.conv_rank:
        arguments["conv_dim"] = str(lora.conv_rank)
        share = lora.conv_rank * alpha_share(lora) if lora.conv_alpha is None else lora.conv_alpha
        arguments["conv_alpha"] = str(share)
    arguments |= {key: str(value) for key in _NETWORK_ARGUMENTS if (value := getattr(lora, key))}
    arguments |= dict(text.split("=", 1) for text in lora.network_args if "=" in text)
    if lora.targets:
        arguments["targets"] = list(lora.targets)
    if lora.preset != "default":
        arguments["preset"] = lora.preset
    ranks = {part: part_rank(lora, part) for part in ("unet", "te1", "te2")}
    # sd-scripts knows one rank; where ours differ by part, the UNet's is the one people look for.
    main = "unet" if ranks["unet"] else next((part for part, rank in ranks.items() if rank), "unet")
    values: dict[str, Any] = {
        "ss_network_module": NETWORK_MODULE if lora.network == "native" else lora.network,
        "ss_network_dim": ranks[main],
        "ss_network_alpha": part_alpha(lora, main) * (ranks[main] ** 0.5 if lora.rs_lora else 1.0),
        "ss_network_dropout": lora.dropout or None,
        "ss_scale_weight_norms": lora.max_norm or None,
    }
    return values | ({"ss_network_args": json.dumps(arguments)} if arguments else {})


def _optimizer(config: TrainConfig, facts: TrainingFacts) -> dict[str, Any]:
    optimizer, schedule = config.optimizer, config.schedule
    te_rates = [part_rate(optimizer, part) for part in ("te1", "te2") if part in facts.parts]
    return {
        "ss_learning_rate": optimizer.learning_rate,
        "ss_unet_lr": part_rate(optimizer, "unet") if "unet" in facts.parts else None,
        "ss_text_encoder_lr": None if not te_rates else te_rates[0] if len(set(te_rates)) == 1 else te_rates,
        "ss_optimizer": describe_optimizer(optimizer),
        "ss_lr_scheduler": schedule.type,
        "ss_lr_warmup_steps": schedule.warmup_steps,
        "ss_max_grad_norm": config.gradient.max_norm,
        "ss_gradient_accumulation_steps": config.gradient.accumulation,
        "ss_gradient_checkpointing": config.precision.gradient_checkpointing,
        "ss_mixed_precision": "no" if facts.compute in ("fp32", "no") else facts.compute,
        "ss_full_fp16": False,
    }


def _objective(config: TrainConfig) -> dict[str, Any]:
    objective = config.objective
    return {
        "ss_noise_offset": objective.noise_offset or None,
        "ss_noise_offset_random_strength": objective.noise_offset_random_strength,
        "ss_adaptive_noise_scale": objective.adaptive_noise_scale or None,
        "ss_multires_noise_iterations": objective.multires_noise_iterations or None,
        "ss_multires_noise_discount": objective.multires_noise_discount,
        "ss_ip_noise_gamma": objective.ip_noise_gamma or None,
        "ss_ip_noise_gamma_random_strength": objective.ip_noise_gamma_random_strength,
        "ss_min_snr_gamma": objective.min_snr_gamma,
        "ss_zero_terminal_snr": config.model.zero_terminal_snr == "true",
        "ss_debiased_estimation": objective.debiased_estimation,
        "ss_loss_type": objective.loss,
        "ss_huber_schedule": objective.huber_schedule,
        "ss_huber_scale": objective.huber_scale,
        "ss_huber_c": objective.huber_c,
        "ss_prior_loss_weight": config.dataset.prior_loss_weight,
    }


def _captions(config: TrainConfig) -> dict[str, Any]:
    dataset = config.dataset
    return {
        "ss_caption_dropout_rate": dataset.caption_dropout,
        "ss_caption_tag_dropout_rate": dataset.tag_dropout,
        "ss_max_token_length": dataset.max_token_length if dataset.max_token_length != 75 else None,
        "ss_shuffle_caption": dataset.shuffle_caption,
        "ss_keep_tokens": dataset.keep_tokens,
        "ss_flip_aug": dataset.flip,
        "ss_color_aug": False,
        "ss_random_crop": False,
    }


def _dataset(config: TrainConfig, facts: TrainingFacts) -> dict[str, Any]:
    buckets = {str(i): {"resolution": list(size), "count": count} for i, (size, count) in enumerate(facts.buckets)}
    return {
        "ss_num_train_images": sum(folder.pictures * folder.repeats for folder in facts.folders.values()),
        "ss_num_reg_images": sum(folder.pictures * folder.repeats for folder in facts.prior_folders.values()),
        "ss_num_validation_images": facts.validation_pictures,
        "ss_batch_size_per_device": config.dataset.batch_size,
        "ss_total_batch_size": config.dataset.batch_size,
        "ss_resolution": str(facts.resolution),
        "ss_clip_skip": facts.clip_skip,
        "ss_enable_bucket": config.bucket.enabled,
        "ss_bucket_no_upscale": not config.bucket.upscale,
        "ss_min_bucket_reso": config.bucket.min_size,
        "ss_max_bucket_reso": config.bucket.max_size,
        "ss_dataset_dirs": _json(_folders(facts.folders)),
        "ss_reg_dataset_dirs": _json(_folders(facts.prior_folders)),
        "ss_tag_frequency": _json({name: dict(counts) for name, counts in facts.tag_frequency.items()}),
        "ss_bucket_info": _json({"buckets": buckets, "mean_img_ar_error": facts.mean_aspect_error}),
    }


def _own(facts: TrainingFacts) -> dict[str, Any]:
    """What no other trainer writes: which run and pictures the file comes from and how healthy the training was."""
    values = {
        "safe_scaler_run_id": facts.run_id,
        "safe_scaler_dataset_hash": facts.dataset_hash,
        "safe_scaler_health": _json(facts.health) if facts.health is not None else None,
        "workflow": facts.workflow,
    }
    return {key: value for key, value in values.items() if value is not None}


def _folders(folders: Mapping[str, FolderFacts]) -> dict[str, dict[str, int]]:
    return {name: {"n_repeats": facts.repeats, "img_count": facts.pictures} for name, facts in folders.items()}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
