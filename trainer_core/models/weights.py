"""Putting file tensors into a model that was built without memory (on torch's meta device).

Where type and device are already right, the parameter *is* the file's memory map: nothing is copied, nothing is read
before it is touched. Otherwise the tensor is read with a plain read and converted, one at a time, so that no file page
stays in memory next to its converted copy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..errors import ModelFileError
from .sgm_keys import bare_text_name
from .sources import FOLDERS, Slot
from .tensor_file import TORCH_DTYPES, MappedTensors

_PAGE = 4096
LOADABLE = ("F16", "BF16", "F32", "F64", "F8_E4M3", "F8_E5M2")


class Reader:
    """Reads slots of any number of files; keeps maps and handles open while it is used as a context manager."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self._maps: dict[Path, MappedTensors] = {}
        self._handles: dict[Path, BinaryIO] = {}
        self._stack = ExitStack()
        self._ahead: dict[tuple[Path, str], torch.Tensor] = {}
        self._stop = threading.Event()
        # One buffer for all reads: a new one each would leave holes between the weights that stay.
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._stop.set()
        self._stack.close()
        self._maps.clear()
        self._ahead.clear()
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def start_ahead(self, slots: Iterable[Slot]) -> None:
        """Let a second thread touch the mapped pages, so that disk and page faults work while modules are built.

        The thread ends by itself, at once when the load fails. Tensors that must be converted are not its business.
        """
        for slot in sorted(slots, key=lambda slot: (str(slot.file.path), slot.entry.begin)):
            if self._is_straight(slot):
                self._map(slot)
        tensors = list(self._ahead.values())
        threading.Thread(target=_touch_pages, args=(tensors, self._stop), name="touch-weights", daemon=True).start()

    def tensor(self, slot: Slot) -> torch.Tensor:
        """The slot's values in the wanted type, on the wanted device."""
        if self._is_straight(slot):
            values = self._map(slot)
            return values if slot.block is None else values.chunk(3, dim=0)[slot.block]
        stored = self._read(slot)
        if slot.transposed:
            stored = stored.t()
        return torch.empty(stored.shape, dtype=self.dtype, device=self.device).copy_(stored)

    def _is_straight(self, slot: Slot) -> bool:
        """Whether the file's bytes can be the parameter as they are."""
        return TORCH_DTYPES.get(slot.entry.dtype) == self.dtype and self.device.type == "cpu" and not slot.transposed

    def _map(self, slot: Slot) -> torch.Tensor:
        path = slot.file.path
        if path not in self._maps:
            self._maps[path] = MappedTensors(slot.file)
        if (path, slot.key) not in self._ahead:
            self._ahead[path, slot.key] = self._maps[path].get(slot.key)
        return self._ahead[path, slot.key]

    def _read(self, slot: Slot) -> torch.Tensor:
        path = slot.file.path
        if path not in self._handles:
            self._handles[path] = self._stack.enter_context(slot.file.open_raw())
        rows = None
        if slot.block is not None:
            count = slot.shape[0]
            rows = (slot.block * count, (slot.block + 1) * count)
        length = slot.entry.end - slot.entry.begin
        if self._scratch.numel() < length:
            self._scratch = torch.empty(length, dtype=torch.uint8)
        return slot.file.read(slot.key, self._handles[path], rows, self._scratch)


def _touch_pages(tensors: Sequence[torch.Tensor], stop: threading.Event) -> None:
    for tensor in tensors:
        if stop.is_set():
            return
        tensor.reshape(-1).view(torch.uint8)[::_PAGE].sum()  # torch lets other threads run meanwhile


def build_on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """Make a module whose parameters have shapes but no memory."""
    with torch.inference_mode(False), torch.device("meta"), _NoInit():
        return build()


class _NoInit(TorchFunctionMode):
    """Skip `torch.nn.init`: random numbers for weights that are replaced a moment later are a third of the time."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


def check_shapes(part: str, module: nn.Module, slots: Mapping[str, Slot], path: Path) -> dict[str, str]:
    """Match a module's parameters with slots; returns {name in the module: name of the slot}.

    Raises ModelFileError listing what is missing, not placeable or of another shape, before anything is read.
    """
    own = {name: tuple(tensor.shape) for name, tensor in module.named_parameters()}
    wanted = {name: bare_text_name(name) if part in ("te1", "te2") else name for name in own}
    shapes = {wanted[name]: shape for name, shape in own.items()}
    missing = [name for name in shapes if name not in slots]
    unexpected = [name for name in slots if name not in shapes]
    other = [
        f"{name} {list(slots[name].shape)} instead of {list(shape)}"
        for name, shape in shapes.items()
        if name in slots and not _same_shape(slots[name].shape, shape)
    ]
    faults = [
        f"{len(names)} tensors {what} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
        for what, names in (("missing", missing), ("that have no place", unexpected), ("of another size", other))
        if names
    ]
    if faults:
        raise ModelFileError(
            f"'{path}': the {FOLDERS[part]} does not fit its config: {'; '.join(faults)}. The file is "
            "incomplete, or a variant of SDXL with other blocks (such as SSD-1B), or config_dir belongs to another "
            "model. Give a complete SDXL base model.",
            path,
        )
    bad = sorted({slot.entry.dtype for slot in slots.values() if slot.entry.dtype not in LOADABLE})
    if bad:
        raise ModelFileError(
            f"'{path}': the {FOLDERS[part]} holds weights of type {', '.join(bad)} (quantised). "
            "Training needs fp16, bf16 or fp32 weights.",
            path,
        )
    return wanted


def _same_shape(found: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Equal, or a 1x1 convolution that stands for a linear layer (ldm VAEs store attention so)."""
    return found == wanted or (len(found) == 4 and found[2:] == (1, 1) and found[:2] == wanted)


def fill(module: nn.Module, names: Mapping[str, str], slots: Mapping[str, Slot], reader: Reader) -> None:
    """Give a meta module its weights, frozen, in eval mode. `names` is what `check_shapes` returned; `reader` says
    type and device.
    """
    owners = dict(module.named_modules())
    # A host such as ComfyUI may be in inference mode, whose tensors can never take part in training.
    with torch.inference_mode(False):
        for name, slot in _in_file_order(names, slots):
            path, _, leaf = name.rpartition(".")
            values = reader.tensor(slots[slot]).reshape(getattr(owners[path], leaf).shape)
            setattr(owners[path], leaf, nn.Parameter(values, requires_grad=False))
        _make_buffers(module, reader.device)
    module.eval()


def _in_file_order(names: Mapping[str, str], slots: Mapping[str, Slot]) -> Iterator[tuple[str, str]]:
    """Reading front to back is what disks and read-ahead like best."""
    return iter(sorted(names.items(), key=lambda pair: (str(slots[pair[1]].file.path), slots[pair[1]].entry.begin)))


def _make_buffers(module: nn.Module, device: torch.device) -> None:
    """CLIP's position numbers are no weights and stand in no file: count them out."""
    for name, buffer in list(module.named_buffers()):
        if not buffer.is_meta:
            continue
        owner, _, leaf = name.rpartition(".")
        if leaf != "position_ids":
            raise RuntimeError(f"buffer {name} {tuple(buffer.shape)} has no values")
        numbers = torch.arange(buffer.shape[-1], device=device).expand(buffer.shape).contiguous()
        module.get_submodule(owner).register_buffer(leaf, numbers, persistent=False)
