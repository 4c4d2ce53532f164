"""The faults: twelve recipes of docs/gradient_health.md and a reserve. Each says what must be noticed, and how soon."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from . import inject
from .site import Planted, Site

Sections = Mapping[str, Mapping[str, Any]]

FROZEN_ENCODERS: Sections = {"optimizer": {"te1_lr": 0.0, "te2_lr": 0.0}}
TRAINED_ENCODERS: Sections = {"optimizer": {"te1_lr": None, "te2_lr": None}}


@dataclass(frozen=True)
class Fault:
    """`verdicts`: right answers, `horizon`: steps after the onset within which one of them must come first.

    `sections`: settings of the run. `early`: the fault is there from the beginning (the audit would find it at once).
    `transient`: the run can end well all the same. `named`: the culprit must be named.
    """

    name: str
    recipe: str
    title: str
    verdicts: tuple[str, ...]
    horizon: int
    inject: Callable[[Site], Planted]
    early: bool = False
    transient: bool = False
    named: bool = True
    sections: Sections = field(default_factory=dict)


_SAMPLES_3 = 32
"""Three full measurements, ten steps apart."""

FAULTS: tuple[Fault, ...] = (
    Fault("cut-adapter", "F1", "the tensor between the factors of two adapters is detached", ("DISCONNECTED",), 9,
          inject.cut_adapters, early=True, sections=FROZEN_ENCODERS),
    Fault("reentrant-checkpoint", "F2", "a block runs in a reentrant checkpoint whose inputs need no gradient",
          ("DISCONNECTED",), 9, inject.reentrant_checkpoint, early=True, sections=FROZEN_ENCODERS),
    Fault("orphaned-parameters", "F3", "a third of the tensors is replaced after the optimizer was made", ("STALE",),
          _SAMPLES_3, inject.orphaned_parameters, early=True, sections=FROZEN_ENCODERS),
    Fault("te2-detached", "F4", "text encoder 2 is trained, but its outputs are detached", ("TE2-DEAD",), 9,
          inject.te2_detached, early=True, sections=TRAINED_ENCODERS),
    Fault("nan-latent", "F5", "one picture's latents are NaN in one step", ("NON-FINITE",), 1, inject.nan_latent,
          transient=True, sections=FROZEN_ENCODERS),
    Fault("corrupt-pictures", "F6", "the latents of some pictures stay NaN", ("NON-FINITE",), 5,
          inject.corrupt_pictures, transient=True, sections=FROZEN_ENCODERS),
    Fault("lr-times-200", "F7", "the learning rate is 200 times what it was", ("EXPLODING",), 10,
          inject.lr_times_200, named=False, sections=FROZEN_ENCODERS),
    Fault("underflow", "F8", "gradients are too small for fp16", ("VANISHING",), _SAMPLES_3 + 1, inject.underflow,
          named=False, sections=FROZEN_ENCODERS),
    Fault("b-rate-zero", "F9", "lora_up has a learning rate of 0", ("IMBALANCED",), 22, inject.b_rate_zero, early=True,
          sections=FROZEN_ENCODERS),
    Fault("clip-tiny", "F10", "the clip norm is a thousandth of the usual gradient norm", ("CLIP-SATURATED",), 52,
          inject.clip_tiny, named=False, sections=FROZEN_ENCODERS),
    Fault("bf16-weights", "F11", "adapter weights are stored in bf16 at a rate of 1e-6", ("STALE",), _SAMPLES_3,
          inject.bf16_weights, early=True,
          sections={"optimizer": {"te1_lr": 0.0, "te2_lr": 0.0, "learning_rate": 1e-6}}),
    Fault("bit-flip", "F12", "the highest exponent bit of one gradient element flips", ("NON-FINITE", "EXPLODING"), 1,
          inject.bit_flip, transient=True, named=False, sections=FROZEN_ENCODERS),
    Fault("lr-stuck-zero", "R1", "the learning rate stays at 0", ("FROZEN",), 6, inject.lr_stuck_zero, named=False,
          sections=FROZEN_ENCODERS),
    Fault("state-dropped", "R2", "the optimizer's state is lost", ("STATE-LOST",), 11, inject.state_dropped,
          transient=True, named=False, sections=FROZEN_ENCODERS),
    Fault("adapter-cast", "R3", "a pipeline casts the adapter to bf16 during the run", ("DTYPE-CHANGED",), 1,
          inject.adapter_cast, named=False, sections=FROZEN_ENCODERS),
    Fault("requires-grad-off", "R4", "requires_grad is switched off for some adapters", ("FROZEN",), 6,
          inject.requires_grad_off, sections=FROZEN_ENCODERS),
    Fault("nan-weight", "R5", "one trained weight becomes NaN", ("NON-FINITE",), 1, inject.nan_weight, transient=True,
          sections=FROZEN_ENCODERS),
    Fault("lost-micro-batch", "R6", "the backward pass of one micro-batch is skipped", ("MISSING-CONTRIBUTION",), 1,
          inject.lost_micro_batch, named=False,
          sections={**FROZEN_ENCODERS, "gradient": {"accumulation": 2}, "health": {"fire_counters": True}}),
)  # fmt: skip


@dataclass(frozen=True)
class Lookalike:
    """A healthy run that naive rules call ill."""

    name: str
    recipe: str
    title: str
    inject: Callable[[Site], Planted] = inject.nothing
    sections: Sections = field(default_factory=dict)


LOOKALIKES: tuple[Lookalike, ...] = (
    Lookalike("fresh-adapter", "H1", "lora_up begins at 0, so lora_down has no gradient at first",
              sections=FROZEN_ENCODERS),
    Lookalike("warm-up-cosine", "H2", "the rate begins at 0 and ends near 0",
              sections={**FROZEN_ENCODERS, "schedule": {"type": "cosine", "warmup_steps": 20}}),
    Lookalike("encoders-trained", "H3", "text encoder 1's last layer never gets a gradient", sections=TRAINED_ENCODERS),
    Lookalike("captions-dropped", "H4", "a third of the captions is dropped, with embeddings of zeros",
              inject.zero_embeddings, {**TRAINED_ENCODERS, "dataset": {"caption_dropout": 0.3}}),
    Lookalike("tiny-loss", "H5", "the loss is weighted with 1e-5", inject.tiny_loss, FROZEN_ENCODERS),
    Lookalike("accumulation", "H6", "four micro-batches a step",
              sections={**FROZEN_ENCODERS, "gradient": {"accumulation": 4}, "dataset": {"batch_size": 1}}),
    Lookalike("scale-search", "C1", "fp16 looks for its loss scale: five overflows", inject.first_overflows,
              FROZEN_ENCODERS),
    Lookalike("batch-1-min-snr", "C2", "batch 1 with min-SNR weights: noisy norms",
              sections={**FROZEN_ENCODERS, "dataset": {"batch_size": 1}, "objective": {"min_snr_gamma": 5.0}}),
    Lookalike("harmless-clamp", "C3", "adapter outputs are clamped at 16",
              sections={**FROZEN_ENCODERS, "lora": {"clamp": 16.0}}),
)  # fmt: skip


def find_fault(name: str) -> Fault | None:
    """The fault called `name`, or by its recipe (F1 ... R6)."""
    return next((fault for fault in FAULTS if name.lower() in (fault.name, fault.recipe.lower())), None)
