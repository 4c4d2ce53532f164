"""Loading SDXL and running its parts (see `loading.py`)."""

from __future__ import annotations
