"""The sheet to share a LoRA with: what others need to use it, and what sites such as Civitai and Hugging Face ask for.

Everything comes from the run's record and config. With `metadata.minimal` no prompt (which may be a caption) stands in
it; paths of the training machine never do.
"""

from __future__ import annotations

from pathlib import Path

from .diagnostics.report_data import ReportData, read_run
from .diagnostics.report_text import final_lora
from .runs.platform import DurableIO

FILE_NAME = "share.md"


def write_share_sheet(run_dir: str | Path) -> Path:
    """Write `share.md` into the run folder. CheckpointError or ConfigError when the run cannot be read."""
    path = Path(run_dir) / FILE_NAME
    DurableIO().replace_file(path, share_sheet(read_run(run_dir)).encode("utf-8"))
    return path


def share_sheet(data: ReportData) -> str:
    """The sheet as Markdown, its first lines a model card's header."""
    trigger = str(data.setting("metadata.trigger_phrase") or "").strip()
    title = str(data.setting("metadata.title") or data.name)
    lines = [*_header(data, title, trigger), f"# {title}", ""]
    if text := str(data.setting("metadata.description") or ""):
        lines += [text, ""]
    lines += ["## How to use it", ""]
    lines += [f"- Trigger words: `{trigger}`" if trigger else "- Trigger words: none were set"]
    lines += ["- Strength: begin with 1.0; lower it when pictures look burnt", *_prompts(data), ""]
    lines += ["## What Civitai asks for", "", *_rows(data, trigger), ""]
    lines += ["## How it was trained", "", *_training(data), ""]
    return "\n".join(lines)


def _header(data: ReportData, title: str, trigger: str) -> list[str]:
    """The YAML header of a Hugging Face model card."""
    license_name = str(data.setting("metadata.license") or "")
    header = ["---", "library_name: diffusers"]
    header += [] if data.setting("model.path") == "toy" else ["base_model: stabilityai/stable-diffusion-xl-base-1.0"]
    header += [f"license: {_yaml(license_name)}"] if license_name else []
    header += [f"instance_prompt: {_yaml(trigger)}"] if trigger else []
    tags = ["lora", "text-to-image", "stable-diffusion-xl", *_tags(data)]
    return [*header, "tags:", *(f"- {_yaml(tag)}" for tag in tags), "---", ""]


def _yaml(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ") + '"'


def _tags(data: ReportData) -> list[str]:
    return [tag.strip() for tag in str(data.setting("metadata.tags") or "").split(",") if tag.strip()]


def _prompts(data: ReportData) -> list[str]:
    if data.setting("metadata.minimal"):
        return []
    prompts = list(dict.fromkeys(str(row["prompt"]) for row in data.previews))
    return [f"- Prompt of a preview: `{prompt}`" for prompt in prompts[:4]]


def _rows(data: ReportData, trigger: str) -> list[str]:
    lora = final_lora(data)
    file = Path(str(lora["data"]["file"])).name if lora else "there is no final file yet"
    license_name = str(data.setting("metadata.license") or "") or "not set (metadata.license)"
    rows = [
        ("Type", "LoRA"),
        ("Base model", "SDXL 1.0 (change it when yours is a fine-tune of another family, such as Pony or Illustrious)"),
        ("File", file),
        ("Trained words", trigger or "none"),
        ("Tags", ", ".join(_tags(data)) or "not set (metadata.tags)"),
        ("Steps", str(data.summary["applied"])),
        ("Clip skip", "not used: SDXL reads the second-last layer"),
        ("Licence", license_name),
    ]
    return ["| asked | answer |", "|---|---|", *(f"| {name} | {answer} |" for name, answer in rows)]


def _training(data: ReportData) -> list[str]:
    summary = data.summary
    pictures = f"{summary['pictures']} pictures, " if summary["pictures"] else ""
    rank, alpha = data.setting("lora.rank"), data.setting("lora.alpha")
    shown = [
        f"- {pictures}{summary['applied']} steps, batch size {data.setting('dataset.batch_size')}",
        f"- rank {rank}, alpha {rank / 2 if alpha is None else alpha:g}, learning rate "
        f"{data.setting('optimizer.learning_rate'):g}, {data.setting('optimizer.type')}",
        f"- trained: {', '.join(summary['parts'])}",
        f"- seed {data.setting('run.seed')}, Safe-Scaler {data.pack_version}",
    ]
    if summary["best_validation"] is not None:
        shown.append(
            f"- lowest validation loss {summary['best_validation']:.4f} at step {summary['best_validation_step']}"
        )
    return shown
