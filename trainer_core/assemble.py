"""Put a run together: scan, load, cache, adapters, optimizer, and the state to go on from."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .config import TrainConfig, trained_parts
from .config_rules_training import weight_problems
from .coverage_check import check_coverage
from .data import (
    BatchLoader,
    BatchPlan,
    Item,
    LatentCache,
    ScanReport,
    StopRequested,
    TextCache,
    captions_to_encode,
    plain_caption,
    scan_dataset,
)
from .device import choose_compute, choose_device
from .distributed.together import Together
from .draws import Draws
from .errors import ConfigError, Problem
from .events import EventBus, PhaseChanged, Resumed, RunStarted, Warned
from .export import Exporter
from .hardware.watch import watch_device
from .health.engine import health_of
from .memory.before_loading import check_need
from .memory.run_memory import memory_of
from .models import SDXLModel, inspect_model, load_sdxl
from .models.soundness import refuse_damaged
from .networks import Network, create_network
from .networks.warm_start import warm_start
from .objective import NoiseSchedule, Objective
from .optim import LiveWeights, Precision, build_optimizer, schedule_problem
from .recovery import Recovery
from .resume import RunIdentity, capture_state, data_digest, restore_state
from .session import Session
from .step_previews import preview_step
from .trainer import Trainer, TrainerParts
from .validation import Holdout, PreviewPrompt, StableValidation, hold_out, read_prompts
from .validation.prompts import size_rule

if TYPE_CHECKING:
    from .distributed.processes import Processes
    from .runs.database import RunDatabase
    from .runs.folder import RunFolder
    from .runs.protocol import Commands

log = logging.getLogger(__name__)

_MOST_WARNINGS = 50


@dataclass
class Assembly:
    session: Session
    trainer: Trainer


def assemble(
    folder: RunFolder,
    stored: dict[str, Any],
    config: TrainConfig,
    *,
    bus: EventBus,
    commands: Commands,
    database: RunDatabase | None,
    processes: Processes | None = None,
) -> Assembly | None:
    """Everything up to the first step. None when a stop was asked for on the way. `database` is process 0's.

    Raises:
        TrainerError: something the user can act on (data, model, device, checkpoint, settings).
    """
    try:
        return _Assembler(folder, stored, config, bus, commands, database, processes).assemble()
    except StopRequested:
        return None


class _Assembler:
    def __init__(
        self,
        folder: RunFolder,
        stored: dict[str, Any],
        config: TrainConfig,
        bus: EventBus,
        commands: Commands,
        database: RunDatabase | None,
        processes: Processes | None,
    ) -> None:
        self.folder = folder
        self.stored = stored
        self.config = config
        self.bus = bus
        self.commands = commands
        self.database = database
        self.together = Together(processes)
        self.device = self.together.device(choose_device(config.run.device))
        self.compute = choose_compute(config.precision.compute, self.device)
        assert config.run.seed is not None, "create_run draws the seed"
        self.draws = Draws(config.run.seed)
        self.parts = trained_parts(config)

    def assemble(self) -> Assembly:
        self.together.wait_for_caches()
        report = self._scan()
        holdout = hold_out(report.items, self.config.validation, self.draws)
        plan = BatchPlan(holdout.training, self.config.dataset.batch_size, self.draws)
        self._warn("validation", holdout.reason)
        self._check_schedule(plan)
        model = self._load()
        latents, texts = self._cache(model, plan, holdout)
        self.together.caches_are_there()
        loader = BatchLoader(plan, latents, texts, self.config.dataset)
        network = self._network(model)
        if self.together.first:
            check_coverage(self.folder, model, network, live_text=texts is None, bus=self.bus)
        objective = self._objective(model)
        optimizer = build_optimizer(
            {part: network.parameters_of(part) for part in network.parts},
            self.config.optimizer,
            network.rate_factors(),
        )
        precision = Precision(
            self.config.precision,
            self.compute,
            self.device,
            gradient=self.config.gradient,
            safety=self.config.safety,
        )
        weights = LiveWeights(optimizer, self.config.optimizer)
        parts = TrainerParts(model, network, optimizer, precision, objective, plan, loader, self.device, weights)
        parts.processes = self.together.processes
        parts.memory = memory_of(parts, self.config, self.bus.emit, lambda: trainer.state.step)
        session, trainer = self._session(parts, report, holdout, latents, texts)
        recovery = Recovery(session, trainer, self.config)
        self.together.check(trainer, session.identity)
        self._resume(session, trainer, report)
        recovery.begin(trainer.state.step)
        watch_device(trainer, recovery)
        if trainer.health is not None:
            trainer.health.audit()
        self._announce(session, trainer, len(holdout.training))
        return Assembly(session, trainer)

    def _scan(self) -> ScanReport:
        info = inspect_model(self.config.model.path, config_dir=self.config.model.config_dir)
        asked = self.config.model.prediction_type
        if trouble := weight_problems(self.config.objective, info.prediction_type if asked == "auto" else asked):
            raise ConfigError(trouble)
        self._phase("scanning")
        report = scan_dataset(
            self.config.dataset,
            self.config.bucket,
            info.native_size,
            progress=lambda done, total, file: self._phase("scanning", done, total, file),
            should_stop=self._stop_asked,
            cache_dir=_cache_folder(self.config),
        )
        self._check_stop()
        lines = [f"left out: {file}: {reason}" for file, reason in report.refused] + list(report.warnings)
        for line in lines[:_MOST_WARNINGS]:
            self._warn("data", line)
        hidden = len(lines) - _MOST_WARNINGS
        if hidden > 0:
            self._warn("data", f"{hidden} more problems are listed by `safe-scaler scan {self.config.dataset.path}`.")
        return report

    def _check_schedule(self, plan: BatchPlan) -> None:
        """The number of steps may follow from the pictures, so what depends on it is checked here too."""
        trouble = schedule_problem(self.config.schedule, total_steps(self.config, plan))
        if trouble is not None:
            fix = "Write fewer steps, or shares such as 0.1, or train longer."
            raise ConfigError([Problem("schedule.warmup_steps", self.config.schedule.warmup_steps, trouble, fix)])

    def _load(self) -> SDXLModel:
        check_need(self.config, self.device, self.compute, self.bus.emit)
        self._phase("loading", detail=self.config.model.path)
        wanted = self.config.model
        terminal: Any = {"auto": "auto", "true": True, "false": False}[wanted.zero_terminal_snr]
        model = load_sdxl(
            wanted.path,
            vae=wanted.vae,
            config_dir=wanted.config_dir,
            dtype={"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.compute],
            device=self.device,
            prediction_type=wanted.prediction_type,
            zero_terminal_snr=terminal,
        )
        refuse_damaged(model)
        for note in model.notes:
            self._warn("model", note)
        self._check_stop()
        return model

    def _cache(self, model: SDXLModel, plan: BatchPlan, holdout: Holdout[Item]) -> tuple[LatentCache, TextCache | None]:
        seen = self._seen(plan)
        self._phase("caching", total=len(seen))
        folder = _cache_folder(self.config)
        latents = LatentCache(folder, model.vae, model.fingerprints["vae"], self.config.dataset)
        for items in (seen, holdout.measured):
            latents.ensure(
                items,
                progress=lambda done, total, file: self._phase("caching", done, total, file),
                should_stop=self._stop_asked,
            )
            self._check_stop()
        for note in latents.notes():
            self._warn("data", note)
        texts = None
        captions = captions_to_encode(chain(seen, holdout.measured))
        if self._texts_are_cached(varied=captions is None):
            data = self.config.dataset
            texts = TextCache(folder, model, data.max_token_length, weighted=data.weighted_captions)
            captions = captions or sorted({plain_caption(item) for item in chain(seen, holdout.measured)})
            texts.ensure(captions, should_stop=self._stop_asked)
            self._check_stop()
        return latents, texts

    def _seen(self, plan: BatchPlan) -> Sequence[Item]:
        """The pictures that the planned steps see: the others are not cached, and it is said."""
        accumulation = self.config.gradient.accumulation
        steps = total_steps(self.config, plan)
        seen = plan.items_seen(steps, accumulation)
        if len(seen) < len(plan.items):
            self._warn(
                "data",
                f"The planned {steps} steps see {len(seen)} of {len(plan.items)} pictures; an epoch has "
                f"{plan.steps_per_epoch(accumulation)} steps. The others are not cached.",
            )
        return seen

    def _texts_are_cached(self, *, varied: bool) -> bool:
        """Cached unless a text encoder is trained or captions differ from epoch to epoch."""
        if self.config.dataset.cache_text != "auto":
            return self.config.dataset.cache_text == "true"
        return not varied and not {"te1", "te2"} & set(self.parts)

    def _network(self, model: SDXLModel) -> Network:
        assert self.config.run.seed is not None
        network = create_network(model, self.config.lora, trained_parts=self.parts, seed=self.config.run.seed)
        if self.config.lora.weights:
            self._warn("network", warm_start(network, self.config.lora.weights))
        network.to(self.device)
        if self.config.precision.gradient_checkpointing:
            model.set_gradient_checkpointing(True)
        return network

    def _objective(self, model: SDXLModel) -> Objective:
        schedule = NoiseSchedule(prediction_type=model.prediction_type, zero_terminal_snr=model.zero_terminal_snr)
        return Objective(schedule.to(self.device), self.config.objective, vae_scale=model.vae_scale)

    def _session(
        self,
        parts: TrainerParts,
        report: ScanReport,
        holdout: Holdout,
        latents: LatentCache,
        texts: TextCache | None,
    ) -> tuple[Session, Trainer]:
        from .checkpoints.store import CheckpointStore

        config = self.config
        total = total_steps(config, parts.plan)
        identity = RunIdentity(config, parts.model.fingerprint, data_digest(report.items), self.together.count)
        session = Session(
            folder=self.folder,
            config=config,
            bus=self.bus,
            commands=self.commands,
            store=CheckpointStore(self.folder.checkpoints, run_id=self.folder.run_id),
            capture=lambda: capture_state(parts, trainer.state, session, identity),
            identity=identity,
            export=Exporter(
                self.folder.run_id,
                config,
                parts,
                report,
                holdout,
                total,
                lambda: trainer.state,
                workflow=self.stored.get("workflow"),
            ),
            final_lora=Path(self.stored["final_lora"]),
            validation=self._validation(parts, holdout, latents, texts),
            prompts=self._prompts(parts.model),
            preview=lambda step: preview_step(session, parts, step, self._warn),
        )
        assert config.run.seed is not None
        trainer = Trainer(
            parts,
            config,
            self.bus,
            total_steps=total,
            seed=config.run.seed,
            should_stop=self.together.should_stop(session),
            after_step=self.together.after_step(session),
        )
        session.trainer = trainer
        if config.health.enabled:
            trainer.health = trainer.keepers["health"] = health_of(trainer, self.database, self.folder.path)
        return session, trainer

    def _validation(
        self, parts: TrainerParts, holdout: Holdout, latents: LatentCache, texts: TextCache | None
    ) -> StableValidation | None:
        if not self.config.validation.enabled or not holdout.measured:
            return None
        plain = BatchLoader.single(latents, self.config.dataset)
        return StableValidation(
            holdout.measured,
            plain,
            parts.objective,
            parts.model,
            parts.network,
            self.draws,
            self.config.validation,
            encode=None if texts is None else texts.encode,
            max_token_length=self.config.dataset.max_token_length,
            weighted_captions=self.config.dataset.weighted_captions,
            compute=parts.precision.autocast,
        )

    def _prompts(self, model: SDXLModel) -> list[PreviewPrompt]:
        prompts, notes = read_prompts(self.config.preview, size_rule(model))
        for note in notes:
            self._warn("preview", note)
        return prompts

    def _resume(self, session: Session, trainer: Trainer, report: ScanReport) -> None:
        found = restore_state(session, trainer, self.together.processes)
        if self.database is None:
            return
        if found is None:
            self.database.resume_at(0)
            return
        self.database.resume_at(trainer.state.step, trainer.state.attempt, found.event_seq)
        self.bus.emit(
            Resumed(
                step=trainer.state.step,
                checkpoint=found.name,
                attempt=trainer.state.attempt,
                differences=found.differences,
                passed_over=found.passed_over,
            )
        )

    def _announce(self, session: Session, trainer: Trainer, pictures: int) -> None:
        self.bus.emit(
            RunStarted(
                step=trainer.state.step,
                total_steps=trainer.total_steps,
                parts=self.parts,
                device=str(self.device),
                precision=trainer.parts.precision.compute,
                pictures=pictures,
                resumed_from=session.resumed_from,
                config_hash=str(self.stored.get("config_hash", "")),
            )
        )

    def _phase(self, phase: str, done: int = 0, total: int = 0, detail: str = "") -> None:
        self.bus.emit(PhaseChanged(phase=phase, done=done, total=total, detail=detail))

    def _warn(self, topic: str, message: str, step: int = 0) -> None:
        self.bus.emit(Warned(step=step, topic=topic, message=message))

    def _stop_asked(self) -> bool:
        self.commands.answer()  # what else was asked for waits for the first step
        return self.commands.stop_requested

    def _check_stop(self) -> None:
        if self._stop_asked():
            raise StopRequested


def total_steps(config: TrainConfig, plan: BatchPlan) -> int:
    """Planned steps: `max_train_steps`, or `max_train_epochs` times the steps of an epoch."""
    if config.run.max_train_steps is not None:
        return config.run.max_train_steps
    assert config.run.max_train_epochs is not None, "checked by config_rules"
    return config.run.max_train_epochs * plan.steps_per_epoch(config.gradient.accumulation)


def _cache_folder(config: TrainConfig) -> Path:
    if config.dataset.cache_dir:
        return Path(config.dataset.cache_dir).expanduser()
    return Path(config.run.output_dir).expanduser() / "safe_scaler" / "cache"
