"""What an allocation failure looks like, and giving back what can be given back."""

from __future__ import annotations

import gc

import torch

_WORDS = (
    "out of memory",
    "can't allocate memory",  # the CPU allocator
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_NOT_SUPPORTED",  # cuDNN's word when it finds no room for a workspace
    "Unable to find a valid cuDNN algorithm",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory could not be had (torch raises RuntimeErrors of several wordings)."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _WORDS)


def first_line(error: BaseException) -> str:
    """What the allocator said, without its advice."""
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else type(error).__name__


def release(device: torch.device) -> None:
    """Give back what is held without need. Not inside an except block: there the traceback keeps the frames alive,
    and with them every tensor of the failed forward (pytorch/pytorch#18853)."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()
