"""Safe-Scaler as a tab of AUTOMATIC1111's web UI or Forge: put the repository into `extensions/`.

Shows runs of the command line (and of ComfyUI, when pointed at its output folder). Which folder: the setting "Folder of
runs" (Settings, Safe-Scaler), else SAFE_SCALER_OUTPUT, else `output` beside the web UI.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_added = str(ROOT) not in sys.path
if _added:
    sys.path.insert(0, str(ROOT))
from trainer_core.panel import app as panel_app  # noqa: E402
from trainer_core.panel.api import PanelApi  # noqa: E402
from trainer_core.panel.web_app import mount  # noqa: E402

if _added:
    sys.path.remove(str(ROOT))

from modules import script_callbacks, shared  # noqa: E402

SETTING = "safe_scaler_output"


def roots() -> list[Path]:
    """Folders that hold `safe_scaler/<run_id>`."""
    chosen = getattr(shared.opts, SETTING, "") or os.environ.get("SAFE_SCALER_OUTPUT") or "output"
    return [Path(chosen).expanduser()]


def on_ui_tabs() -> list[tuple[Any, str, str]]:
    return [(panel_app.blocks(), "Safe-Scaler", "safe_scaler")]


def on_ui_settings() -> None:
    shared.opts.add_option(
        SETTING,
        shared.OptionInfo("", "Folder of runs (the --output_dir of training)", section=("safe_scaler", "Safe-Scaler")),
    )


def on_app_started(_: Any, app: Any) -> None:
    if app is not None:  # None with --nowebui
        mount(app, PanelApi(roots))


script_callbacks.on_ui_tabs(on_ui_tabs)
script_callbacks.on_ui_settings(on_ui_settings)
script_callbacks.on_app_started(on_app_started)
