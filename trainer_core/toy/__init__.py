"""The toy SDXL: its pictures, its words, its classifier and the folder it is shipped in.

Nothing heavy is imported here; take what you need from the leaf modules
(`shapes`, `words`, `folder`, `micro`, `classifier`, `demo_data`).
"""

from __future__ import annotations

from pathlib import Path

#: The shipped toy, a diffusers folder (package data). ``load_sdxl("toy")`` reads it.
TOY_FOLDER: Path = Path(__file__).resolve().parent.parent / "assets" / "toy_sdxl"
