"""Where every parameter of an SDXL model comes from: a plan made from headers, before any tensor is read.

A `Slot` says which bytes of which file become one in-memory parameter. Names are diffusers' for UNet and VAE and
bare transformers names (`sgm_keys.bare_text_name`) for the text encoders; parts are `unet te1 te2 vae`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ModelFileError
from . import sgm_keys
from .families import is_vae, recognise
from .foreign import HOW_TO_CONVERT
from .tensor_file import Entry, TensorFile, read_header

FOLDERS = {"unet": "unet", "te1": "text_encoder", "te2": "text_encoder_2", "vae": "vae"}
PARTS = tuple(FOLDERS)
CONFIG_KEY = "safe_scaler.configs"  # header metadata that `save_single_file` writes: configs that shapes cannot tell
_TEXT_BEGINNINGS = ("embeddings.", "encoder.layers.", "final_layer_norm.")  # merges add a projection and a logit scale
_OLD_ATTENTION = {".query.": ".to_q.", ".key.": ".to_k.", ".value.": ".to_v.", ".proj_attn.": ".to_out.0."}


@dataclass(frozen=True)
class Slot:
    """One parameter's place: a whole tensor of a file, or one of three stacked row blocks, maybe transposed."""

    file: TensorFile
    key: str
    block: int | None = None
    transposed: bool = False

    @property
    def entry(self) -> Entry:
        return self.file.entries[self.key]

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.entry.shape
        if self.block is not None:
            return (shape[0] // 3, *shape[1:])
        return tuple(reversed(shape)) if self.transposed else shape


@dataclass(frozen=True)
class Source:
    """A model found on disk. `configs` holds what the files themselves say (JSON files or header metadata)."""

    path: Path
    kind: str  # "single file" | "folder"
    parts: Mapping[str, Mapping[str, Slot]]
    configs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    markers: frozenset[str] = frozenset()
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> Path | None:
        return self.path if self.kind == "folder" else None


def find_source(path: Path) -> Source:
    """Plan the loading of a base model; raises ModelFileError naming what `path` is when it is no SDXL base model."""
    if os.path.isdir(path):
        with _permission_told(path):
            return _folder_source(path)
    file = read_header(path)
    family = recognise(file.entries)
    if family.name != "sdxl":
        raise ModelFileError(f"'{path}' is {family.what}. {family.advice}", path)
    return _single_file_source(file)


def find_vae(path: Path) -> Source:
    """Plan the loading of a VAE: a file with ldm or diffusers names, a VAE folder, or a whole SDXL model's VAE."""
    if os.path.isdir(path):
        with _permission_told(path):
            return _vae_folder_source(path)
    file = read_header(path)
    if is_vae(file.entries):
        return Source(path, "single file", {"vae": _vae_slots(file)}, _metadata_configs(file), metadata=file.metadata)
    family = recognise(file.entries)
    if family.name == "sdxl":
        source = _single_file_source(file)
        if source.parts["vae"]:
            return Source(path, "single file", {"vae": source.parts["vae"]}, source.configs, metadata=file.metadata)
        raise ModelFileError(f"'{path}' is an SDXL checkpoint without a VAE. Give a file that holds one.", path)
    raise ModelFileError(f"model.vae: '{path}' is {family.what}, not a VAE. Give an SDXL VAE file or folder.", path)


@contextmanager
def _permission_told(path: Path) -> Iterator[None]:
    try:
        yield
    except PermissionError as error:
        raise ModelFileError(
            f"'{path}' cannot be read: permission denied ({error.filename}). "
            "Give your user permission to read the folder.",
            path,
        ) from error


def _vae_folder_source(path: Path) -> Source:
    folder = path if (path / "config.json").is_file() else path / "vae"
    if not (folder / "config.json").is_file():
        raise ModelFileError(
            f"'{path}' holds no VAE: there is no config.json in it or in its vae folder. "
            "Give a VAE .safetensors file or the vae folder of a diffusers model.",
            path,
        )
    slots = _named(_folder_files(folder, "vae"), "vae")
    return Source(folder, "folder", {"vae": slots}, {"vae": _read_json(folder / "config.json")})


def _single_file_source(file: TensorFile) -> Source:
    parts: dict[str, dict[str, Slot]] = {part: {} for part in PARTS}
    layers, levels = _unet_layout(file.entries)
    ignored: list[str] = []
    for key in file.entries:
        placed = _place(file, key, layers, levels)
        if placed is None:
            ignored.append(key)
            continue
        part, slots = placed
        parts[part].update(slots)
    parts["vae"] = _vae_slots(file)
    markers = frozenset({"v_pred", "ztsnr"} & set(file.entries))
    vae_keys = {slot.key for slot in parts["vae"].values()}
    rest = tuple(key for key in ignored if key not in markers and key not in vae_keys)
    return Source(file.path, "single file", parts, _metadata_configs(file), rest, markers, file.metadata)


def _place(file: TensorFile, key: str, layers: int, levels: int) -> tuple[str, dict[str, Slot]] | None:
    """The part and parameters that one key of a single file holds; None when it is no weight of UNet or encoders."""
    if key.startswith(sgm_keys.UNET_PREFIX):
        name = sgm_keys.unet_sgm_to_diffusers(key.removeprefix(sgm_keys.UNET_PREFIX), layers, levels)
        return None if name is None else ("unet", {name: Slot(file, key)})
    for prefix in (sgm_keys.TE1_PREFIX, sgm_keys.TE1_PREFIX.removesuffix("text_model.")):
        if key.startswith(prefix):
            name = key.removeprefix(prefix)
            known = name.startswith(_TEXT_BEGINNINGS) and not name.endswith("position_ids")
            return ("te1", {name: Slot(file, key)}) if known else None
    if key.startswith(sgm_keys.TE2_PREFIX):
        bare = key.removeprefix(sgm_keys.TE2_PREFIX)
        names = sgm_keys.te2_open_clip_to_bare(bare)
        if not names:
            return None
        if len(names) == 1:
            return "te2", {names[0]: Slot(file, key, transposed=bare == "text_projection")}
        return "te2", {name: Slot(file, key, block=block) for block, name in enumerate(names)}
    return None


def _unet_layout(entries: Iterable[str]) -> tuple[int, int]:
    """(layers per block, levels) of an SGM UNet: a level ends with a downsampler (`.op`), the last has none."""
    prefix = f"{sgm_keys.UNET_PREFIX}input_blocks."
    blocks: set[int] = set()
    downsamplers: set[int] = set()
    for name in entries:
        if name.startswith(prefix):
            number, _, rest = name.removeprefix(prefix).partition(".")
            blocks.add(int(number))
            if rest.startswith("0.op."):
                downsamplers.add(int(number))
    levels = len(downsamplers) + 1
    return max(1, len(blocks) // levels - 1), levels


def _vae_slots(file: TensorFile) -> dict[str, Slot]:
    """VAE parameters in ldm names (with or without the single-file prefix) or diffusers names."""
    bare = {key.removeprefix(sgm_keys.VAE_PREFIX): key for key in file.entries}
    if any(name.startswith("decoder.up_blocks.") for name in bare):
        return {_modern(name): Slot(file, key) for name, key in bare.items()}
    whole = any(key.startswith(sgm_keys.VAE_PREFIX) for key in file.entries)
    levels = len({name.split(".")[2] for name in bare if name.startswith("decoder.up.")})
    slots: dict[str, Slot] = {}
    for name, key in bare.items():
        if whole and not key.startswith(sgm_keys.VAE_PREFIX):
            continue
        mapped = sgm_keys.vae_ldm_to_diffusers(name, levels)
        if mapped is not None:
            slots[mapped] = Slot(file, key)
    return slots


def _modern(name: str) -> str:
    """Early diffusers VAEs spell the attention query, key, value, proj_attn."""
    for old, new in _OLD_ATTENTION.items():
        if ".attentions." in name:
            name = name.replace(old, new)
    return name


def _metadata_configs(file: TensorFile) -> dict[str, dict[str, Any]]:
    text = file.metadata.get(CONFIG_KEY)
    if text is None:
        return {}
    try:
        return {part: dict(config) for part, config in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ModelFileError(
            f"'{file.path}' is damaged: its metadata '{CONFIG_KEY}' is not readable.", file.path
        ) from error


def _folder_source(path: Path) -> Source:
    _check_folder(path)
    configs: dict[str, Mapping[str, Any]] = {}
    parts: dict[str, Mapping[str, Slot]] = {}
    for part, folder in FOLDERS.items():
        config_file = path / folder / "config.json"
        if part == "vae" and not config_file.is_file():
            parts[part] = {}  # a VAE may be given separately
            continue
        if not config_file.is_file():
            raise ModelFileError(
                f"'{path}' is no complete diffusers SDXL folder: '{folder}/config.json' is missing. Download the "
                "folder again with all its files, or give a single .safetensors checkpoint.",
                path,
            )
        configs[part] = _read_json(config_file)
    _check_unet_config(path, configs["unet"])
    for part, folder in FOLDERS.items():
        if part in configs:
            parts[part] = _named(_folder_files(path / folder, part), part)
    scheduler = path / "scheduler" / "scheduler_config.json"
    if scheduler.is_file():
        configs["scheduler"] = _read_json(scheduler)
    return Source(path, "folder", parts, configs)


def _check_folder(path: Path) -> None:
    index = path / "model_index.json"
    if not index.is_file():
        files = sorted(entry.name for entry in path.glob("*.safetensors"))
        hint = f"It holds {', '.join(files[:5])}: give one of these files. " if files else ""
        raise ModelFileError(
            f"'{path}' is a folder, but not a diffusers SDXL folder: there is no model_index.json in it. {hint}"
            "Allowed are an SDXL .safetensors file or a diffusers folder with unet/, vae/, text_encoder/ and "
            "text_encoder_2/.",
            path,
        )
    kind = str(_read_json(index).get("_class_name", ""))
    if not kind.startswith("StableDiffusionXL"):
        family = {"StableDiffusionPipeline": "Stable Diffusion 1.x or 2.x", "FluxPipeline": "Flux"}.get(
            kind, kind or "another kind"
        )
        raise ModelFileError(f"'{path}' is a diffusers folder of {family}, not of SDXL. Give an SDXL base model.", path)
    if not (path / "text_encoder" / "config.json").is_file() and (path / "text_encoder_2" / "config.json").is_file():
        raise ModelFileError(f"'{path}' is a diffusers folder of the SDXL refiner. Give the SDXL base model.", path)


def _check_unet_config(path: Path, config: Mapping[str, Any]) -> None:
    channels = config.get("in_channels", 4)
    if channels == 9:
        raise ModelFileError(f"'{path}' is an SDXL inpainting model (9 input channels). Give an SDXL base model.", path)
    if channels != 4 or config.get("addition_embed_type") != "text_time":
        raise ModelFileError(
            f"'{path}' is no SDXL base model: its UNet has {channels} input channels and the conditioning "
            f"'{config.get('addition_embed_type')}' (SDXL: 4 and 'text_time'). Give an SDXL base model.",
            path,
        )


def _folder_files(folder: Path, part: str) -> list[TensorFile]:
    """The weight files of one part: the plain ones before the fp16 variant, whole before sharded."""
    stem = "model" if part in ("te1", "te2") else "diffusion_pytorch_model"
    for variant in ("", ".fp16"):
        whole = folder / f"{stem}{variant}.safetensors"
        if whole.is_file():
            return [read_header(whole)]
        for name in (f"{stem}.safetensors.index{variant}.json", f"{stem}{variant}.safetensors.index.json"):
            if (folder / name).is_file():
                shards = sorted(set(_read_json(folder / name).get("weight_map", {}).values()))
                return [read_header(folder / shard) for shard in shards]
    if list(folder.glob("*.bin")):
        raise ModelFileError(f"'{folder}' holds its weights as a pickle file (.bin) only. {HOW_TO_CONVERT}", folder)
    raise ModelFileError(
        f"'{folder}' holds no weights: '{stem}.safetensors' is missing. Download the folder again with all its files.",
        folder,
    )


def _named(files: Iterable[TensorFile], part: str) -> dict[str, Slot]:
    slots: dict[str, Slot] = {}
    for file in files:
        for key in file.entries:
            name = sgm_keys.bare_text_name(key) if part in ("te1", "te2") else _modern(key)
            if not name.endswith("position_ids"):
                slots[name] = Slot(file, key)
    return slots


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(f"'{path}' cannot be read: {error}. Download the folder again.", path) from error
    if not isinstance(found, dict):
        raise ModelFileError(f"'{path}' is damaged: it should hold a JSON table. Download the folder again.", path)
    return found
