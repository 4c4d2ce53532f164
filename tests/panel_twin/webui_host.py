"""A stand-in for AUTOMATIC1111's web UI: runs the extension script as it does, with a real gradio.

Usage: webui_host.py REPOSITORY OUTPUT PORT [USER:PASSWORD]
"""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
# gradio asks its own address whether it answers, through a proxy if one is set.
os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,localhost"
repository, output, port = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
callbacks: dict[str, Callable[..., Any]] = {}
options: dict[str, Any] = {}


class Options:
    def add_option(self, key: str, info: Any) -> None:
        options[key] = info

    def __getattr__(self, key: str) -> Any:
        if key == "safe_scaler_output":
            return output
        raise AttributeError(key)


def fake(name: str, **values: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__.update(values)
    sys.modules[name] = module
    return module


def register(name: str) -> Callable[[Callable[..., Any]], None]:
    return lambda callback: callbacks.__setitem__(name, callback)


names = ("on_ui_tabs", "on_ui_settings", "on_app_started")
script_callbacks = fake("modules.script_callbacks", **{name: register(name) for name in names})
shared = fake("modules.shared", opts=Options(), OptionInfo=lambda default, label, section: (default, label, section))
fake("modules", script_callbacks=script_callbacks, shared=shared)

spec = importlib.util.spec_from_file_location("safe_scaler_webui", repository / "scripts" / "safe_scaler_webui.py")
assert spec is not None
assert spec.loader is not None
spec.loader.exec_module(importlib.util.module_from_spec(spec))
assert str(repository) not in sys.path, "the extension leaves the search path as it was"

import gradio  # noqa: E402

callbacks["on_ui_settings"]()
assert set(options) == {"safe_scaler_output"}
with gradio.Blocks() as demo, gradio.Tabs():
    for interface, label, element in callbacks["on_ui_tabs"]():
        with gradio.TabItem(label, id=element, elem_id=f"tab_{element}"):
            interface.render()
auth = tuple(sys.argv[4].split(":")) if len(sys.argv) > 4 else None
app, _, _ = demo.launch(
    server_name="127.0.0.1", server_port=port, prevent_thread_lock=True, quiet=True, share=False, auth=auth
)
callbacks["on_app_started"](demo, app)
print("up", flush=True)
threading.Event().wait()
