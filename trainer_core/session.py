"""What a run does around its steps: checkpoints, exported files, validation, previews, commands, and the way out.

Order when several are due after one step: checkpoint, LoRA file, validation, preview. A save is never lost to a
preview that runs out of memory.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import TrainConfig
from .errors import AdapterError, ResourceError
from .events import (
    EventBus,
    LoraSaved,
    PhaseChanged,
    PreviewReady,
    ValidationFinished,
    Warned,
)
from .saving import RunCheckpoints

if TYPE_CHECKING:
    from .checkpoints.store import CheckpointStore, RunState
    from .export import Exporter
    from .optim.live_weights import Purpose
    from .resume import RunIdentity
    from .runs.folder import RunFolder
    from .runs.protocol import Commands
    from .trainer import Trainer
    from .validation import PreviewPrompt, StableValidation, ValidationResult

log = logging.getLogger(__name__)

_PAUSE_POLL_S = 0.2


@dataclass
class Session:
    """The surroundings of one `Trainer`.

    Args:
        capture: makes the whole run state for a checkpoint.
        export: writes the adapter of a step to a path and proves the file.
        final_lora: where the result goes; decided when the run was created.
    """

    folder: RunFolder
    config: TrainConfig
    bus: EventBus
    commands: Commands
    store: CheckpointStore
    capture: Callable[[], RunState]
    export: Exporter
    identity: RunIdentity
    final_lora: Path
    validation: StableValidation | None
    prompts: list[PreviewPrompt]
    preview: Callable[[int], None]
    trainer: Trainer | None = None
    resumed_from: str | None = None
    validation_history: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: RunCheckpoints = field(init=False)
    _validated_step: int = -1
    _previewed_step: int = -1

    def __post_init__(self) -> None:
        self.checkpoints = RunCheckpoints(
            self.store, self.capture, self.config.checkpoint, self.bus, best_step=self.best_step
        )

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and speaks."""
        processes = None if self.trainer is None else self.trainer.parts.processes
        return processes is None or processes.first

    def should_stop(self) -> bool:
        """Polled between micro-batches and inside long loops; blocks while the run is paused."""
        self._answer_commands()
        return self.commands.stop_requested

    def went_on_from(self, name: str, step: int) -> None:
        """The run was taken up from checkpoint `name` of `step`; that step needs no second checkpoint."""
        self.resumed_from = name
        self.checkpoints.went_on_from(name, step)
        if self.validation_history:
            self._validated_step = int(self.validation_history[-1]["step"])

    def rolled_back(self, step: int) -> None:
        """The ladder went back to `step`: what is due is due again, and the state of `step` is a new one."""
        self.checkpoints.rolled_back()
        self._validated_step = int(self.validation_history[-1]["step"]) if self.validation_history else -1
        self._previewed_step = step

    def before_training(self, step: int) -> None:
        """Validation and previews of the untrained state.

        On resume, what was due after the restored step and is not there: the run may have died between its checkpoint
        and the rest.
        """
        if self.trainer is not None:
            from .memory.run_estimate import keep_estimate

            keep_estimate(self.folder.path, self.trainer.parts, self.config)
            if (memory := self.trainer.parts.memory) is not None and memory.clock is not None:
                memory.clock.writing = lambda: self.checkpoints.writing
        if step == 0:
            self.validate(step)
            if self.config.preview.at_start:
                self.make_previews(step)
        else:
            if any(self.folder.previews.glob(f"step-{step:08d}-*.png")):
                self._previewed_step = step
            self.make_up_for(step)
        self._try_preview()

    def make_up_for(self, step: int) -> None:
        """What was due after `step`, whose state was restored from a checkpoint written before it."""
        if step == 0:
            self.validate(step)
        else:
            self._look_and_export(step, export=not (self.folder.loras / self._lora_name(step)).exists())

    def _try_preview(self) -> None:
        """With `memory.probe`: the largest preview, where none was made yet."""
        if self.trainer is None or not self.prompts or self._previewed_step >= 0:
            return
        if (memory := self.trainer.parts.memory) is not None and memory.probes:
            from .step_previews import try_largest_preview

            try_largest_preview(self, self.trainer.parts, lambda topic, text, step: self._warn(step, topic, text))

    def after_step(self, step: int) -> None:
        """Everything that is due after `step`."""
        self._answer_commands()
        if self.checkpoints.due(step):
            self.checkpoints.submit(step)
        elif self.trainer is not None and self.trainer.state.applied > 0:
            self.checkpoints.prepare()
        self._look_and_export(step)

    def _look_and_export(self, step: int, *, export: bool = True) -> None:
        config = self.config
        if export and _due(step, config.checkpoint.lora_every_steps):
            self.save_lora(step)
        if _due(step, config.validation.every_steps):
            self.validate(step)
        if _due(step, config.preview.every_steps):
            self.make_previews(step)

    def best_step(self) -> int | None:
        """The step of the lowest validation loss so far, the untrained state apart; None before the first."""
        measured = [entry for entry in self.validation_history if entry["step"] > 0]
        return int(min(measured, key=lambda entry: entry["mean"])["step"]) if measured else None

    def save_lora(self, step: int, path: Path | None = None, *, final: bool = False) -> Path | None:
        """Export the adapter and prove the file.

        Before the end an adapter that does nothing yet (a warm-up begins at a rate of 0) is only told.

        Raises:
            AdapterError: the file does not hold what it should, or the final adapter does nothing.
            ResourceError: the final file could not be written.
        """
        target = path or self.folder.loras / self._lora_name(step)
        try:
            exported = self.export(target, step, require_effect=final)
        except (OSError, ResourceError) as error:
            text = f"The LoRA file {target} could not be written: {error}"
            if final:
                raise ResourceError(text) from error
            self._warn(step, "save", text)
            return None
        for note in exported.notes:
            self._warn(step, "save", note)
        if not exported.proof.does_something:
            self._warn(step, "save", f"{target.name} changes nothing yet: no step has moved the adapter so far.")
        self.bus.emit(
            LoraSaved(
                step=step,
                file=self.shown(target),
                bytes=exported.saved.size,
                proof=exported.proof.text,
                final=final,
            )
        )
        return target

    def _lora_name(self, step: int) -> str:
        return f"{self.config.run.output_name}-step{step:08d}.safetensors"

    def validate(self, step: int) -> ValidationResult | None:
        """Measure the stable validation loss and keep it in the run's history."""
        if self.validation is None or self._validated_step == step:
            return None
        self.bus.emit(PhaseChanged(step=step, phase="validating"))
        with self._judged("validation"):
            result = self.validation.run(should_stop=self.should_stop)
        if result is None:
            return None
        self._validated_step = step
        if result.failure is not None:
            self._warn(step, "evaluation", result.failure)
            return None
        self.validation_history.append({"step": step, "mean": result.mean, "bands": list(result.bands)})
        self.bus.emit(
            ValidationFinished(
                step=step,
                validation_loss=result.mean,
                bands=tuple(result.bands),
                pictures=result.pictures,
                seconds=result.seconds,
            )
        )
        if self.config.checkpoint.keep_best and self.best_step() == step:
            self.checkpoints.submit(step, verify=True)
        return result

    def make_previews(self, step: int) -> None:
        """Sample the preview prompts. Whatever goes wrong is reported and never ends the run."""
        if not self.prompts or self._previewed_step == step:
            return
        self.bus.emit(PhaseChanged(step=step, phase="previewing", total=len(self.prompts)))
        self._previewed_step = step
        with self._judged("preview"):
            self.preview(step)

    def preview_ready(self, step: int, file: Path, prompt: str, index: int, seed: int) -> None:
        self.bus.emit(PreviewReady(step=step, file=self.shown(file), prompt=prompt, index=index, seed=seed))

    def finish(self, step: int, status: str) -> tuple[str | None, Path | None]:
        """The way out of a run that is healthy: checkpoint, LoRA; after a full run also validation and previews.

        Returns the checkpoint's name and the LoRA's path.

        Raises:
            AdapterError: no step was applied.
            ResourceError: the result of the run, or all work since an older checkpoint, could not be written.
        """
        applied = 0 if self.trainer is None else self.trainer.state.applied
        checkpoint = self.checkpoints.save_now(step) if step > 0 else None
        if status != "finished" and step > 0 and checkpoint is None and self.is_first:
            raise ResourceError(self._lost(step))
        if applied == 0:
            if status == "finished":
                raise AdapterError(
                    f"The run ended after {step} steps without a single applied one, so there is nothing to save. "
                    "Every step was rejected; the log names why."
                )
            return checkpoint, None
        if status != "finished":
            return checkpoint, self.save_lora(step)
        try:
            lora = self.save_lora(step, self._final_target(step), final=True)
        except ResourceError as error:
            kept = f"The checkpoint {checkpoint} holds the result" if checkpoint else "Its checkpoint is missing too"
            raise ResourceError(
                f"All steps are trained and the run has no LoRA. {error}. {kept}: make room there, or fix the rights, "
                "and resume the run."
            ) from error
        self.validate(step)
        self.make_previews(step)
        return checkpoint, lora

    def _final_target(self, step: int) -> Path:
        """Where the result goes: the name decided at the start, or the next one where a file that is not this run's
        has appeared under it since."""
        from .export import is_of_run

        path, number = self.final_lora, 1
        while os.path.lexists(path) and not is_of_run(path, self.folder.run_id):
            number += 1
            path = self.final_lora.with_name(f"{self.final_lora.stem}-{number}{self.final_lora.suffix}")
        if number > 1:
            text = f"{self.final_lora} was made by someone else during the run and stays; the LoRA is {path.name}."
            self._warn(step, "save", text)
        return path

    def _lost(self, step: int) -> str:
        """What is left of a run whose last state could not be written."""
        older = self.store.newest()
        left = "there is no older one" if older is None else f"the newest is {older.name}"
        return f"The checkpoint of step {step} could not be written (the warning above says why); {left}."

    def shown(self, path: Path) -> str:
        """`path` as events and the record hold it: relative to the run folder where it lies inside."""
        try:
            return path.relative_to(self.folder.path).as_posix()
        except ValueError:
            return str(path)

    def _judged(self, purpose: Purpose) -> AbstractContextManager[None]:
        """The adapter holds the weights that validation or previews are to see (EMA, schedule-free)."""
        return nullcontext() if self.trainer is None else self.trainer.parts.live.evaluation(purpose)

    def _answer_commands(self) -> None:
        """Do what was asked; the answers themselves are emitted by `commands`. Blocks while the run is paused."""
        while True:
            for command in self.commands.poll():
                self._obey(command.cmd)
            self.checkpoints.poll()
            if not self.commands.paused or self.commands.stop_requested:
                return
            time.sleep(_PAUSE_POLL_S)

    def _obey(self, cmd: str) -> None:
        """save and preview act on the state after the last decided step; micro-batches under way do not change it."""
        step = 0 if self.trainer is None else self.trainer.state.step
        if cmd == "save":
            if self.trainer is None or step == 0:
                self._warn(step, "command", "There is nothing to save before the first step.")
                return
            self.checkpoints.submit(step)
            if self.trainer.state.applied > 0:
                self.save_lora(step)
        elif cmd == "preview":
            if not self.prompts:
                self._warn(step, "command", "The run has no preview prompts (preview.prompts).")
            self._previewed_step = -1
            self.make_previews(step)

    def _warn(self, step: int, topic: str, message: str) -> None:
        log.warning("%s", message)
        self.bus.emit(Warned(step=step, topic=topic, message=message))


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
