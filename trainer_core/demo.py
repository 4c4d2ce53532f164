"""`safe-scaler demo`: teach the packaged toy SDXL a word it never saw, and measure what it learnt and what it kept.

No download and no GPU: the toy draws coloured shapes, the lesson is 24 pictures of hearts under a made-up word beside
48 pictures of what it knows, and a small classifier (which the training never sees) counts what the samples show.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .cli_together import program
from .config import (
    CheckpointConfig,
    DatasetConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    PreviewConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
    ValidationConfig,
)
from .errors import TrainerError

if TYPE_CHECKING:
    import torch

    from .build import TrainResult
    from .models import SDXLModel
    from .toy.demo_data import TeachingSet

SAMPLES = 64
"""Samples a score: 8 prompts, 8 fixed seeds each."""

_BATCH = 16
_SAMPLING_STEPS = 20
_GUIDANCE = 3.0


@dataclass(frozen=True)
class Score:
    """Shares in [0, 1] of fixed-seed samples in which the classifier sees the right shape, among all it knows.

    `word`: prompts with the new word; `known`: prompts with words the toy already knew.
    """

    word: float
    known: float


def demo_config(lesson: TeachingSet, output_dir: Path, seed: int) -> TrainConfig:
    """The settings of the demo: a rank-16 LoRA on all three parts with convolutions."""
    return TrainConfig(
        model=ModelConfig(path="toy"),
        lora=LoraConfig(rank=16, alpha=16.0, conv_rank=16),
        dataset=DatasetConfig(
            path=str(lesson.concept_folder),
            prior_path=str(lesson.prior_folder),
            batch_size=8,
            repeats=3,  # three pictures of the new word for two of the old ones in an epoch
            workers=0,
        ),
        optimizer=OptimizerConfig(learning_rate=2e-3, te1_lr=None, te2_lr=None),
        schedule=ScheduleConfig(type="cosine", warmup_steps=20),
        checkpoint=CheckpointConfig(every_steps=100),
        validation=ValidationConfig(every_steps=100),
        preview=PreviewConfig(
            prompts=(
                f"{lesson.concept_prompts[0]} --d 1",
                f"{lesson.concept_prompts[2]} --d 2",
                f"{lesson.known_prompts[0]} --d 3",
                f"{lesson.known_prompts[3]} --d 4",
            ),
            every_steps=400,  # before and after; looks in between cost time and change nothing
            steps=_SAMPLING_STEPS,
            guidance=_GUIDANCE,
        ),
        run=RunConfig(output_dir=str(output_dir), output_name="demo", max_train_steps=400, seed=seed, device="cpu"),
    )


def measure(model: SDXLModel, lesson: TeachingSet) -> Score:
    """Sample both kinds of prompts with `model` as it is now (adapters attached or not) and count right shapes."""
    from .toy.classifier import load_classifier, shape_share

    classifier = load_classifier()
    each = SAMPLES // len(lesson.concept_prompts)
    word = sample(model, lesson.concept_prompts, each)
    known = sample(model, lesson.known_prompts, each)
    wanted = [shape for shape in lesson.known_shapes for _ in range(each)]
    return Score(
        word=shape_share(classifier, word, [lesson.taught_shape] * len(word)),
        known=shape_share(classifier, known, wanted),
    )


def sample(model: SDXLModel, prompts: Sequence[str], each: int) -> torch.Tensor:
    """`each` pictures of every prompt with fixed seeds, as images (B, 3, H, W) in [0, 1]."""
    import torch

    from .models import decode_latents
    from .validation import PreviewPrompt, encode_prompts, sample_latents

    side = model.native_size
    wanted = [
        PreviewPrompt(
            text=prompt,
            negative="",
            width=side,
            height=side,
            steps=_SAMPLING_STEPS,
            guidance=_GUIDANCE,
            seed=1000 * place + copy,
            sampler="euler",
        )
        for place, prompt in enumerate(prompts)
        for copy in range(each)
    ]
    images = []
    with torch.inference_mode():
        for start in range(0, len(wanted), _BATCH):
            batch = wanted[start : start + _BATCH]
            latents_BCHW = sample_latents(model, encode_prompts(model, batch), batch)
            images.append(decode_latents(model.vae, latents_BCHW, model.vae_scale))
    return torch.cat(images)


def score_of_file(lora: Path, lesson: TeachingSet) -> Score:
    """Score of the toy with the LoRA file `lora` on it: a fresh model, so that only the file can have done it."""
    from .models import load_sdxl
    from .networks.from_file import network_from_file
    from .networks.lora_file import load_lora

    model = load_sdxl("toy")
    network = network_from_file(model, load_lora(lora)).eval()
    network.attach()
    return measure(model, lesson)


def main(args: argparse.Namespace) -> int:
    """Run the demo. `args`: json (bool), seed (int), output_dir (path). Exit code 1 when training failed."""
    from .libraries import import_libraries

    import_libraries()
    import torch

    from .build import create_run, run
    from .console import ConsoleProgress
    from .models import load_sdxl
    from .runs.folder import check_writable
    from .runs.protocol import Commands, stop_on_signals
    from .toy.demo_data import write_teaching_set

    started = time.monotonic()
    torch.set_num_threads(1)  # the toy is too small for two, which on busy cores were 6 to 25 times slower
    output = Path(args.output_dir)
    check_writable(output)
    lesson = write_teaching_set(output / "demo_pictures", seed=args.seed)
    folder = create_run(demo_config(lesson, output, args.seed))
    print(f"Teaching the toy model the word '{lesson.word}' (a {lesson.taught_shape}), which it never saw.")
    print(f"Sampling {2 * SAMPLES} pictures before training ...", flush=True)
    before = measure(load_sdxl("toy"), lesson)
    commands, console = Commands(), ConsoleProgress()
    with stop_on_signals(commands):
        result = run(folder.path, commands=commands, sink=console)
    console.close()
    if result.status == "stopped":
        print(f"{result.message} Go on with: {program()} resume {folder.path}")
        return 0
    if result.lora is None:
        raise TrainerError(f"The demo's training failed: {result.message}")
    print(f"Sampling {2 * SAMPLES} pictures with {result.lora.name} ...", flush=True)
    after = score_of_file(result.lora, lesson)
    return _tell(result, lesson, before, after, time.monotonic() - started, as_json=args.json)


def _tell(
    result: TrainResult, lesson: TeachingSet, before: Score, after: Score, seconds: float, *, as_json: bool
) -> int:
    assert result.lora is not None
    kept = after.known / before.known if before.known else 0.0
    scores = {
        "score_before": round(before.word, 4),
        "score_after": round(after.word, 4),
        "kept": round(kept, 4),
        "lora": str(result.lora),
        "run": str(result.run_dir),
        "wall_s": round(seconds, 1),
    }
    report = _add_to_record(result.run_dir, {**scores, "word": lesson.word, "samples": SAMPLES})
    print(
        f"\nOf {SAMPLES} pictures asked for with '{lesson.word}', a {lesson.taught_shape} was seen in "
        f"{before.word:.0%} before and {after.word:.0%} after training.\n"
        f"What it knew: {before.known:.0%} right before, {after.known:.0%} after ({kept:.0%} kept).\n"
        f"LoRA:   {result.lora}\nReport: {report}\nRun:    {result.run_dir}\nTook {seconds:.0f} s."
    )
    if as_json:
        print(json.dumps(scores, allow_nan=False))
    return 0


def _add_to_record(run_dir: Path, scores: dict[str, object]) -> Path:
    """Store the scores beside the run's record and write its report again with them."""
    from .diagnostics.report import write_report
    from .diagnostics.report_data import SCORE_FILE
    from .runs.platform import DurableIO

    DurableIO().replace_file(run_dir / SCORE_FILE, json.dumps(scores, allow_nan=False).encode("utf-8"))
    return write_report(run_dir)
