"""The only module of the pack that imports ComfyUI. Everything is looked up when it is called, never at import."""

# pyright: reportMissingImports=false
# ComfyUI's own modules, which are there only inside it.
from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


def output_folder() -> Path:
    """ComfyUI's output folder (`--output-directory`, `--base-directory` and Docker move it)."""
    import folder_paths

    return Path(folder_paths.get_output_directory())


def temp_folder() -> Path:
    """ComfyUI's temporary folder; it is emptied at start and exit."""
    import folder_paths

    return Path(folder_paths.get_temp_directory())


def input_folder() -> Path:
    import folder_paths

    return Path(folder_paths.get_input_directory())


def resolve_input(name: str) -> Path:
    """A path a user typed; a relative one starts in ComfyUI's input folder."""
    path = Path(name).expanduser()
    return path if path.is_absolute() else input_folder() / path


def file_names(kind: str) -> list[str]:
    """Files of a model kind (checkpoints, vae, loras) as ComfyUI's own lists show them."""
    import folder_paths

    return list(folder_paths.get_filename_list(kind))


def full_path(kind: str, name: str) -> Path | None:
    """The file behind a name of `file_names`; None when there is none. Names cannot leave the kind's folders."""
    import folder_paths

    found = folder_paths.get_full_path(kind, name)
    return None if found is None else Path(found)


def file_stamp(kind: str, name: str) -> str:
    """Something that changes when the file behind `name` does; the name itself where there is no file."""
    path = full_path(kind, name)
    if path is None:
        return name
    found = path.stat()
    return f"{name} {found.st_mtime_ns} {found.st_size}"


def loras_folder() -> Path:
    """Where a finished LoRA goes: `<output>/loras`, one of the folders of LoraLoader's list.

    ComfyUI registers it at start; a host that does not gets it registered here.
    """
    import folder_paths

    folder = output_folder() / "loras"
    known = {Path(path).resolve() for path in folder_paths.get_folder_paths("loras")}
    if folder.resolve() not in known:
        folder_paths.add_model_folder_path("loras", str(folder))
    return folder


def send_event(channel: str, data: dict[str, Any]) -> None:
    """Send strict JSON to all browsers; thread-safe. Nothing happens where no server runs."""
    server = prompt_server()
    if server is not None:
        server.send_sync(channel, data)


def show_pictures(node_id: str, images: list[dict[str, str]]) -> None:
    """Show finished pictures in a node that still runs: the message ComfyUI sends when a node has ended.

    `images`: `{filename, subfolder, type}`, the whole list each time.
    """
    server = prompt_server()
    if server is not None:
        prompt = getattr(server, "last_prompt_id", None)
        data = {"node": node_id, "display_node": node_id, "output": {"images": images}, "prompt_id": prompt}
        server.send_sync("executed", data, server.client_id)


def current_prompt() -> str | None:
    return getattr(prompt_server(), "last_prompt_id", None)


def graph_id(extra_pnginfo: Any) -> str | None:
    """The id a browser gave to its graph (`workflow.id`), from what it sends beside a prompt; None without one."""
    workflow = extra_pnginfo.get("workflow") if isinstance(extra_pnginfo, dict) else None
    found = workflow.get("id") if isinstance(workflow, dict) else None
    return found if isinstance(found, str) and 0 < len(found) <= _LONGEST_ID else None


_LONGEST_ID = 64


QueuedPrompt = tuple[str, dict[str, Any], str | None]
"""(prompt id, graph, graph id)"""


def queued_prompts() -> tuple[list[QueuedPrompt], list[QueuedPrompt]]:
    """The prompts that ComfyUI runs now (one, or none), and those that wait, in the order in which they run."""
    queue = getattr(prompt_server(), "prompt_queue", None)
    if queue is None:
        return [], []
    # The older call copies every graph in depth; the newer one hands out what nobody changes.
    running, waiting = (getattr(queue, "get_current_queue_volatile", None) or queue.get_current_queue)()
    return _in_order(running), _in_order(waiting)


def _in_order(items: list[Any]) -> list[QueuedPrompt]:
    in_order = [item for item in sorted(items, key=lambda item: item[0]) if isinstance(item[2], dict)]
    return [(str(item[1]), item[2], graph_id(_extra_of(item).get("extra_pnginfo"))) for item in in_order]


def is_over(node_id: str) -> bool:
    """Whether a node of the running prompt has its results already (from ComfyUI's cache, or because it ran)."""
    from comfy_execution.progress import NodeState, get_progress_state

    node = get_progress_state().nodes.get(node_id)
    return node is not None and node["state"] in (NodeState.Finished, NodeState.Error)


def _extra_of(item: Any) -> dict[str, Any]:
    extra = item[3] if len(item) > 3 else None
    return extra if isinstance(extra, dict) else {}


def prompt_server() -> Any:
    """ComfyUI's running server; None where there is none (its modules can be imported without one)."""
    from server import PromptServer

    return getattr(PromptServer, "instance", None)


def nothing() -> Any:
    """An output without a value: nodes behind it do not run, and the rest of the graph does."""
    from comfy_execution.graph_utils import ExecutionBlocker

    return ExecutionBlocker(None)


def devices() -> list[str]:
    """Devices a run can be put on, as `run.device` names them."""
    import torch

    gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    mps = getattr(torch.backends, "mps", None)
    return [*gpus, *(["mps"] if mps is not None and mps.is_available() else []), "cpu"]


def keeps_metadata() -> bool:
    """Whether the graph may be stored with results (ComfyUI's --disable-metadata)."""
    from comfy.cli_args import args

    return not getattr(args, "disable_metadata", False)


def free_models() -> None:
    """Unload ComfyUI's models from the device, so that the worker finds it empty. They load again when needed."""
    import comfy.model_management as management

    management.unload_all_models()
    gc.collect()
    management.soft_empty_cache()


def interrupted() -> bool:
    """Whether the user pressed Cancel. Only looks; `raise_if_interrupted` takes it."""
    import comfy.model_management as management

    return bool(management.processing_interrupted())


def raise_if_interrupted() -> None:
    """Raise ComfyUI's interrupt exception, and clear the request, when Cancel was pressed."""
    import comfy.model_management as management

    management.throw_exception_if_processing_interrupted()


def progress_bar() -> Callable[[int, int], None]:
    """`show(done, total)` moves the bar of the node that runs now.

    ComfyUI's bar raises the interrupt exception by itself, which would end the worker before it has saved: here the
    request is put back, for `interrupted` to see.
    """
    import comfy.model_management as management
    import comfy.utils

    bar = comfy.utils.ProgressBar(1)

    def show(done: int, total: int) -> None:
        try:
            bar.update_absolute(done, max(total, 1))
        except management.InterruptProcessingException:
            management.interrupt_current_processing(True)

    return show
