"""Makes the packaged toy SDXL from nothing: draws pictures, trains VAE, classifier, UNet and text encoders.

    python tools/make_toy_sdxl.py                  # train (about an hour on one core), write, measure
    python tools/make_toy_sdxl.py --measure        # measure the packaged folder
    python tools/make_toy_sdxl.py --micro FOLDER   # the random micro toy for tests (a second)
    python tools/make_toy_sdxl.py --single-file F  # the packaged toy as an SGM single file

Stages are saved in `--work` and go on after a stop. Run it with OMP_NUM_THREADS=1 beside other work.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two threads thrash beside other work and gain little here
import torch  # noqa: E402
from diffusers import AutoencoderKL  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
import toy_samples  # noqa: E402
import toy_stages  # noqa: E402
import toy_unet  # noqa: E402

from trainer_core.models import load_sdxl  # noqa: E402
from trainer_core.toy import TOY_FOLDER, classifier, folder, micro, shapes  # noqa: E402

SEED = 20
SHEET = ROOT / "docs" / "pictures" / "toy_samples.png"


def train(work: Path, target: Path, *, raw_weights: bool) -> None:
    """Run all stages (those already done are only loaded) and write the fp16 folder to `target`."""
    work.mkdir(parents=True, exist_ok=True)
    vae = toy_stages.train_vae(work, seed=SEED)
    judge = toy_stages.train_classifier(work, seed=SEED)
    models, loop, scaling = toy_unet.train_unet(work, vae, seed=SEED)
    if not raw_weights:
        loop.use_ema()
    folder.write_folder(target, models, dtype=torch.float16, scaling_factor=scaling)
    folder.save_weights(target / classifier.WEIGHTS, judge.state_dict(), dtype=torch.float16)


def measure(target: Path, *, each: int, sheet: Path | None, guidance: float = 3.0) -> dict[str, dict[str, float]]:
    """Score the shipped fp16 folder with the shipped classifier, on fixed seeds, 20 Euler steps."""
    model = load_sdxl(target)
    judge = classifier.load_classifier(target)
    known = shapes.known_pairs()
    few = max(1, each // 4)
    held_out, images = toy_samples.score(model, judge, shapes.HELD_OUT_PAIRS, each=each, guidance=guidance)
    result = {"held_out": held_out}
    result["known"], known_images = toy_samples.score(model, judge, known, each=few, seed=1000, guidance=guidance)
    for size in shapes.SIZES[1:3]:
        scored, _ = toy_samples.score(model, judge, known[::5], each=few, seed=2000, size_hw=size, guidance=guidance)
        result[f"known {size[1]}x{size[0]}"] = scored
    result["classifier"] = judge_score(judge, model.vae)
    if sheet is not None:
        held_out_images = images.unflatten(0, (-1, each))[:, :2].flatten(0, 1)
        toy_samples.contact_sheet(torch.cat([held_out_images, known_images[::few]]), sheet, columns=8)
    return result


@torch.no_grad()
def judge_score(judge: classifier.Classifier, vae: AutoencoderKL) -> dict[str, float]:
    """The classifier on 630 fresh drawn pictures of all pairs, as drawn and through the VAE."""
    pairs = [(c, s) for c in shapes.COLOURS for s in shapes.SHAPES] * 10
    drawn = [shapes.draw(shapes.keyed_generator(SEED, "judge test", i), s, c) for i, (c, s) in enumerate(pairs)]
    images_B3HW = toy_stages.to_images(drawn)
    made = [vae.decode(vae.encode(part * 2 - 1).latent_dist.mean).sample for part in images_B3HW.split(63)]
    made_B3HW = (torch.cat(made) / 2 + 0.5).clamp(0, 1)
    result = {}
    for name, images in (("drawn", images_B3HW), ("through_vae", made_B3HW)):
        verdicts = classifier.judge(judge, images)
        result[f"{name}_shape"] = sum(v.shape == s for v, (_, s) in zip(verdicts, pairs, strict=True)) / len(pairs)
        result[f"{name}_colour"] = sum(v.colour == c for v, (c, _) in zip(verdicts, pairs, strict=True)) / len(pairs)
    result["vae_mean_abs_error"] = float((made_B3HW - images_B3HW).abs().mean())
    return result


def single_file(source: Path, path: Path) -> None:
    """Write the toy at `source` as an SGM single file."""
    from trainer_core.models import save_single_file

    save_single_file(load_sdxl(source), path, torch.float16)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the toy SDXL.")
    parser.add_argument("--work", type=Path, default=ROOT / ".toy_work", help="folder of resumable stages")
    parser.add_argument("--out", type=Path, default=TOY_FOLDER, help="folder to write (default: the packaged toy)")
    parser.add_argument("--measure", action="store_true", help="only measure the folder at --out")
    parser.add_argument("--each", type=int, default=16, help="samples a held-out prompt when measuring")
    parser.add_argument("--guidance", type=float, default=3.0, help="guidance of the samples when measuring")
    parser.add_argument("--raw-weights", action="store_true", help="write the last weights, not their average")
    parser.add_argument("--micro", type=Path, metavar="FOLDER", help="write the micro toy there and end")
    parser.add_argument("--single-file", type=Path, metavar="FILE", help="write --out as an SGM single file and end")
    parser.add_argument("--sheet", type=Path, default=SHEET, help="picture of samples to write when measuring")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.micro:
        print(micro.make_micro(options.micro))
        return
    if options.single_file:
        single_file(options.out, options.single_file)
        return
    if not options.measure:
        train(options.work, options.out, raw_weights=options.raw_weights)
    print(json.dumps(measure(options.out, each=options.each, sheet=options.sheet, guidance=options.guidance), indent=2))


if __name__ == "__main__":
    main()
