"""Options of sd-scripts and diffusers that are refused: why, and what comes nearest.

A refused option passes without effect where its value asks for nothing (its default in sd-scripts, false, empty), so
that a config file written by a front end with every option in it can be read.
"""

from __future__ import annotations

from .options_kinds import Option, refuse

_NOT_YET = "is not in this version"
_NO_UPLOAD = "nothing is uploaded by this program"
_NO_TRACKER = "no outside tracker is fed by this version; curves and settings are in the run folder's report.html"
_ONE_PROCESS = "spreading the model itself over processes is not in this version"
_RESUME = "a run is resumed exactly where it stopped"
_EPOCHS = "cadence is counted in steps"

#: (name, takes, why, fix, values that ask for nothing)
_ROWS: tuple[tuple[str, str, str, str, tuple[str, ...]], ...] = (
    # model
    ("v2", "flag", "SD 2.x models are not trained here", "Use an SDXL model.", ()),
    ("disable_mmap_load_safetensors", "flag", "weights are always read through a memory map", "Leave it out.", ()),
    ("revision", "value", "models are read from disk", "Download the model and give its path.", ()),
    ("variant", "value", "models are read from disk", "Give the path of the folder or file you want.", ()),
    ("fp8_base", "flag", _NOT_YET, "Use --mixed_precision bf16 and --gradient_checkpointing.", ()),
    ("fp8_base_unet", "flag", _NOT_YET, "Use --mixed_precision bf16 and --gradient_checkpointing.", ()),
    ("full_fp16", "flag", "adapter weights stay in fp32", "Use --mixed_precision fp16.", ()),
    ("full_bf16", "flag", "adapter weights stay in fp32", "Use --mixed_precision bf16.", ()),
    ("dynamo_backend", "value", "other back ends are asked for by another name", "Use --hardware.compile BACKEND.", ("inductor", "no")),
    ("enable_npu_flash_attention", "flag", _NOT_YET, "Leave it out; torch's own attention is used.", ()),
    # network
    ("dim_from_weights", "flag", _NOT_YET, "Set --network_dim to the rank that `inspect FILE` prints.", ()),
    ("base_weights", "many", _NOT_YET, "Merge the LoRA into the model first, or start from it with --network_weights.", ()),
    ("base_weights_multiplier", "many", "--base_weights is not in this version", "Leave it out.", ("1", "1.0")),
    ("use_dora", "flag", _NOT_YET, "Leave it out; a plain LoRA is trained.", ()),
    ("lora_layers", "value", _NOT_YET, "Leave it out; --lora.conv_rank adds the convolutions.", ()),
    # data set
    ("dataset_name", "value", "data sets are read from disk", "Use --train_data_dir.", ()),
    ("dataset_config_name", "value", "data sets are read from disk", "Use --train_data_dir.", ()),
    ("dataset_class", "value", "runs foreign code on the pictures", "Use --train_data_dir.", ()),
    ("image_column", "value", "data sets are folders here", "Use --train_data_dir.", ("image",)),
    ("caption_column", "value", "data sets are folders here", "Write captions as .txt beside the pictures.", ("text",)),
    ("max_train_samples", "value", _NOT_YET, "Put fewer pictures into the folder.", ()),
    ("class_prompt", "value", _NOT_YET, "Write captions as .txt beside the prior pictures.", ()),
    ("num_class_images", "value", "prior pictures are not made by this version", "Put them into --class_data_dir.", ()),
    ("color_aug", "flag", "changes colours the captions name, and cannot be cached", "Use --flip_aug.", ()),
    ("random_crop", "flag", "latents are cached, crops are centred", "Leave it out, or use --flip_aug.", ()),
    ("face_crop_aug_range", "value", "latents are cached, crops are centred", "Crop the pictures beforehand.", ()),
    ("vae_batch_size", "value", "the batch of the VAE is not a setting here", "Leave it out.", ("1",)),
    ("debug_dataset", "flag", "is a command of its own here", "Run `safe-scaler scan FOLDER`.", ()),
    # objective
    ("do_edm_style_training", "flag", "SDXL is trained with its own discrete schedule", "Leave it out.", ()),
    # optimizer and schedule
    ("prodigy_beta3", "value", "is an argument of the optimizer", "Use --optimizer_args beta3=....", ()),
    ("prodigy_decouple", "value", "is an argument of the optimizer", "Use --optimizer_args decouple=False.", ("true",)),
    ("prodigy_use_bias_correction", "value", "is an argument of the optimizer", "Use --optimizer_args use_bias_correction=True.", ("true",)),
    ("prodigy_safeguard_warmup", "value", "is an argument of the optimizer", "Use --optimizer_args safeguard_warmup=True.", ("true",)),
    ("adam_weight_decay_text_encoder", "value", "one weight decay holds for all parts", "Use --adam_weight_decay.", ()),
    ("scale_lr", "flag", "the rate is taken as written", "Multiply --learning_rate yourself.", ()),
    ("lr_scheduler_type", "value", "runs foreign code", "Use --lr_scheduler.", ()),
    ("fused_backward_pass", "flag", "updates are decided after the whole gradient was seen", "Use --gradient_checkpointing to save memory.", ()),
    ("cpu_offload_checkpointing", "flag", _NOT_YET, "Use --gradient_checkpointing.", ()),
    # previews and validation
    ("sample_every_n_epochs", "value", _EPOCHS, "Use --sample_every_n_steps.", ()),
    ("validation_epochs", "value", _EPOCHS, "Use --validation_steps.", ()),
    ("validate_every_n_epochs", "value", _EPOCHS, "Use --validate_every_n_steps.", ()),
    ("max_validation_steps", "value", "validation is bounded by its pictures", "Use --validation.max_pictures.", ()),
    ("validation_seed", "value", "held-out pictures and their noise follow from --seed and the pictures", "Use --seed.", ()),
    # saving
    ("save_every_n_epochs", "value", _EPOCHS, "Use --save_every_n_steps.", ()),
    ("save_n_epoch_ratio", "value", _EPOCHS, "Use --save_every_n_steps.", ("0",)),
    *(
        (name, "value", "exported LoRA files are never deleted", "Leave it out; --checkpoint.keep_last limits checkpoints.", ())
        for name in ("save_last_n_epochs", "save_last_n_steps")
    ),
    *(
        (name, "value", "checkpoints are counted, not dated", "Use --checkpoint.keep_last.", ())
        for name in ("save_last_n_epochs_state", "save_last_n_steps_state")
    ),
    ("output_config", "flag", "every run stores its whole config", "Leave it out; see config.json in the run folder.", ()),
    ("log_config", "flag", "every run stores its whole config", "Leave it out; see config.json in the run folder.", ()),
    ("skip_until_initial_step", "flag", _RESUME, "Use `safe-scaler resume RUN`.", ()),
    ("initial_epoch", "value", _RESUME, "Use `safe-scaler resume RUN`.", ()),
    ("initial_step", "value", _RESUME, "Use `safe-scaler resume RUN`.", ()),
    *(
        (f"metadata_{name}", "value", _NOT_YET, "Use --metadata_description or --training_comment.", ())
        for name in ("usage_hint", "thumbnail", "merged_from", "preprocessor", "is_negative_embedding")
    ),
    # outside services
    *(
        (name, "value", _NO_UPLOAD, "Leave it out and upload the file yourself.", ())
        for name in (
            "huggingface_repo_id",
            "huggingface_repo_type",
            "huggingface_path_in_repo",
            "huggingface_token",
            "huggingface_repo_visibility",
            "hub_token",
            "hub_model_id",
        )
    ),
    *(
        (name, "flag", _NO_UPLOAD, "Leave it out and upload the file yourself.", ())
        for name in ("save_state_to_huggingface", "resume_from_huggingface", "async_upload", "push_to_hub")
    ),
    *(
        (name, "value", _NO_TRACKER, "Leave it out.", ())
        for name in (
            "logging_dir",
            "log_with",
            "log_prefix",
            "log_tracker_name",
            "wandb_run_name",
            "log_tracker_config",
            "wandb_api_key",
        )
    ),
    ("report_to", "value", _NO_TRACKER, "Leave it out.", ()),
    ("console_log_level", "value", "the run folder's run.log holds everything", "Leave it out.", ()),
    ("console_log_file", "value", "the run folder's run.log holds everything", "Leave it out.", ()),
    ("console_log_simple", "flag", "progress is plain text wherever the output is not a terminal", "Leave it out.", ()),
    # several processes
    ("deepspeed", "flag", _ONE_PROCESS, "Start one process; --gradient_checkpointing saves memory.", ()),
    ("zero_stage", "value", _ONE_PROCESS, "Start one process and leave it out.", ("2",)),
    *(
        (name, "value", _ONE_PROCESS, "Start one process; --gradient_checkpointing saves memory.", ())
        for name in (
            "offload_optimizer_device",
            "offload_optimizer_nvme_path",
            "offload_param_device",
            "offload_param_nvme_path",
        )
    ),
    *(
        (name, "flag", _ONE_PROCESS, "Start one process and leave it out.", ())
        for name in ("zero3_init_flag", "zero3_save_16bit_model", "fp16_master_weights_and_gradients")
    ),
)  # fmt: skip

_DIFFUSERS_NAMES = frozenset(
    [
        "revision",
        "variant",
        "enable_npu_flash_attention",
        "use_dora",
        "lora_layers",
        "dataset_name",
        "dataset_config_name",
        "image_column",
        "caption_column",
        "max_train_samples",
        "class_prompt",
        "num_class_images",
        "do_edm_style_training",
        "prodigy_beta3",
        "prodigy_decouple",
        "prodigy_use_bias_correction",
        "prodigy_safeguard_warmup",
        "adam_weight_decay_text_encoder",
        "scale_lr",
        "validation_epochs",
        "hub_token",
        "hub_model_id",
        "push_to_hub",
        "report_to",
    ]
)

REFUSED: dict[str, Option] = {
    name: Option(
        name,
        takes,
        refuse(why, fix, *neutral),
        "diffusers" if name in _DIFFUSERS_NAMES else "sd-scripts",
        refused=True,
    )
    for name, takes, why, fix, neutral in _ROWS
}
