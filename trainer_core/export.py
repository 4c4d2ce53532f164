"""Export of the adapter: metadata, file, and the proof that it holds and does what was trained."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from . import __version__
from .config import TrainConfig, trained_parts
from .errors import ModelFileError
from .models.tensor_file import read_header
from .networks.export import ExportedLora, export_lora
from .networks.metadata import FolderFacts, TrainingFacts, build_metadata, model_file_hashes, session_id, tag_frequency
from .resume import data_digest
from .runs.folder import companion_name
from .trainer import TrainerParts, TrainState

if TYPE_CHECKING:
    from .data import Item, ScanReport
    from .models import SDXLModel
    from .validation import Holdout


class Exporter:
    """Writes and proves LoRA files of one run."""

    def __init__(
        self,
        run_id: str,
        config: TrainConfig,
        parts: TrainerParts,
        report: ScanReport,
        holdout: Holdout[Item],
        total_steps: int,
        state: Callable[[], TrainState],
        *,
        workflow: object = None,
    ) -> None:
        self.run_id = run_id
        self.config = config
        self.parts = parts
        self.report = report
        self.holdout = holdout
        self.total_steps = total_steps
        self.state = state
        self.workflow = workflow if workflow is None or isinstance(workflow, str) else json.dumps(workflow)
        self.started_at = time.time()

    def __call__(self, path: Path, step: int, *, require_effect: bool) -> ExportedLora:
        """Write the LoRA of this moment to `path`, replacing an earlier export of this run once the new one is proven.

        `require_effect`: a file that changes nothing is an error.

        Raises:
            AdapterError: a tensor is not finite, or the file fails its proof. An earlier export stays as it is.
        """
        again = os.path.lexists(path)
        target = path.with_name(f".{path.name}.new") if again else path
        if again:
            target.unlink(missing_ok=True)  # of an attempt that was killed
        dtype = self.config.checkpoint.save_precision
        metadata = build_metadata(self.config, self._facts(step))
        with self.parts.live.evaluation("export"):
            exported = export_lora(
                target, self.parts.network, self.parts.model, metadata, dtype=dtype, require_effect=require_effect
            )
        if again:
            os.replace(target, path)
            proof = replace(exported.proof, path=str(path))
            exported = replace(exported, saved=replace(exported.saved, path=path), proof=proof)
        form = self.config.checkpoint.save_format
        if form == "kohya":
            return exported
        note = second_copy(path, self.parts.model, form, dtype, again=again)
        return replace(exported, notes=(*exported.notes, note))

    def _health(self) -> dict[str, float | int | None]:
        """What the run's record says about how it went, in a few numbers."""
        state = self.state()
        return {
            "steps": state.step,
            "applied": state.applied,
            "rejected": state.rejected,
            "rollbacks": state.attempt,
            "loss_avg": state.loss_avg,
        }

    @cached_property
    def _model_hashes(self) -> tuple[str, str] | None:
        return model_file_hashes(self.parts.model.source)

    @cached_property
    def _captions_by_folder(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for item in self.holdout.training:
            found.setdefault(_folder_name(item.file, self.config.dataset.path), []).append(item.caption)
        return found

    def _facts(self, step: int) -> TrainingFacts:
        plan = self.parts.plan
        per_epoch = plan.steps_per_epoch(self.config.gradient.accumulation)
        trained, prior = _folders(self.holdout.training, self.config.dataset.path)
        width, height = self.config.dataset.resolution or (self.parts.model.native_size,) * 2
        return TrainingFacts(
            run_id=self.run_id,
            started_at=self.started_at,
            finished_at=time.time(),
            step=step,
            epoch=step // per_epoch,
            max_train_steps=self.total_steps,
            epochs=-(-self.total_steps // per_epoch),
            batches_per_epoch=plan.micro_batches_per_epoch,
            output_name=self.config.run.output_name,
            parts=trained_parts(self.config),
            prediction_type=self.parts.model.prediction_type,
            resolution=(width, height),
            compute={"fp32": "no"}.get(self.parts.precision.compute, self.parts.precision.compute),
            model_hashes=self._model_hashes,
            folders=trained,
            prior_folders=prior,
            validation_pictures=len(self.holdout.measured) if self.holdout.held_out else 0,
            tag_frequency={name: tag_frequency(captions) for name, captions in self._captions_by_folder.items()},
            buckets=_buckets(self.holdout.training),
            dataset_hash=data_digest(self.report.items),
            health=self._health(),
            workflow=self.workflow,
            version=__version__,
        )


def is_of_run(path: Path, run_id: str) -> bool:
    """Whether a file is a LoRA that this run wrote."""
    try:
        return read_header(path).metadata.get("ss_session_id") == str(session_id(run_id))
    except ModelFileError:
        return False


def second_copy(path: Path, model: SDXLModel, form: str, dtype: str, *, again: bool) -> str:
    """Write the proven kohya file at `path` once more under another format's names, beside it; says where it is.

    `again`: `path` replaced an earlier export of this run, whose copy is replaced too. Else a taken name is not ours
    and becomes `-2`.

    Raises:
        AdapterError: the format has no names for this kind of adapter, or what was read back computes something else.
    """
    from .networks.file_tools import write_as
    from .networks.lora_file import load_lora

    target = path.with_name(companion_name(path, form))
    if again and form == "peft" and target.is_dir():
        shutil.rmtree(target)
    elif again:
        target.unlink(missing_ok=True)
    written = write_as(load_lora(path), path.with_name(f"{path.stem}.{form}{path.suffix}"), model, form, dtype)
    return f"Also written for {form}: {', '.join(str(file) for file in written.paths)} ({written.text})."


def _folder_name(file: str, root: str) -> str:
    parent = Path(file).parent.name
    return parent or Path(root.strip().strip("\"'")).name


def _folders(items: Sequence[Item], root: str) -> tuple[dict[str, FolderFacts], dict[str, FolderFacts]]:
    """Pictures and repeats a folder: (trained, prior)."""
    trained: dict[str, FolderFacts] = {}
    prior: dict[str, FolderFacts] = {}
    for item in items:
        table = prior if item.is_prior else trained
        name = _folder_name(item.file, root)
        known = table.get(name)
        table[name] = FolderFacts(repeats=item.repeats, pictures=1 + (known.pictures if known else 0))
    return trained, prior


def _buckets(items: Sequence[Item]) -> list[tuple[tuple[int, int], int]]:
    counts: dict[tuple[int, int], int] = {}
    for item in items:
        counts[item.bucket] = counts.get(item.bucket, 0) + item.repeats
    return sorted(counts.items())
