"""ComfyUI front ends to test against: the oldest supported and the newest, unpacked from their Python packages."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "comfyui-frontend-package"
OLDEST = "1.27.10"
NEWEST = "newest"


def static_root(version: str) -> Path | None:
    """The folder to give as `--front-end-root`; None when the package cannot be had here.

    Kept in SAFE_SCALER_FRONT_ENDS (default ~/.cache/safe-scaler/front_ends).
    """
    store = Path(os.environ.get("SAFE_SCALER_FRONT_ENDS") or "~/.cache/safe-scaler/front_ends").expanduser()
    static = store / version / "static"
    if not (static / "index.html").is_file():
        _fetch(version, store / version)
    return static if (static / "index.html").is_file() else None


def _fetch(version: str, target: Path) -> None:
    wanted = PACKAGE if version == NEWEST else f"{PACKAGE}=={version}"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", folder, wanted]
        if subprocess.run(command, capture_output=True, timeout=300).returncode != 0:
            return
        wheel = next(Path(folder).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                # Source maps are two thirds of the package and serve nobody here.
                if name.startswith("comfyui_frontend_package/static/") and not name.endswith(".map"):
                    archive.extract(name, folder)
        target.mkdir(parents=True, exist_ok=True)
        (target / "package.txt").write_text(wheel.name)
        os.rename(Path(folder) / "comfyui_frontend_package" / "static", target / "static")
