"""The alias table: what sd-scripts and diffusers users type, and the setting of ours that it means.

Names and defaults of sd-scripts: its argument parser, snapshot of 2026-02-16 (the 197 names are test data). Names of
diffusers: its SDXL LoRA example scripts. Options that have no meaning here are in `options_refused.py`.
"""

from __future__ import annotations

from typing import Any

from .config_fields import BadValue
from .options_kinds import (
    Option,
    Rule,
    Settings,
    arguments,
    choice,
    nothing,
    sets,
    share_or_steps,
    switch,
    to,
    to_text,
    truth,
    words,
)

_KOHYA = "sd-scripts"
_DIFFUSERS = "diffusers"
_OURS = "safe-scaler"

_LATER = "is not in this version"


def _every_save(value: Any) -> Settings:
    """Both of these projects save what is needed to use *and* (with their state switch) to resume."""
    return {"checkpoint.every_steps": value, "checkpoint.lora_every_steps": value} if value not in (None, "") else {}


def _text_encoder_rates(value: Any) -> Settings:
    rates = words(value)
    if len(rates) > 2:
        raise BadValue(f"has {len(rates)} rates, SDXL has two text encoders", "Give one rate, or one for each encoder.")
    try:
        numbers = [float(rate) for rate in rates]
    except ValueError:
        raise BadValue("is no learning rate", "Write one rate, such as 5e-5, or two.") from None
    return {"optimizer.te1_lr": numbers[0], "optimizer.te2_lr": numbers[-1]} if numbers else {}


def _prompts(value: Any) -> Settings:
    if value is None or value == "":
        return {}
    return {"preview.prompts": [value] if isinstance(value, str) else list(value)}


def _sample_prompts(value: Any) -> Settings:
    if str(value).lower().endswith((".toml", ".json")):
        raise BadValue("prompt files are read as text here", "Write one prompt a line into a .txt file.")
    return to("preview.prompt_file")(value)


def _zero_terminal(value: Any) -> Settings:
    return {"model.zero_terminal_snr": "true"} if truth(value) else {}


def _extensions(value: Any) -> Settings:
    return {"dataset.caption_extensions": [str(value)]} if value else {}


_UNET_ONLY = sets({"optimizer.te1_lr": 0.0, "optimizer.te2_lr": 0.0})
_TEXT_ENCODERS = {"optimizer.te1_lr": None, "optimizer.te2_lr": None}

_NETWORK_ARGS: dict[str, Rule] = {
    "conv_dim": to("lora.conv_rank"),
    "conv_alpha": to("lora.conv_alpha"),
    "rank_dropout": to("lora.rank_dropout"),
    "module_dropout": to("lora.module_dropout"),
    "loraplus_lr_ratio": to("optimizer.loraplus_ratio"),
    "loraplus_unet_lr_ratio": to("optimizer.loraplus_unet_ratio"),
    "loraplus_text_encoder_lr_ratio": to("optimizer.loraplus_te_ratio"),
}
_NETWORK_ARGS_REFUSED = {
    "dropout": "is ignored by sd-scripts; use --network_dropout",
    **dict.fromkeys(
        ("block_dims", "block_alphas", "conv_block_dims", "conv_block_alphas"), _LATER + "; use --network_dim"
    ),
    **dict.fromkeys(
        ("down_lr_weight", "mid_lr_weight", "up_lr_weight", "block_lr_zero_threshold"), _LATER + "; use --unet_lr"
    ),
    **dict.fromkeys(("algo", "preset"), "belongs to LyCORIS, which " + _LATER + "; plain LoRA is trained"),
}
_SCHEDULES = {
    "": None,
    "constant_with_warmup": "constant",
    **{
        name: name
        for name in (
            "constant",
            "linear",
            "cosine",
            "cosine_with_restarts",
            "polynomial",
            "inverse_sqrt",
            "cosine_with_min_lr",
            "warmup_stable_decay",
            "piecewise_constant",
        )
    },
}
_SAMPLERS = {
    "ddim": "ddim",
    "euler": "euler",
    "k_euler": "euler",
    "euler_a": "euler_a",
    "k_euler_a": "euler_a",
    "dpmsolver++": "dpmpp_2m",
    "dpmpp_2m": "dpmpp_2m",
}
_INTERPOLATION = choice(
    "dataset.interpolation",
    {
        "": None,
        "none": None,
        "lanczos": "lanczos",
        "bicubic": "bicubic",
        "cubic": "bicubic",
        "bilinear": "bilinear",
        "linear": "bilinear",
        "area": "box",
        "box": "box",
        "hamming": "hamming",
        "nearest": "nearest",
    },
    "this way of scaling pictures is not known",
)


