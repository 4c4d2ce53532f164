"""Why a target rule matched nothing, in four different messages."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from .layer_kinds import Place
from .target_rules import Selector, TargetRule
from .targets import PART_LABELS

_SHOWN = 3


def explain_miss(rule: TargetRule, places: Sequence[Place], trained: Sequence[str], roots: Iterable[nn.Module]) -> str:
    """The reason why `rule` holds for none of the layers that can be trained.

    Args:
        places: every layer of the model that could carry an adapter, in all parts.
        trained: parts that are trained in this run.
        roots: the parts' networks, to find modules that are no layers of that kind.
    """
    elsewhere = [place for place in places if rule.matches(place)]
    if elsewhere:
        return _only_untrained(elsewhere, trained)
    for selector in rule.selectors:
        if not any(selector.matches(place) for place in places):
            return _no_such_layer(selector, places, roots)
    return _never_together(rule, places)


def _only_untrained(found: Sequence[Place], trained: Sequence[str]) -> str:
    counts = Counter(PART_LABELS[place.target.part] for place in found)
    where = " and ".join(f"{count} in {label}" for label, count in counts.items())
    return (
        f"it holds for layers of parts that are not trained only ({where}; trained: "
        f"{', '.join(PART_LABELS[part] for part in trained) or 'nothing'}). "
        "Give these parts a rank and a learning rate above 0"
    )


def _no_such_layer(selector: Selector, places: Sequence[Place], roots: Iterable[nn.Module]) -> str:
    unfit = _modules_without_adapters(selector.text, roots)
    if unfit:
        kinds = ", ".join(f"{count} {name}" for name, count in Counter(kind for _, kind in unfit).most_common(_SHOWN))
        return (
            f"'{selector.text}' names modules that cannot carry an adapter ({kinds}; the first is '{unfit[0][0]}'). "
            "Only linear and convolution layers can"
        )
    return f"no layer of this model is called '{selector.text}'. {_nearest(selector.text, places)}"


def _nearest(text: str, places: Sequence[Place]) -> str:
    """The layers whose names, or ends of names of the same length, are most like `text`."""
    wanted = text.removeprefix("path:").removeprefix("re:").replace("\\", "").strip("*.^$")
    paths = [place.target.path for place in places]
    ends: dict[str, str] = {}
    for path in paths:
        ends.setdefault(".".join(path.split(".")[-1 - wanted.count(".") :]), path)
    near = difflib.get_close_matches(wanted, list(ends), n=_SHOWN, cutoff=0.4)
    if not near:
        return f"Layers are called like {', '.join(paths[:1] + paths[-1:])}"
    return "The nearest are " + ", ".join(f"*{end}" if end != ends[end] else end for end in near)


def _modules_without_adapters(text: str, roots: Iterable[nn.Module]) -> list[tuple[str, str]]:
    if not text.startswith("path:"):
        return []
    globs = text.removeprefix("path:").split(",")
    return [
        (path, type(module).__name__)
        for root in roots
        for path, module in root.named_modules()
        if path and any(fnmatchcase(path, glob) for glob in globs) and not isinstance(module, nn.Linear | nn.Conv2d)
    ]


def _never_together(rule: TargetRule, places: Sequence[Place]) -> str:
    counts = ", ".join(
        f"'{selector.text}' alone holds for {sum(map(selector.matches, places))}" for selector in rule.selectors
    )
    return f"its selectors never hold together ({counts} layers). Take one of them away, or join them with a comma"
