"""Runs that ComfyUI's queue holds and that have not begun: what the panel's list shows above the running one."""

from __future__ import annotations

from typing import Any

from . import host, live

_MOST = 100
_NAME = 80


def waiting_runs() -> list[dict[str, Any]]:
    """`{prompt_id, graph_id, node_id, name, steps, position, waiting_for}` of every Train node in a prompt that waits.

    `position` counts the prompts before it, the running one included; `waiting_for` is the run that is going on, or
    None while another graph (or nothing of ours) is. `steps` is None where the node leaves them to the purpose.
    """
    current = next(iter(live.live_runs()), None)
    found: list[dict[str, Any]] = []
    for position, (prompt_id, graph, graph_id) in enumerate(host.queued_prompts(), start=1):
        for node_id, node in graph.items():
            if not isinstance(node, dict) or node.get("class_type") != "SafeScalerTrain":
                continue
            inputs = node.get("inputs") or {}
            name, steps = inputs.get("output_name"), inputs.get("steps")
            found.append(
                {
                    "prompt_id": prompt_id,
                    "graph_id": graph_id,
                    "node_id": str(node_id),
                    "name": name[:_NAME] if isinstance(name, str) else "",
                    "steps": steps if isinstance(steps, int) and steps > 0 else None,
                    "position": position,
                    "waiting_for": current,
                }
            )
    return found[:_MOST]
