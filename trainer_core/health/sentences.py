"""What the user reads for each verdict: what, where, the likely cause, and two things to try."""

from __future__ import annotations

from collections.abc import Sequence

from .culprit import place
from .findings import Finding
from .groups import group_words

_MOST_NAMES = 4

_TEXTS: dict[tuple[str, str], tuple[str, str, str]] = {
    ("TE1-DEAD", "none"): (
        "Text encoder 1 is trained, but no gradient reaches it",
        "its outputs come from a cache or are detached",
        "set dataset.cache_text to auto, or do not train it (optimizer.te1_lr = 0)",
    ),
    ("TE1-DEAD", "zero"): (
        "Text encoder 1 is trained, but all its gradients are exactly 0",
        "the captions are empty, or its outputs do not take part in the loss",
        "look at the captions (safe-scaler scan), or do not train it (optimizer.te1_lr = 0)",
    ),
    ("TE2-DEAD", "none"): (
        "Text encoder 2 is trained, but no gradient reaches it",
        "its outputs come from a cache or are detached",
        "set dataset.cache_text to auto, or do not train it (optimizer.te2_lr = 0)",
    ),
    ("TE2-DEAD", "zero"): (
        "Text encoder 2 is trained, but all its gradients are exactly 0",
        "the captions are empty, or its outputs do not take part in the loss",
        "look at the captions (safe-scaler scan), or do not train it (optimizer.te2_lr = 0)",
    ),
    ("DISCONNECTED", ""): (
        "{tensors:.0f} trained tensors get no gradient at all",
        "a detach, a no_grad, or reentrant checkpointing of a block whose inputs need no gradient",
        "switch precision.gradient_checkpointing off, or take the extension off that changed these layers",
    ),
    ("DISCONNECTED", "between"): (
        "{tensors:.0f} lora_down tensors get no gradient, though lora_up of the same adapters does",
        "the tensor between the two is detached",
        "take the extension off that changed these layers, or report it as a bug with this line",
    ),
    ("DISCONNECTED", "zero"): (
        "{tensors:.0f} trained tensors get a gradient that is exactly 0",
        "what these layers compute does not take part in the loss",
        "leave them out of the targets, or look at captions and masks",
    ),
    ("STALE", "twice"): (
        "{tensors:.0f} trained tensors are in the optimizer more than once: each step would move them twice",
        "two optimizer groups hold the same tensors",
        "resume the run (it makes the optimizer anew), or set health.audit = 'repair'",
    ),
    ("STALE", "dtype"): (
        "{tensors:.0f} trained tensors are not in fp32: small updates would be lost in rounding",
        "something cast the adapter",
        "keep adapter weights in fp32, or set health.audit = 'repair'",
    ),
    ("FROZEN", "rate"): (
        "{tensors:.0f} tensors have had a learning rate of 0 where the schedule says more",
        "something set the optimizer's rate aside",
        "look at schedule and optimizer.*_lr, or resume from the last checkpoint",
    ),
    ("FROZEN", "off"): (
        "{tensors:.0f} tensors that are to be trained have requires_grad off",
        "another part of the program froze the model while it was training",
        "resume from the last checkpoint, or take the extension off that freezes the model",
    ),
    ("DTYPE-CHANGED", ""): (
        "{tensors:.0f} trained tensors changed their number format during the run",
        "a validation or preview pipeline cast the model and took the adapter along",
        "resume from the last checkpoint, or take the extension off that casts the model",
    ),
    ("STATE-LOST", ""): (
        "The optimizer has lost its state: it counts {now:.0f} updates, {before:.0f} were made",
        "the checkpoint that was resumed held none of it, or the optimizer was made anew",
        "resume from an earlier checkpoint, or lower the learning rate for the first hundred steps",
    ),
    ("MISSING-CONTRIBUTION", ""): (
        "Micro-batch {micro_batch:.0f} of a step gave no gradient to {tensors:.0f} tensors that others reached",
        "its forward pass ran without gradients, or its backward pass was skipped",
        "compute with gradient.accumulation = 1, or take the extension off that changes the forward pass",
    ),
    ("EXPLODING", "one spike"): (
        "One gradient norm was {times:.0f} times its usual size ({norm:.3g})",
        "a hard sample; a single one is harmless",
        "nothing, or clip harder (gradient.max_norm)",
    ),
    ("EXPLODING", "spikes"): (
        "Training is exploding: {spikes:.0f} of the last ten gradient norms were far above the usual ({norm:.3g} now)",
        "the learning rate is too high",
        "lower optimizer.learning_rate, or use gradient.clip = 'zclip'",
    ),
    ("EXPLODING", "leap"): (
        "Training is exploding: lora_down moves by {ratio:.0%} of itself in one step, {usual:.1%} was usual",
        "the learning rate is too high",
        "lower optimizer.learning_rate, or begin with a warm-up (schedule.warmup_steps)",
    ),
    ("EXPLODING", "rms"): (
        "Training is exploding: gradients are {rms:.1f} times what the optimizer expects",
        "the learning rate is too high, or the optimizer's state does not fit the weights",
        "lower optimizer.learning_rate, or begin with a warm-up (schedule.warmup_steps)",
    ),
    ("EXPLODING", "rms rising"): (
        "Gradients are {rms:.1f} times what the optimizer expects",
        "the learning rate is near what the run can bear; loss spikes may follow",
        "lower optimizer.learning_rate, or begin with a warm-up (schedule.warmup_steps)",
    ),
    ("EXPLODING", "one coordinate"): (
        "Updates go into few coordinates only (participation {share:.2g})",
        "a few elements have gradients of another size, as after a memory error",
        "watch the next steps, or test the memory (safe-scaler doctor)",
    ),
    ("VANISHING", "zeros"): (
        "Gradients vanish: more than half of the elements are exactly 0 in {tensors:.0f} tensors",
        "they are too small for the number format (fp16 underflow)",
        "set precision.compute = 'bf16', or raise precision.initial_loss_scale",
    ),
    ("VANISHING", "median"): (
        "Gradients have fallen to {share:.1g} of their early size, the loss has not",
        "the group has stopped learning",
        "lower the learning rate and resume from an earlier checkpoint, or leave this group out of the targets",
    ),
    ("STALE", "outside"): (
        "{tensors:.0f} trained tensors are not in the optimizer: they will never move",
        "they were replaced after the optimizer was made",
        "resume the run (it makes the optimizer anew), or set health.audit = 'repair'",
    ),
    ("STALE", "rounding"): (
        "Updates are lost in rounding: only {changed:.0%} of the elements of {tensors:.0f} tensors change in a step",
        "the weights are kept in a format too coarse for this learning rate",
        "keep adapter weights in fp32, or raise optimizer.learning_rate",
    ),
    ("STALE", "unmoved"): (
        "{tensors:.0f} tensors have gradients and a learning rate and do not move",
        "the optimizer updates other tensors, or every update is lost in rounding",
        "resume the run (it makes the optimizer anew), or keep adapter weights in fp32",
    ),
    ("IMBALANCED", "b rate"): (
        "lora_up of {tensors:.0f} adapters is still 0, because its learning rate is 0: these adapters do nothing",
        "an optimizer group without a rate",
        "look at optimizer.loraplus_ratio and the target rules, or use one rate for both factors",
    ),
    ("IMBALANCED", "b gradient"): (
        "lora_up of {tensors:.0f} adapters is still 0, because it gets no gradient other than 0",
        "what the layer computes does not take part in the loss",
        "leave these layers out of the targets, or look at the captions and masks",
    ),
    ("IMBALANCED", "quotient"): (
        "One factor of the adapters moves the layer 10^{q:.1f} times as much as the other",
        "the learning rates of lora_up and lora_down do not fit each other, or alpha is far off",
        "use optimizer.loraplus_ratio between 1 and 16, or alpha between rank / 2 and rank",
    ),
    ("IMBALANCED", "eps"): (
        "The gradients of {tensors:.0f} tensors are so small that the optimizer's eps holds their updates back",
        "the loss is weighted with a tiny number, or gradients are clipped to almost nothing",
        "raise the loss weights (dataset weights, objective.*), or gradient.max_norm",
    ),
    ("COLLAPSING", ""): (
        "Gradients fall steadily ({slope:.4f} powers of ten a step) and the loss does not",
        "the group is saturated or has died",
        "lower the learning rate and resume from an earlier checkpoint, or leave this group out of the targets",
    ),
}


