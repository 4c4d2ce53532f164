"""Safe-Scaler for ComfyUI: trains SDXL LoRAs in a graph. `trainer_core` is the trainer, `nodes` what ComfyUI sees."""

from __future__ import annotations

from pathlib import Path

# Inside ComfyUI the package is named by its path. A test runner collects this file as a module of no package, or of one
# named like the folder, and must not get a second copy of everything.
if __package__ and __package__ != Path(__file__).resolve().parent.name:
    from .nodes import NODE_CLASS_MAPPINGS as NODE_CLASS_MAPPINGS
    from .nodes import NODE_DISPLAY_NAME_MAPPINGS as NODE_DISPLAY_NAME_MAPPINGS

WEB_DIRECTORY = "./web"
