"""`safe-scaler doctor`: what this machine has for training, each claim proven by doing it once."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from .console import size
from .runs.platform import is_network_path

LIBRARIES = ("torch", "diffusers", "transformers", "safetensors", "peft", "numpy", "pillow", "psutil")
OPTIONAL = ("nvidia-ml-py", "accelerate", "bitsandbytes", "xformers")

_GIB = 2**30
#: SDXL's UNet and text encoders in a 2-byte format, and room for activations: the least that trains at 1024 px.
_VRAM_ADVICE = (
    (8, "SDXL in bf16 does not fit; train the toy, or at small sizes"),
    (12, "use --gradient_checkpointing"),
)
_MATRIX = 64


def examine(output_dir: Path) -> dict[str, Any]:
    """All facts, JSON-safe. `missing` holds what stops training, `advice` what would make it better."""
    missing: list[str] = []
    advice: list[str] = []
    libraries = {name: _version(name) for name in (*LIBRARIES, *OPTIONAL)}
    missing += [f"the library {name} is not installed" for name in LIBRARIES if libraries[name] is None]
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "executable": sys.executable,
        "libraries": libraries,
        "memory": _memory(advice),
        "disk": _disk(output_dir, missing, advice),
        "devices": _devices(missing, advice) if libraries["torch"] else [],
        "sdxl": _sdxl() if libraries["torch"] else {},
        "missing": missing,
        "advice": advice,
    }
    return facts


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _memory(advice: list[str]) -> dict[str, int]:
    try:
        import psutil
    except ImportError:
        return {}
    memory = psutil.virtual_memory()
    if memory.available < 8 * _GIB:
        advice.append(f"{memory.available / _GIB:.1f} GiB of memory are free; loading SDXL takes about 8 GiB")
    return {"total": memory.total, "free": memory.available}


def _disk(output_dir: Path, missing: list[str], advice: list[str]) -> dict[str, Any]:
    """Free space where results go, and whether a file can be written, flushed, renamed and removed there."""
    wanted = output_dir.expanduser().absolute()
    folder = next((path for path in (wanted, *wanted.parents) if path.exists()), Path.cwd())
    facts: dict[str, Any] = {"folder": str(folder), "free": shutil.disk_usage(folder).free, "writable": True}
    if not folder.is_dir():
        missing.append(f"{folder} is a file. Give a folder (--output_dir)")
        return facts | {"writable": False, "network": is_network_path(folder)}
    try:
        handle, name = tempfile.mkstemp(prefix="safe-scaler-doctor-", dir=folder)
        with os.fdopen(handle, "wb") as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
        renamed = Path(name + ".renamed")
        Path(name).replace(renamed)
        renamed.unlink()
    except OSError as error:
        facts["writable"] = False
        missing.append(f"{folder} cannot be written ({error.strerror}). Give another folder (--output_dir)")
    if facts["writable"] and facts["free"] < 5 * _GIB:
        advice.append(f"{size(facts['free'])} are free in {folder}; caches and checkpoints want 5 GB")
    facts["network"] = is_network_path(folder)
    if facts["network"]:
        advice.append(f"{folder} is on a network drive; a local one is faster and safer for checkpoints")
    return facts


def _devices(missing: list[str], advice: list[str]) -> list[dict[str, Any]]:
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library of torch is missing
        missing.append(f"torch cannot be imported: {error}")
        return []
    devices = [_device("cpu", {"name": platform.processor() or platform.machine(), "threads": torch.get_num_threads()})]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        devices.append(_device(f"cuda:{index}", {"name": properties.name, "total": total, "free": free}))
        advice += [f"{properties.name}: {text}" for limit, text in _VRAM_ADVICE if total < limit * _GIB][:1]
    if torch.backends.mps.is_available():
        devices.append(_device("mps", {"name": "Apple GPU"}))
    if len(devices) == 1:
        advice.append(_no_gpu())
    return devices


def _sdxl() -> dict[str, list[str]]:
    """What SDXL itself takes: trained numbers by rank, and memory at 1024 x 1024, one picture, rank 16, bf16."""
    from .memory.estimate import rank_table, sdxl_need

    return {
        "ranks": rank_table(),
        "recomputed": sdxl_need(recompute=True).lines(),
        "kept": sdxl_need(recompute=False).lines(),
        "profile": _profile(),
    }


def _profile() -> list[str]:
    """What `--hardware.profile auto` would choose here for one picture at 1024 x 1024 and rank 16, and why."""
    from .hardware.profiles import choose, probe

    asked = {"targets": "all transformer layers (kohya's set)", "rank": 16, "batch": 1, "text_cached": True}
    choice = choose("auto", asked, probe())
    return [f"profile for this machine (--hardware.profile auto): {choice.name}", *choice.reasons, *choice.notes]


def _no_gpu() -> str:
    if shutil.which("nvidia-smi"):
        import torch

        if torch.version.cuda is None:
            return f"there is an NVIDIA driver, but torch {torch.__version__} is a CPU build: install a CUDA build"
        return "there is an NVIDIA driver, but torch sees no device: update the driver"
    return "no GPU is seen: the toy trains well on a CPU, a real SDXL takes minutes a step"


def _device(name: str, facts: dict[str, Any]) -> dict[str, Any]:
    return {"device": name, **facts, "formats": {fmt: _proof(name, fmt) for fmt in ("fp32", "bf16", "fp16")}}


def _proof(device: str, number_format: str) -> str:
    """'ok' when a small product with backward in this format agrees with float64 on the CPU, else what went wrong."""
    import torch

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[number_format]
    tolerance = {"fp32": 1e-4, "bf16": 5e-2, "fp16": 1e-2}[number_format]
    steps = torch.arange(_MATRIX * _MATRIX, dtype=torch.float64).reshape(_MATRIX, _MATRIX)
    left, right = torch.sin(steps), torch.cos(steps / 3)
    try:
        a = left.to(device, dtype).requires_grad_()
        b = right.to(device, dtype)
        product = a @ b
        product.float().sum().backward()
        assert a.grad is not None, "backward gives a gradient"
        wrong = (product.detach().cpu().double() - left @ right).abs().max().item()
        wrong_gradient = (a.grad.cpu().double() - right.sum(1).expand(_MATRIX, -1)).abs().max().item()
    except RuntimeError as error:
        return f"fails: {str(error).splitlines()[0]}"
    worst = max(wrong, wrong_gradient) / _MATRIX**0.5
    return "ok" if worst < tolerance else f"wrong by {worst:.2g}"


def report(facts: dict[str, Any]) -> str:
    """The facts as text."""
    libraries: dict[str, str | None] = facts["libraries"]
    memory, disk = facts["memory"], facts["disk"]
    lines = [
        f"Python {facts['python']} on {facts['system']}",
        f"  {facts['executable']}",
        "libraries: "
        + ", ".join(
            f"{name} {version or 'MISSING'}" for name, version in libraries.items() if version or name in LIBRARIES
        ),
    ]
    if memory:
        lines.append(f"memory: {size(memory['free'])} of {size(memory['total'])} free")
    state = "written, flushed, renamed and removed a test file" if disk["writable"] else "CANNOT BE WRITTEN"
    lines.append(f"disk: {size(disk['free'])} free in {disk['folder']}; {state}")
    for device in facts["devices"]:
        room = f", {size(device['free'])} of {size(device['total'])} free" if "total" in device else ""
        lines.append(f"{device['device']}: {device['name']}{room}")
        lines.append("  " + ", ".join(f"{name} {proof}" for name, proof in device["formats"].items()))
    if sdxl := facts["sdxl"]:
        lines.append("trained numbers of SDXL's UNet by rank (share of its parameters):")
        lines += [f"  {line}" for line in sdxl["ranks"]]
        lines.append("memory of SDXL at 1024 x 1024, one picture, rank 16, bf16, texts cached (estimated):")
        lines.append(f"  with --gradient_checkpointing: {'; '.join(sdxl['recomputed'])}")
        lines.append(f"  without: {sdxl['kept'][-2]}; {sdxl['kept'][-1]}")
        lines += ["\n  ".join(sdxl["profile"])]
    lines += [f"missing: {text}" for text in facts["missing"]]
    lines += [f"advice: {text}" for text in facts["advice"]]
    lines.append("Ready to train." if not facts["missing"] else "Not ready to train.")
    return "\n".join(lines)
