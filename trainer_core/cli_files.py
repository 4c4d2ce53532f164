"""Commands on LoRA files: `coverage`, `convert`, `resize`, `merge`, `extract`. Nothing is ever overwritten."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import AdapterError, ConfigError, Problem, ResourceError

if TYPE_CHECKING:
    from .config import TrainConfig
    from .models import SDXLModel

_DTYPES = ("fp32", "fp16", "bf16")


def _parser(name: str, description: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(prog=f"safe-scaler {name}", description=description)


def _end(args: argparse.Namespace, facts: dict[str, Any], text: str) -> int:
    print(json.dumps(facts, allow_nan=False) if args.json else text)
    return 0


def convert(words: Sequence[str]) -> int:
    """`convert FILE --format FORM [--dtype D] [--output PATH] [--model MODEL]`."""
    from .networks.file_tools import ALL_FORMATS, made_metadata, write_as
    from .networks.lora_file import load_lora

    parser = _parser("convert", "Write a LoRA file under other names or in another number format, and compare.")
    parser.add_argument("file", help="LoRA file in any spelling")
    parser.add_argument("--format", default="kohya", choices=ALL_FORMATS, help="names in the result")
    parser.add_argument("--dtype", choices=_DTYPES, help="number format; default the file's own")
    parser.add_argument("--output", help="file (folder for peft); default beside the file")
    parser.add_argument("--model", help="base model, where it is not a real SDXL")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(words)
    file = load_lora(args.file)
    dtype = args.dtype or _own_dtype(file.dtypes)
    target = Path(args.output) if args.output else file.path.with_name(f"{file.path.stem}-{args.format}.safetensors")
    metadata = made_metadata(file, f"converted to {args.format}, {dtype}")
    written = write_as(file, target, _names_model(args.model), args.format, dtype, metadata)
    paths = [str(path) for path in written.paths]
    return _end(args, {"written": paths, "check": written.text}, "\n".join([*paths, f"  {written.text}"]))


def resize(words: Sequence[str]) -> int:
    """`resize FILE (--rank N | --keep SHARE) [--dtype D] [--output PATH]`."""
    from .networks.file_tools import made_metadata, resize_lora
    from .networks.kohya_file import free_path, save_lora
    from .networks.lora_file import load_lora
    from .networks.metadata_size import fit_metadata

    parser = _parser("resize", "Lower the ranks of a LoRA with the least change of what it does.")
    parser.add_argument("file", help="LoRA file in any spelling")
    parser.add_argument("--rank", type=int, help="highest rank")
    parser.add_argument("--keep", type=float, help="share of every change's squared norm to keep, such as 0.99")
    parser.add_argument("--dtype", choices=_DTYPES, help="number format; default the file's own")
    parser.add_argument("--output", help="file; default beside the file")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(words)
    file = load_lora(args.file)
    smaller, text = resize_lora(file, rank=args.rank, keep=args.keep)
    how = f"rank {args.rank}" if args.rank is not None else f"keep {args.keep:g}"
    fitting, _ = fit_metadata(made_metadata(smaller, f"resized: {how}"), smaller.state)
    target = Path(args.output) if args.output else file.path.with_name(f"{file.path.stem}-resized.safetensors")
    saved = save_lora(free_path(target), smaller.state, fitting, args.dtype or _own_dtype(file.dtypes))
    load_lora(saved.path)
    return _end(args, {"written": [str(saved.path)], "check": text}, f"{saved.path}\n  {text}")


def merge(words: Sequence[str]) -> int:
    """`merge MODEL LORA[=STRENGTH] ... --output FILE [--dtype D]`."""
    from .networks.model_tools import merge_files

    parser = _parser("merge", "Write a base model with LoRAs merged in, as one safetensors file.")
    parser.add_argument("model", help="base model (file, diffusers folder, or the word toy)")
    parser.add_argument("lora", nargs="+", help="LoRA file, or FILE=STRENGTH")
    parser.add_argument("--output", required=True, help="the new model file")
    parser.add_argument("--dtype", default="auto", choices=("auto", *_DTYPES), help="auto: the base model's own")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(words)
    path, text = merge_files(args.model, [_with_strength(word) for word in args.lora], Path(args.output), args.dtype)
    return _end(args, {"written": [str(path)], "check": text}, f"{path}\n  " + text.replace("\n", "\n  "))


def extract(words: Sequence[str]) -> int:
    """`extract BASE TUNED --rank N --output FILE`."""
    from .networks.model_tools import extract_file
    from .networks.targets import PART_ORDER

    parser = _parser("extract", "Make a LoRA of the difference between two models.")
    parser.add_argument("base", help="model to start from")
    parser.add_argument("tuned", help="model that the LoRA should lead to")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--conv-rank", type=int, default=0, help="rank of the 3x3 convolutions; 0 leaves them out")
    parser.add_argument("--parts", default=",".join(PART_ORDER), help="of unet,te1,te2")
    parser.add_argument("--dtype", default="fp16", choices=_DTYPES)
    parser.add_argument("--output", required=True)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(words)
    parts = tuple(part.strip() for part in args.parts.split(",") if part.strip())
    if unknown := [part for part in parts if part not in PART_ORDER]:
        raise ConfigError([Problem("--parts", args.parts, f"'{unknown[0]}' is no part", "Allowed: unet, te1, te2.")])
    if args.rank < 1 or args.conv_rank < 0:
        raise ConfigError([Problem("--rank", args.rank, "must be at least 1 (--conv-rank at least 0)", "")])
    path, text = extract_file(
        args.base, args.tuned, Path(args.output), args.rank, conv_rank=args.conv_rank, parts=parts, dtype=args.dtype
    )
    return _end(args, {"written": [str(path)], "check": text}, f"{path}\n  {text}")


def coverage(words: Sequence[str]) -> int:
    """`coverage [CONFIG] [--name value ...] [--json] [--svg FILE] [--no-probe]`, or `coverage RUN` for a stored one."""
    if not words or words[0] in ("-h", "--help"):
        print(
            "usage: safe-scaler coverage [CONFIG.toml | RUN] [--name value ...] [--json] [--svg FILE] [--no-probe]\n\n"
            "Which layers get adapters and which of them a gradient reaches, with the settings of `train`.\n"
            "RUN: a run folder; shows what the run found before its first step."
        )
        return 0 if words else 2
    words, options = _taken_out(words)
    if len(words) == 1 and (stored := Path(words[0]).expanduser() / "coverage.json").is_file():
        return _stored_coverage(stored, options)
    from .cli import settings_of

    config = settings_of(words)
    from .networks.coverage import measure_coverage, require_reached
    from .networks.create import create_network
    from .networks.offline_check import network_problems

    parts = _trained(config)
    if found := network_problems(config.lora, config.model, parts):
        raise ConfigError(found)
    model = _loaded(config)
    network = create_network(model, config.lora, trained_parts=parts, seed=config.run.seed or 0)
    live = config.dataset.cache_text != "true"
    report = measure_coverage(model, network, probe=not options["no_probe"], live_text=live)
    network.detach()
    if options["svg"]:
        Path(options["svg"]).expanduser().write_text(report.svg(), encoding="utf-8")
    print(json.dumps(report.to_dict(), allow_nan=False) if options["json"] else report.text)
    require_reached(report)
    return 0


def _taken_out(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """The words without this command's own options, and these."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--svg")
    parser.add_argument("--no-probe", action="store_true")
    own, rest = parser.parse_known_args(list(words))
    return rest, vars(own)