def sentence(finding: Finding) -> str:
    """One plain sentence each for what, where, the likely cause, and two things to try."""
    what, cause, fix = _TEXTS[finding.kind, finding.cause]
    where = location(finding)
    told = f" in {where}" if where else ""
    return f"{what.format(**finding.numbers)}{told}. Likely cause: {cause}. Try: {fix}."


def over(finding: Finding) -> str:
    """What is said when the verdict no longer holds."""
    where = f" ({group_words(finding.subject)})" if finding.subject else ""
    return f"{finding.kind}{where} is over."


def location(finding: Finding) -> str:
    """Where: the group, and the modules when they are few."""
    modules = list(dict.fromkeys(name.partition(".")[0] for name in finding.tensors))
    group = group_words(finding.subject) if finding.subject else ""
    named = named_modules(modules) if modules and finding.kind not in ("VANISHING", "COLLAPSING") else ""
    if finding.subject in ("te1", "te2") and finding.kind.endswith("-DEAD"):
        return ""
    return f"{group}: {named}" if group and named else group or named


def named_modules(modules: Sequence[str]) -> str:
    """The first modules with their block, and how many more there are."""
    shown = ", ".join(place(module) for module in modules[:_MOST_NAMES])
    rest = len(modules) - _MOST_NAMES
    return f"{shown} and {rest} more" if rest > 0 else shown
