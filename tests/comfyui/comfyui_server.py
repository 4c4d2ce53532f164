"""A real ComfyUI as a process of its own, and a client that talks to it as a browser does."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import websocket

ROOT = Path(__file__).resolve().parents[2]
PACK = "pack_under_test"
Graph = dict[str, dict[str, Any]]
Message = dict[str, Any]


def comfyui_path() -> Path | None:
    """The ComfyUI to test against: COMFYUI_PATH, or ~/ComfyUI where it exists."""
    path = Path(os.environ.get("COMFYUI_PATH") or "~/ComfyUI").expanduser()
    return path if (path / "main.py").is_file() else None


def comfyui_python() -> Path | None:
    """The Python that runs it: COMFYUI_PYTHON, or ~/comfy-venv."""
    path = Path(os.environ.get("COMFYUI_PYTHON") or "~/comfy-venv/bin/python").expanduser()
    return path if path.is_file() else None


def missing() -> str:
    """Why these tests cannot run here; empty when they can."""
    if comfyui_path() is None:
        return "no ComfyUI: set COMFYUI_PATH to a checkout"
    if comfyui_python() is None:
        return "no Python for ComfyUI: set COMFYUI_PYTHON"
    return ""


@dataclass
class Outcome:
    """What became of one prompt: node ids that ran and that came from the cache, and every message about it."""

    prompt_id: str
    status: str = ""
    ran: list[str] = field(default_factory=list[str])
    cached: list[str] = field(default_factory=list[str])
    error: str = ""
    messages: list[Message] = field(default_factory=list[Message])
    outputs: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])

    def events(self, *types: str) -> list[dict[str, Any]]:
        """Worker events in order, the ones that came bundled included."""
        found: list[dict[str, Any]] = []
        for message in self.messages:
            if message["type"] == "safe_scaler.event":
                data = message["data"]
                found += [event for event in [*data.get("earlier", []), data["event"]]]
        return [event for event in found if not types or event["type"] in types]

    def shown(self, node: str) -> Message:
        """What the node showed at its end."""
        return self.outputs[node]


@dataclass(frozen=True)
class Unbroken:
    """Twelve steps of `small_graph` without any trouble, with everything that can be made of a run."""

    graph: Graph
    outcome: Outcome
    run_dir: Path
    lora: Path


class ComfyUI:
    """One server process with the pack linked in. `base` becomes its base directory (models, input, output, temp)."""

    def __init__(self, base: Path, *options: str, packs: tuple[Path, ...] = ()) -> None:
        self.base = base
        self.port = _free_port()
        self.client_id = uuid.uuid4().hex
        (base / "custom_nodes").mkdir(parents=True)
        _link(ROOT, base / "custom_nodes" / PACK)
        names = [PACK]
        for pack in packs:
            _link(pack, base / "custom_nodes" / pack.name)
            names.append(pack.name)
        self.log_path = base / "comfyui.log"
        home, python = comfyui_path(), comfyui_python()
        assert home is not None
        self._command = [
            str(python), "main.py", "--cpu", "--port", str(self.port), "--base-directory", str(base),
            "--database-url", "sqlite:///:memory:", "--disable-api-nodes", "--disable-all-custom-nodes",
            "--whitelist-custom-nodes", *names, *options,
        ]  # fmt: skip
        self._home = home
        self._socket: websocket.WebSocket | None = None
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": "", "HF_HUB_OFFLINE": "1"}
        with self.log_path.open("ab") as log:
            return subprocess.Popen(
                self._command, cwd=self._home, stdout=log, stderr=subprocess.STDOUT, env=environment
            )

    def restart(self, how: str, seconds: float = 400) -> None:
        """End the server and start it again, at the same address, and wait until it answers.

        `how`: "exec", as the button of ComfyUI-Manager does it (the process replaces itself; needs the probe pack), or
        the name of a signal, as a terminal (SIGINT), a service or a container (SIGTERM) does it.
        """
        if how == "exec":
            self.post("/probe/restart", {})
            self._wait_until_gone()
        else:
            self.process.send_signal(signal.Signals[how])
            self.process.wait(60)
            self.process = self._start()
        self.wait_until_up(seconds)

    @property
    def output(self) -> Path:
        return self.base / "output"

    @property
    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def _wait_until_gone(self) -> None:
        """Until the process that answers now has closed its socket."""
        assert self._socket is not None
        self._socket.settimeout(60)
        with contextlib.suppress(websocket.WebSocketConnectionClosedException, ConnectionError):
            while self._socket.connected:
                self._socket.recv()

    def wait_until_up(self, seconds: float = 400) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"ComfyUI ended with code {self.process.returncode}:\n{self.log[-3000:]}")
            try:
                self.get("/system_stats")
            except OSError:
                time.sleep(0.3)
            else:
                self._socket = self.connect()
                return
        raise AssertionError(f"ComfyUI is not up after {seconds:.0f} s:\n{self.log[-3000:]}")

    def connect(self, client_id: str | None = None) -> websocket.WebSocket:
        client = websocket.WebSocket()
        client.connect(f"ws://127.0.0.1:{self.port}/ws?clientId={client_id or self.client_id}", timeout=60)
        return client

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as reply:
            return json.loads(reply.read())

    def get_raw(self, path: str) -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as reply:
                return reply.status, reply.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def post(self, path: str, data: Any) -> tuple[int, Any]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", json.dumps(data).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as reply:
                body = reply.read()
                return reply.status, json.loads(body) if body else None
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def queue(self, graph: Graph, extra: dict[str, Any] | None = None) -> Outcome:
        """Queue a graph. AssertionError with the node errors when ComfyUI refuses it."""
        status, reply = self.post("/prompt", {"prompt": graph, "client_id": self.client_id, "extra_data": extra or {}})
        assert status == 200, json.dumps(reply, indent=1)
        assert not reply["node_errors"], json.dumps(reply["node_errors"], indent=1)
        return Outcome(reply["prompt_id"])

    def wait(
        self, outcome: Outcome, on_message: Callable[[Message], object] = lambda _: None, seconds: float = 500
    ) -> Outcome:
        """Read the socket until the prompt is over, or `on_message`, which sees every message, returns True."""
        assert self._socket is not None
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._socket.settimeout(max(0.1, deadline - time.monotonic()))
            frame = self._socket.recv()
            if not isinstance(frame, str):
                continue
            message: Message = json.loads(frame, parse_constant=_no_constant)
            outcome.messages.append(message)
            enough = on_message(message) is True
            if self._take(outcome, message) or enough:
                return outcome
        raise AssertionError(f"the prompt is not over after {seconds:.0f} s:\n{self.log[-3000:]}")

    def run(
        self, graph: Graph, on_message: Callable[[Message], object] = lambda _: None, seconds: float = 500
    ) -> Outcome:
        return self.wait(self.queue(graph), on_message, seconds)

    def _take(self, outcome: Outcome, message: Message) -> bool:
        data = message["data"] or {}
        if data.get("prompt_id") != outcome.prompt_id:
            return False
        kind = message["type"]
        if kind == "executing" and data["node"] is not None:
            outcome.ran.append(data["node"])
        elif kind == "execution_cached":
            outcome.cached += data["nodes"]
        elif kind == "executed" and data.get("output"):
            outcome.outputs[data["node"]] = data["output"]
        elif kind == "execution_error":
            outcome.error, outcome.status = data["exception_message"], "error"
        elif kind == "execution_interrupted":
            outcome.status = "interrupted"
        elif kind == "execution_success":
            outcome.status = "success"
        return kind == "executing" and data["node"] is None

    def interrupt(self) -> None:
        self.post("/interrupt", {})

    def stop(self) -> None:
        if self._socket is not None:
            self._socket.close()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def import_seconds(self) -> float:
        """The import time of the pack as ComfyUI prints it."""
        found = re.search(rf"([\d.]+) seconds(?: \(IMPORT FAILED\))?: .*{PACK}", self.log)
        assert found is not None, self.log[-3000:]
        return float(found[1])


def _no_constant(name: str) -> Any:
    raise AssertionError(f"a message holds {name}, which no browser reads")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _link(source: Path, target: Path) -> None:
    try:
        target.symlink_to(source, target_is_directory=True)
    except OSError:  # Windows without the right to make links
        shutil.copytree(source, target, ignore=shutil.ignore_patterns(".git", ".venv*", "tests"))