def _schedule(value: Any) -> Settings:
    """Their polynomial ends at the rate 1e-7."""
    settings = choice("schedule.type", _SCHEDULES, "there is no such schedule")(value)
    return {**settings, "schedule.end_lr": 1e-7} if "polynomial" in settings.values() else settings


def _step_rules(value: Any) -> Settings:
    return {"schedule.step_rules": str(value).strip().strip("\"'")}


def _optimizer(value: Any) -> Settings:
    """sd-scripts' names in any case; a dotted class stays as it is. Whether it exists is checked with the config."""
    typed = "" if value is None else str(value).strip()
    return {} if not typed else {"optimizer.type": typed if "." in typed else typed.lower()}


def _optimizer_args(value: Any) -> Settings:
    return {"optimizer.args": typed} if (typed := words(value)) else {}


#: (name, takes, rule, source, note) of everything that is understood.
_ROWS: tuple[tuple[str, str, Rule, str, str], ...] = (
    # model
    ("pretrained_model_name_or_path", "value", to("model.path"), _KOHYA, ""),
    ("vae", "value", to("model.vae"), _KOHYA, ""),
    ("pretrained_vae_model_name_or_path", "value", to("model.vae"), _DIFFUSERS, ""),
    ("v_parameterization", "flag", sets({"model.prediction_type": "v"}), _KOHYA, ""),
    (
        "prediction_type",
        "value",
        choice(
            "model.prediction_type",
            {"": None, "none": None, "auto": "auto", "epsilon": "epsilon", "v_prediction": "v", "v": "v"},
            "this prediction type is not known for SDXL",
        ),
        _DIFFUSERS,
        "",
    ),
    ("zero_terminal_snr", "flag", _zero_terminal, _KOHYA, ""),
    ("tokenizer_cache_dir", "value", nothing, _KOHYA, "the tokenizers are part of this package"),
    ("no_half_vae", "flag", nothing, _KOHYA, "the VAE always runs in fp32 here"),
    ("clip_skip", "value", nothing, _KOHYA, "SDXL always takes the last but one layer; sd-scripts ignores this too"),
    # network
    ("network_dim", "value", to("lora.rank"), _KOHYA, ""),
    ("lora_rank", "value", to("lora.rank"), _DIFFUSERS, ""),
    ("rank", "value", to("lora.rank"), _DIFFUSERS, ""),
    ("network_alpha", "value", to("lora.alpha"), _KOHYA, ""),
    ("lora_alpha", "value", to("lora.alpha"), _DIFFUSERS, ""),
    ("network_dropout", "value", to("lora.dropout"), _KOHYA, ""),
    ("lora_dropout", "value", to("lora.dropout"), _DIFFUSERS, "dropout acts after lora_down here, PEFT's acts before it"),
    ("network_weights", "value", to("lora.weights"), _KOHYA, ""),
    ("scale_weight_norms", "value", to("lora.max_norm"), _KOHYA, ""),
    (
        "network_module",
        "value",
        choice("", {"": None, "networks.lora": None}, "this network module is not in this version; networks.lora is"),
        _KOHYA,
        "",
    ),
    ("network_args", "many", arguments("network_args", _NETWORK_ARGS, _NETWORK_ARGS_REFUSED), _KOHYA, ""),
    ("network_train_unet_only", "flag", _UNET_ONLY, _KOHYA, ""),
    ("network_train_text_encoder_only", "flag", sets({"optimizer.unet_lr": 0.0}), _KOHYA, ""),
    ("train_text_encoder", "flag", nothing, _DIFFUSERS, ""),
    # data set
    ("train_data_dir", "value", to("dataset.path"), _KOHYA, ""),
    ("instance_data_dir", "value", to("dataset.path"), _DIFFUSERS, ""),
    ("instance_prompt", "value", to("dataset.default_caption"), _DIFFUSERS, ""),
    ("reg_data_dir", "value", to("dataset.prior_path"), _KOHYA, ""),
    ("dataset_config", "value", to("dataset.config_file"), _KOHYA, ""),
    ("in_json", "value", to("dataset.metadata_file"), _KOHYA, ""),
    ("alpha_mask", "flag", sets({"dataset.mask": "alpha"}), _KOHYA, ""),
    ("conditioning_data_dir", "value", to("dataset.mask"), _KOHYA, ""),
    ("masked_loss", "flag", nothing, _KOHYA, "masks are used whenever there are some"),
    ("class_data_dir", "value", to("dataset.prior_path"), _DIFFUSERS, ""),
    ("with_prior_preservation", "flag", nothing, _DIFFUSERS, "prior pictures are used whenever a folder of them is given"),
    ("prior_loss_weight", "value", to("dataset.prior_loss_weight"), _KOHYA, ""),
    ("resolution", "value", to("dataset.resolution"), _KOHYA, ""),
    ("train_batch_size", "value", to("dataset.batch_size"), _KOHYA, ""),
    ("dataset_repeats", "value", to("dataset.repeats"), _KOHYA, ""),
    ("center_crop", "flag", nothing, _DIFFUSERS, "pictures are always cropped around their centre"),
    ("flip_aug", "flag", switch("dataset.flip"), _KOHYA, ""),
    ("random_flip", "flag", switch("dataset.flip"), _DIFFUSERS, ""),
    ("caption_extension", "value", _extensions, _KOHYA, ""),
    ("caption_extention", "value", _extensions, _KOHYA, ""),
    ("caption_separator", "value", to("dataset.caption_separator"), _KOHYA, ""),
    ("caption_prefix", "value", to_text("dataset.caption_prefix"), _KOHYA, ""),
    ("caption_suffix", "value", to_text("dataset.caption_suffix"), _KOHYA, ""),
    ("weighted_captions", "flag", switch("dataset.weighted_captions"), _KOHYA, ""),
    ("enable_wildcard", "flag", switch("dataset.wildcards"), _KOHYA, ""),
    ("resize_interpolation", "value", _INTERPOLATION, _KOHYA, ""),
    ("image_interpolation_mode", "value", _INTERPOLATION, _DIFFUSERS, ""),
    ("caption_dropout_rate", "value", to("dataset.caption_dropout"), _KOHYA, ""),
    ("proportion_empty_prompts", "value", to("dataset.caption_dropout"), _DIFFUSERS, ""),
    ("caption_tag_dropout_rate", "value", to("dataset.tag_dropout"), _KOHYA, ""),
    ("max_token_length", "value", to("dataset.max_token_length"), _KOHYA, ""),
    ("cache_info", "flag", nothing, _KOHYA, "captions and sizes are read anew at every start"),
    ("cache_latents", "flag", nothing, _KOHYA, "latents are always cached, by content"),
    ("cache_latents_to_disk", "flag", nothing, _KOHYA, "latents are always cached on disk, by content"),
    ("skip_cache_check", "flag", nothing, _KOHYA, "caches are found by content, a stale one cannot be used"),
    ("cache_text_encoder_outputs", "flag", sets({"dataset.cache_text": "true"}), _KOHYA, ""),
    ("cache_text_encoder_outputs_to_disk", "flag", sets({"dataset.cache_text": "true"}), _KOHYA, ""),
    ("max_data_loader_n_workers", "value", to("dataset.workers"), _KOHYA, ""),
    ("dataloader_num_workers", "value", to("dataset.workers"), _DIFFUSERS, ""),
    ("persistent_data_loader_workers", "flag", nothing, _KOHYA, "decoding processes live as long as the caching does"),
    ("ddp_timeout", "value", to("run.process_timeout"), _KOHYA, ""),
    ("ddp_gradient_as_bucket_view", "flag", nothing, _KOHYA, "gradients are summed in one flat tensor"),
    ("ddp_static_graph", "flag", nothing, _KOHYA, "gradients are summed after the micro-batches"),
    ("local_rank", "value", nothing, _DIFFUSERS, "the launcher's environment says it"),
    ("enable_bucket", "flag", switch("bucket.enabled"), _KOHYA, ""),
    ("min_bucket_reso", "value", to("bucket.min_size"), _KOHYA, ""),
    ("max_bucket_reso", "value", to("bucket.max_size"), _KOHYA, ""),
    ("bucket_reso_steps", "value", to("bucket.step"), _KOHYA, ""),
    ("bucket_no_upscale", "flag", sets({"bucket.upscale": False}), _KOHYA, ""),
    # objective
    ("loss_type", "value", to("objective.loss"), _KOHYA, ""),
    ("min_snr_gamma", "value", to("objective.min_snr_gamma"), _KOHYA, ""),
    ("snr_gamma", "value", to("objective.min_snr_gamma"), _DIFFUSERS, ""),
    ("debiased_estimation_loss", "flag", switch("objective.debiased_estimation"), _KOHYA, ""),
    # optimizer and schedule
    ("optimizer_type", "value", _optimizer, _KOHYA, ""),
    ("optimizer", "value", _optimizer, _DIFFUSERS, ""),
    ("use_8bit_adam", "flag", sets({"optimizer.type": "adamw8bit"}), _KOHYA, ""),
    ("use_lion_optimizer", "flag", sets({"optimizer.type": "lion"}), _KOHYA, ""),
    ("optimizer_args", "many", _optimizer_args, _KOHYA, ""),
    ("learning_rate", "value", to("optimizer.learning_rate"), _KOHYA, ""),
    ("unet_lr", "value", to("optimizer.unet_lr"), _KOHYA, ""),
    ("text_encoder_lr", "many", _text_encoder_rates, _KOHYA, ""),
    ("adam_beta1", "value", to("optimizer.beta1"), _DIFFUSERS, ""),
    ("adam_beta2", "value", to("optimizer.beta2"), _DIFFUSERS, ""),
    ("adam_weight_decay", "value", to("optimizer.weight_decay"), _DIFFUSERS, ""),
    ("adam_epsilon", "value", to("optimizer.eps"), _DIFFUSERS, ""),
    ("lr_scheduler", "value", _schedule, _KOHYA, ""),
    (
        "lr_scheduler_args",
        "many",
        arguments("lr_scheduler_args", {"step_rules": _step_rules, "lr_end": to("schedule.end_lr")}, {}),
        _KOHYA,
        "",
    ),
    ("lr_warmup_steps", "value", share_or_steps("schedule.warmup_steps"), _KOHYA, ""),
    ("lr_decay_steps", "value", share_or_steps("schedule.decay_steps"), _KOHYA, ""),
    ("lr_scheduler_num_cycles", "value", to("schedule.cycles"), _KOHYA, ""),
    ("lr_scheduler_power", "value", to("schedule.power"), _KOHYA, ""),
    ("lr_power", "value", to("schedule.power"), _DIFFUSERS, ""),
    ("lr_scheduler_timescale", "value", to("schedule.timescale"), _KOHYA, ""),
    ("lr_num_cycles", "value", to("schedule.cycles"), _DIFFUSERS, ""),
    ("lr_scheduler_min_lr_ratio", "value", to("schedule.min_lr_ratio"), _KOHYA, ""),
    ("max_grad_norm", "value", to("gradient.max_norm"), _KOHYA, ""),
    ("gradient_accumulation_steps", "value", to("gradient.accumulation"), _KOHYA, ""),
    ("gradient_checkpointing", "flag", switch("precision.gradient_checkpointing"), _KOHYA, ""),
    ("torch_compile", "flag", sets({"hardware.compile": "inductor"}), _KOHYA, ""),
    (
        "mixed_precision",
        "value",
        choice(
            "precision.compute",
            {"": None, "none": None, "no": "fp32", "fp32": "fp32", "fp16": "fp16", "bf16": "bf16"},
            "this number format is not known",
        ),
        _KOHYA,
        "",
    ),
    *(
        (name, "flag", nothing, source, "torch's own memory-efficient attention is always used")
        for name, source in (
            ("xformers", _KOHYA),
            ("sdpa", _KOHYA),
            ("mem_eff_attn", _KOHYA),
            ("enable_xformers_memory_efficient_attention", _DIFFUSERS),
        )
    ),
    ("allow_tf32", "flag", nothing, _DIFFUSERS, "fp32 products stay exact; TF32 concerns fp32 only, use mixed_precision bf16"),
    ("lowram", "flag", nothing, _KOHYA, "weights go straight from the file to their device"),
    ("highvram", "flag", nothing, _KOHYA, "models stay on the device while they are needed"),
    # previews and validation
    ("validation_prompt", "value", _prompts, _DIFFUSERS, ""),
    ("num_validation_images", "value", to("cli.preview_count"), _DIFFUSERS, ""),
    ("validation_steps", "value", to("preview.every_steps"), _DIFFUSERS, ""),
    ("sample_prompts", "value", _sample_prompts, _KOHYA, ""),
    ("sample_every_n_steps", "value", to("preview.every_steps"), _KOHYA, ""),
    ("sample_at_first", "flag", switch("preview.at_start"), _KOHYA, ""),
    (
        "sample_sampler",
        "value",
        choice("preview.sampler", _SAMPLERS, "this sampler is not in this version"),
        _KOHYA,
        "",
    ),
    ("validation_split", "value", to("validation.split"), _KOHYA, ""),
    ("validate_every_n_steps", "value", to("validation.every_steps"), _KOHYA, ""),
    # run and files
    ("output_dir", "value", to("run.output_dir"), _KOHYA, ""),
    ("output_name", "value", to("run.output_name"), _KOHYA, ""),
    ("seed", "value", to("run.seed"), _KOHYA, ""),
    ("max_train_steps", "value", to("run.max_train_steps"), _KOHYA, ""),
    ("max_train_epochs", "value", to("run.max_train_epochs"), _KOHYA, ""),
    ("num_train_epochs", "value", to("run.max_train_epochs"), _DIFFUSERS, ""),
    ("save_steps", "value", _every_save, _DIFFUSERS, ""),
    ("checkpointing_steps", "value", _every_save, _DIFFUSERS, ""),
    ("save_every_n_steps", "value", _every_save, _KOHYA, ""),
    ("checkpoints_total_limit", "value", to("checkpoint.keep_last"), _DIFFUSERS, ""),
    ("save_state", "flag", nothing, _KOHYA, "a checkpoint to resume from is always written along"),
    ("save_state_on_train_end", "flag", nothing, _KOHYA, "a checkpoint to resume from is always written at the end"),
    (
        "save_precision",
        "value",
        choice(
            "checkpoint.save_precision",
            {"": None, "none": None, "float": "fp32", "fp32": "fp32", "fp16": "fp16", "bf16": "bf16"},
            "this number format is not known",
        ),
        _KOHYA,
        "",
    ),
    (
        "save_model_as",
        "value",
        choice("", {"": None, "none": None, "safetensors": None}, "only safetensors files are written: pickle files can run code"),
        _KOHYA,
        "",
    ),
    *((f"metadata_{name}", "value", to(f"metadata.{name}"), _KOHYA, "") for name in (
        "title", "author", "description", "license", "tags", "trigger_phrase",
    )),
    ("training_comment", "value", to("metadata.comment"), _KOHYA, ""),
    ("no_metadata", "flag", sets({"metadata.minimal": True}), _KOHYA, "only what loaders need is written (ranks, hashes)"),
    # the command line itself
    ("config_file", "value", to("cli.config_file"), _KOHYA, ""),
    ("config", "value", to("cli.config_file"), _OURS, ""),
    ("preset", "value", to("cli.preset"), _OURS, ""),
    ("supervise", "flag", switch("cli.supervise"), _OURS, ""),
    ("resume_from_checkpoint", "value", to("cli.resume"), _DIFFUSERS, ""),
    ("resume", "value", to("cli.resume"), _KOHYA, ""),
)  # fmt: skip

#: A switch that freezes a part wins over a rate that was typed along with it, an end of a schedule over the usual one.
_WEIGHTS = {"network_train_unet_only": 1, "network_train_text_encoder_only": 1, "lr_scheduler_args": 1}
#: "Train the text encoders" means their rates follow learning_rate, unless rates were typed.
_ALSO = {"network_train_text_encoder_only": _TEXT_ENCODERS, "train_text_encoder": _TEXT_ENCODERS}

UNDERSTOOD: dict[str, Option] = {
    name: Option(name, takes, rule, source, note, _WEIGHTS.get(name, 0), _ALSO.get(name, {}))
    for name, takes, rule, source, note in _ROWS
}
