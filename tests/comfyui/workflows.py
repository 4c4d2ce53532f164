"""From a saved workflow to the form that /prompt takes, as the front end does it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Graph = dict[str, dict[str, Any]]

_WIDGETS = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")
_NOTES = ("Note", "MarkdownNote")
_OFF = (2, 4)
"""Muted and bypassed."""


def load_workflow(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))


def classes_of(workflow: dict[str, Any]) -> set[str]:
    """Node classes that must exist in the server."""
    return {node["type"] for node in workflow["nodes"]} - set(_NOTES)


def to_prompt(workflow: dict[str, Any], object_info: dict[str, Any]) -> Graph:
    """The graph of everything that is switched on. AssertionError when widget values do not fit the declarations."""
    links = {link[0]: [str(link[1]), link[2]] for link in workflow["links"]}
    graph: Graph = {}
    for node in workflow["nodes"]:
        if node["type"] in _NOTES or node["mode"] in _OFF:
            continue
        values = _widget_values(node, object_info[node["type"]]["input"])
        linked = {slot["name"]: links[slot["link"]] for slot in node["inputs"] if slot["link"] is not None}
        graph[str(node["id"])] = {"class_type": node["type"], "inputs": {**values, **linked}}
    return graph


def _widget_values(node: dict[str, Any], declared: dict[str, Any]) -> dict[str, Any]:
    names: list[str] = []
    for part in ("required", "optional"):
        for name, declaration in declared.get(part, {}).items():
            kind, options = declaration[0], declaration[1] if len(declaration) > 1 else {}
            if (isinstance(kind, list) or kind in _WIDGETS) and not options.get("forceInput"):
                names.append(name)
                if name in ("seed", "noise_seed"):
                    names.append("")  # control_after_generate, which is the front end's own
    values = node["widgets_values"]
    assert len(values) == len(names), f"{node['type']}: {len(values)} values for {len(names)} widgets"
    return {name: value for name, value in zip(names, values, strict=True) if name}
