"""Preview pictures of a run: sampled with the one UNet that is being trained, decoded in fp32, never ending the run.

A preview uses no pipeline and copies no model. Whatever goes wrong (out of memory included) is logged and returned as
text; the run's state is the same before and after (`undisturbed`).
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image, PngImagePlugin

from .isolation import undisturbed
from .prompts import PreviewPrompt
from .samplers import Conditioning, SamplingStopped, encode_prompts, sample_latents

if TYPE_CHECKING:
    from ..models import SDXLModel
    from ..networks import Network

log = logging.getLogger(__name__)

Compute = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, kw_only=True)
class PreviewResult:
    """One preview: its file, or why there is none (`failure`, in plain words)."""

    prompt: PreviewPrompt
    index: int
    step: int
    seconds: float
    file: Path | None = None
    failure: str | None = None


def preview_name(step: int, index: int) -> str:
    """File name of preview `index` at `step`; sorts by step, then by prompt."""
    return f"step-{step:08d}-{index:02d}.png"


def make_previews(
    model: SDXLModel,
    network: Network | None,
    prompts: Sequence[PreviewPrompt],
    *,
    step: int,
    folder: Path,
    max_token_length: int = 75,
    should_stop: Callable[[], bool] | None = None,
    on_ready: Callable[[PreviewResult], None] | None = None,
    conditioning: Sequence[Conditioning] | None = None,
    compute: Compute = nullcontext,
) -> list[PreviewResult]:
    """Make one picture a prompt, one after the other (memory of one), and return what came of each.

    `conditioning`: embeddings of each prompt from an earlier `encode_prompts`, for runs that no longer hold the text
    encoders. `compute`: context of UNet and text encoder calls, e.g. autocast. `on_ready` is told of each result as it
    comes. When `should_stop` says so, the list ends early.
    """
    results: list[PreviewResult] = []
    for index, prompt in enumerate(prompts):
        if should_stop is not None and should_stop():
            log.info("previews stopped before picture %d of %d", index + 1, len(prompts))
            break
        ready = None if conditioning is None else conditioning[index]
        job = _Job(model, network, prompt, index, step, folder, max_token_length, should_stop, ready, compute)
        result = job.run()
        if result is None:
            log.info("previews stopped at picture %d of %d", index + 1, len(prompts))
            break
        results.append(result)
        if on_ready is not None:
            _tell(on_ready, result)
    return results


@dataclass(frozen=True)
class _Job:
    """One picture, from prompt to file."""

    model: SDXLModel
    network: Network | None
    prompt: PreviewPrompt
    index: int
    step: int
    folder: Path
    max_token_length: int
    should_stop: Callable[[], bool] | None
    conditioning: Conditioning | None
    compute: Compute

    def run(self) -> PreviewResult | None:
        """The result, failed or not; None when the run was asked to stop."""
        start = time.perf_counter()
        file, failure = None, None
        try:
            file = self._make()
        except SamplingStopped:
            return None
        except Exception as error:
            failure = failure_text(error, f"preview {self.index + 1} at step {self.step}")
            log.exception("%s", failure)
        if failure is not None and torch.cuda.is_available():
            torch.cuda.empty_cache()  # outside the handler: the traceback no longer holds the tensors
        return PreviewResult(
            prompt=self.prompt,
            index=self.index,
            step=self.step,
            seconds=time.perf_counter() - start,
            file=file,
            failure=failure,
        )

    def _make(self) -> Path:
        from ..models import decode_latents

        with undisturbed(self.model, self.network):
            conditioning = self.conditioning
            if conditioning is None:
                with self.compute():
                    conditioning = encode_prompts(self.model, [self.prompt], max_token_length=self.max_token_length)
            latents_BCHW = sample_latents(
                self.model, conditioning, [self.prompt], should_stop=self.should_stop, compute=self.compute
            )
            if not bool(torch.isfinite(latents_BCHW).all()):
                raise ValueError("the model's output is not finite (NaN or infinity)")
            image_3HW = decode_latents(self.model.vae, latents_BCHW, self.model.vae_scale)[0]
        if not bool(torch.isfinite(image_3HW).all()):
            raise ValueError("the VAE's picture is not finite (NaN or infinity)")
        path = self.folder / preview_name(self.step, self.index)
        save_picture(path, image_3HW, png_text(self.prompt, self.step))
        return path


def save_picture(path: Path, image_3HW: torch.Tensor, text: dict[str, str]) -> None:
    """Write `image_3HW` in [0, 1] as PNG with text chunks, under a temporary name first."""
    pixels_HW3 = (image_3HW.clamp(0, 1) * 255).round().to("cpu", torch.uint8).permute(1, 2, 0).contiguous().numpy()
    info = PngImagePlugin.PngInfo()
    for key, value in text.items():
        info.add_text(key, value)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    try:
        Image.fromarray(pixels_HW3).save(temporary, format="PNG", pnginfo=info)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def png_text(prompt: PreviewPrompt, step: int) -> dict[str, str]:
    """Text chunks of a preview: `parameters` (A1111's form, which galleries read) and `safe_scaler` (JSON).

    There is no chunk called `prompt`: ComfyUI takes that one for a graph in JSON.
    """
    negative = f"\nNegative prompt: {prompt.negative}" if prompt.negative else ""
    settings = (
        f"Steps: {prompt.steps}, Sampler: {prompt.sampler}, CFG scale: {prompt.guidance:g}, Seed: {prompt.seed}, "
        f"Size: {prompt.width}x{prompt.height}, Training step: {step}"
    )
    return {
        "parameters": f"{prompt.text}{negative}\n{settings}",
        "safe_scaler": json.dumps({**asdict(prompt), "step": step}, ensure_ascii=False, sort_keys=True),
    }


def failure_text(error: BaseException, what: str) -> str:
    """What went wrong, for a person: out of memory is told from other errors."""
    text = (str(error).strip().splitlines() or [""])[0]
    if is_out_of_memory(error):
        return (
            f"There was not enough memory for {what}; the training goes on. Smaller previews (--w and --h) need less. "
            f"({type(error).__name__}: {text})"
        )
    return f"The {what} failed; the training goes on. ({type(error).__name__}: {text})"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory ran out, on any device."""
    if isinstance(error, MemoryError | torch.cuda.OutOfMemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("out of memory" in text or "not enough memory" in text)


def _tell(on_ready: Callable[[PreviewResult], None], result: PreviewResult) -> None:
    try:
        on_ready(result)
    except Exception:
        log.exception("the news of preview %d at step %d could not be passed on", result.index + 1, result.step)