def _stored_coverage(file: Path, options: dict[str, Any]) -> int:
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
        text = str(facts.pop("text"))
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise AdapterError(f"'{file}' cannot be read: {error}. Give the config instead of the run.") from error
    if options["svg"]:
        Path(options["svg"]).expanduser().write_bytes((file.parent / "coverage.svg").read_bytes())
    print(json.dumps(facts) if options["json"] else text)
    return 0


def _trained(config: TrainConfig) -> tuple[str, ...]:
    from .config import trained_parts

    if not config.model.path:
        raise ConfigError([Problem("model.path", "", "is empty", "Give a model: --model.path FILE, or the word toy.")])
    return tuple(trained_parts(config))


def _loaded(config: TrainConfig) -> SDXLModel:
    import torch

    from .device import choose_compute, choose_device
    from .models import load_sdxl

    device = choose_device(config.run.device)
    compute = choose_compute(config.precision.compute, device)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[compute]
    wanted = config.model
    return load_sdxl(wanted.path, vae=wanted.vae, config_dir=wanted.config_dir, dtype=dtype, device=device)


def _own_dtype(dtypes: Sequence[str]) -> str:
    known = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
    return known.get(dtypes[0], "fp32") if len(dtypes) == 1 else "fp32"


def _names_model(path: str | None) -> SDXLModel:
    """A model without weights that gives module names: the one asked for, or real SDXL's."""
    from .config import ModelConfig
    from .networks.offline_check import meta_model, real_sdxl_names

    return meta_model(ModelConfig(path=path)) if path else real_sdxl_names()


def _with_strength(word: str) -> tuple[Path, float]:
    path, equals, strength = word.rpartition("=")
    if not equals or Path(word).exists():
        return Path(word).expanduser(), 1.0
    try:
        return Path(path).expanduser(), float(strength)
    except ValueError:
        why = f"'{strength}' is no number"
        raise ConfigError([Problem("LORA", word, why, "Write FILE or FILE=0.8.")]) from None


def _told(command: Callable[[Sequence[str]], int], words: Sequence[str]) -> int:
    """A folder that cannot be written or a full disk is no bug of ours."""
    try:
        return command(words)
    except BrokenPipeError:
        raise
    except OSError as error:
        where = f"'{error.filename}' cannot be read or written" if error.filename else "a file cannot be written"
        raise ResourceError(f"{where}: {error.strerror or error}. Check the path, its rights and its disk.") from error


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    name: partial(_told, command)
    for name, command in (
        ("coverage", coverage),
        ("convert", convert),
        ("resize", resize),
        ("merge", merge),
        ("extract", extract),
    )
}
