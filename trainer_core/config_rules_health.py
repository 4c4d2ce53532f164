"""Rules of gradient health: unknown verdict names, thresholds that cannot be, settings that contradict each other."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from importlib.util import find_spec

from .config import PARTS, TrainConfig, trained_parts
from .config_fields import did_you_mean
from .config_freezing import parse_stop
from .config_health import STOPPABLE, VERDICTS
from .errors import Problem

Found = Iterator[Problem]


def _names(config: TrainConfig) -> Found:
    health = config.health
    for field in ("ignore", "stop_on"):
        for name in getattr(health, field):
            if name not in VERDICTS:
                known = f"Known are {', '.join(VERDICTS)}."
                yield Problem(f"health.{field}", name, "is no verdict", did_you_mean(name.upper(), VERDICTS, known))
    for name in health.stop_on:
        if name in VERDICTS and name not in STOPPABLE:
            why = "cannot end a run by itself: the safe scaler and its ladder, or clipping, act on it"
            yield Problem("health.stop_on", name, why, f"Take it out; possible are {', '.join(STOPPABLE)}.")
    for name in sorted(set(health.stop_on) & set(health.ignore)):
        why = "is in health.ignore too: a verdict that is never spoken ends no run"
        yield Problem("health.stop_on", name, why, "Keep it in one of the two.")


def _thresholds(config: TrainConfig) -> Found:
    health = config.health
    if health.rms_warn > health.rms_alarm:
        why = f"is above health.rms_alarm = {health.rms_alarm:g}: the alarm would come before the warning"
        yield Problem("health.rms_warn", health.rms_warn, why, "Write 4 and 8, or any two in this order.")
    if health.slow_every_early > health.slow_every:
        why = f"is above health.slow_every = {health.slow_every}: the beginning would be measured less than the rest"
        yield Problem("health.slow_every_early", health.slow_every_early, why, "Write 10 and 50, or both the same.")
    if 0 < health.ring_steps < 64:
        why = "is too short to tell anything after a crash"
        yield Problem("health.ring_steps", health.ring_steps, why, "Write at least 64, or 0 for none.")


def _contradictions(config: TrainConfig) -> Found:
    health = config.health
    if health.enabled:
        wanted = (("prometheus_port", health.prometheus_port, "prometheus_client", "prometheus-client"),
                  ("tensorboard", health.tensorboard, "tensorboard", "tensorboard"))  # fmt: skip
        for field, value, module, package in wanted:
            if value and find_spec(module) is None:
                why = f"needs the library {package}, which is not installed here"
                yield Problem(f"health.{field}", value, why, f"pip install {package}, or the extra 'metrics'.")
        return
    for field in ("stop_on", "fire_counters", "prometheus_port", "tensorboard", "export_json"):
        if value := getattr(health, field):
            why = "has no effect: health.enabled is off"
            yield Problem(f"health.{field}", value, why, "Switch health.enabled on, or unset it.")


def _freezing(config: TrainConfig) -> Found:
    freezing = config.freezing
    for entry in freezing.stop_after:
        fix = "Write TARGET:STEP or TARGET:SHARE, such as te1:0.3 or up0:500."
        try:
            target, _ = parse_stop(entry)
        except ValueError:
            yield Problem("freezing.stop_after", entry, "names no target and step", fix)
            continue
        if target in PARTS and target not in trained_parts(config):
            yield Problem("freezing.stop_after", entry, f"{target} is not trained at all", "Take it out.")
        elif target not in PARTS and not _TARGET.fullmatch(target):
            known = (
                "Targets are unet, te1, te2, down0 to down2, mid, up0 to up2, these also with .self .cross .ff .conv."
            )
            yield Problem("freezing.stop_after", entry, f"{target!r} is no part, block or group", known)
    if freezing.rule != "off" and not config.health.enabled:
        why = "needs the measurements of gradient health, and health.enabled is off"
        yield Problem("freezing.rule", freezing.rule, why, "Switch health.enabled on.")
    if freezing.stop_after and not config.health.enabled:
        why = "is carried out by gradient health, and health.enabled is off"
        yield Problem("freezing.stop_after", freezing.stop_after, why, "Switch health.enabled on.")


_TARGET = re.compile(r"(?:(?:down|up)[0-2]|mid)(?:\.(?:self|cross|ff|proj|conv))?")

HEALTH_RULES: tuple[Callable[[TrainConfig], Found], ...] = (_names, _thresholds, _contradictions, _freezing)
