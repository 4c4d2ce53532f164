"""Runs that ComfyUI's queue holds and that have not begun: what the panel's list shows above the running one."""

from __future__ import annotations

from typing import Any

from . import host, live

_MOST = 100
_NAME = 80


def waiting_runs() -> list[dict[str, Any]]:
    """`{prompt_id, graph_id, node_id, name, steps, position, waiting_for}` of every Train node whose run has not begun.

    `position` counts the prompts before it, the running one included; 0 is the running prompt itself, whose other nodes
    (pictures, layers) come first. `waiting_for` is the run that is going on, or None while another graph (or nothing of
    ours) is. `steps` is None where the node leaves them to the purpose.
    """
    current = next(iter(live.live_runs()), None)
    running, waiting = host.queued_prompts()
    found = [
        _described(prompt, node_id, inputs, 0, None)
        for prompt in running
        for node_id, inputs in _train_nodes(prompt[1])
        if not live.has_begun(prompt[0], node_id) and not host.is_over(node_id)
    ]
    for position, prompt in enumerate(waiting, start=1):
        found += [_described(prompt, node, inputs, position, current) for node, inputs in _train_nodes(prompt[1])]
    return found[:_MOST]


def _train_nodes(graph: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Id and inputs of each of them."""
    return [
        (str(node_id), node.get("inputs") or {})
        for node_id, node in graph.items()
        if isinstance(node, dict) and node.get("class_type") == "SafeScalerTrain"
    ]


def _described(
    prompt: host.QueuedPrompt, node_id: str, inputs: dict[str, Any], position: int, current: str | None
) -> dict[str, Any]:
    name, steps = inputs.get("output_name"), inputs.get("steps")
    return {
        "prompt_id": prompt[0],
        "graph_id": prompt[2],
        "node_id": node_id,
        "name": name[:_NAME] if isinstance(name, str) else "",
        "steps": steps if isinstance(steps, int) and steps > 0 else None,
        "position": position,
        "waiting_for": current,
    }
