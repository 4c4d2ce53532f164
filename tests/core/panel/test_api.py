"""The panel's HTTP requests: what they tell, what they change, and what they refuse."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from trainer_core.events import PhaseChanged, to_wire
from trainer_core.panel.api import PanelApi
from trainer_core.panel.exchange import MAX_BODY, Reply, Request
from trainer_core.runs.database import RunDatabase
from trainer_core.runs.folder import RunFolder

_SPEC = importlib.util.spec_from_file_location("panel_recorded_run", Path(__file__).with_name("recorded_run.py"))
assert _SPEC is not None
assert _SPEC.loader is not None
runs = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(runs)

RUN = "20261129T171500Z-1a2b"
ROOT = Path(__file__).resolve().parents[3]


@dataclass
class Answer:
    ok: bool = True
    message: str = "taken"
    answered: bool = True


class FollowedRun:
    def __init__(self) -> None:
        self.sent: list[str] = []
        self.last_event: dict[str, Any] | None = None

    def send(self, cmd: str, args: Mapping[str, Any] | None = None) -> Answer:
        self.sent.append(cmd)
        return Answer()


def api(output: Path) -> PanelApi:
    return PanelApi(lambda: [output])


def get(panel: PanelApi, path: str, *, headers: dict[str, str] | None = None, **query: str) -> Reply:
    return panel.handle(Request("GET", path, query, headers or {}))


def send(panel: PanelApi, method: str, path: str, body: Any, **headers: str) -> Reply:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    given = {"content-type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    return panel.handle(Request(method, path, {}, given, raw))


def code(reply: Reply) -> tuple[int, str]:
    return reply.status, reply.data["error"]["code"]


def test_the_list_names_runs_newest_first_and_no_path(tmp_path: Path) -> None:
    runs.make_run(tmp_path, runs.finished())
    runs.make_run(tmp_path, run_id="20261130T000000Z-ffff", steps=3)
    reply = get(api(tmp_path), "/runs")
    assert [(run["run_id"], run["state"], run["step"]) for run in reply.data["runs"]] == [
        ("20261130T000000Z-ffff", "interrupted", 3),
        (RUN, "finished", 10),
    ]
    assert reply.data["runs"][1]["name"] == "cat"
    assert str(tmp_path) not in reply.body().decode()


def test_a_run_that_changed_is_read_again(tmp_path: Path) -> None:
    folder = runs.make_run(tmp_path, steps=3)
    panel = api(tmp_path)
    assert get(panel, f"/runs/{RUN}").data["state"] == "interrupted"
    with folder.lock():
        assert get(panel, f"/runs/{RUN}").data["state"] == "running"
        with RunDatabase(folder.database_path) as database:
            database(to_wire(runs.finished(), seq=database.last_seq() + 1, run_id=RUN))
    assert get(panel, f"/runs/{RUN}").data["state"] == "finished"


def test_a_run_whose_worker_is_only_starting_is_no_interrupted_one(tmp_path: Path) -> None:
    runs.make_run(tmp_path, steps=3)
    followed = FollowedRun()
    panel = PanelApi(lambda: [tmp_path], lambda: {RUN: followed})
    assert get(panel, f"/runs/{RUN}").data["state"] == "running"
    assert get(panel, f"/runs/{RUN}/snapshot").data["run"]["state"] == "running"
    followed.last_event = {"type": "RunFinished"}
    assert get(panel, f"/runs/{RUN}").data["state"] == "interrupted"


def test_a_snapshot_tells_the_whole_run(tmp_path: Path) -> None:
    runs.make_run(tmp_path, runs.finished())
    reply = get(api(tmp_path), f"/runs/{RUN}/snapshot")
    data = reply.data
    assert data["run"]["state"] == "finished"
    assert data["run"]["total_steps"] == 20
    assert data["run"]["lora"] == "cat.safetensors"
    assert data["seq"] >= 10
    curves = data["curves"]
    assert curves["stride"] == 1
    assert curves["steps"] == list(range(1, 11))
    assert curves["metrics"]["loss"]["min"][:5] == [1.0, 0.5, pytest.approx(1 / 3), 0.25, None]
    assert curves["rejected"] == [5]
    assert curves["lr"]["te1"][0] == 5e-5
    assert data["validation"] == [{"step": 0, "mean": 0.4, "bands": [0.3, 0.5], "pictures": 2, "seconds": 1.0}]
    assert data["previews"][0]["id"] == "10-0"
    assert data["checkpoints"][0]["name"] == "step-00000010"
    kinds = [event["type"] for event in data["events"]]
    assert kinds == ["RunStarted", "ValidationFinished", "StepRejected", "CheckpointSaved", "LoraSaved", "Warned",
                     "RunFinished"]  # fmt: skip
    assert data["events"][2]["data"]["nonfinite"] == ["loss", "grad_norm"]
    assert data["health"]["step"] == 10
    assert [row["module"] for row in data["health"]["rows"]] == ["te1", "unet.down"]
    assert data["health"]["norms"]["unet.down"] == [[8, 0.4], [10, 0.5]]
    assert data["phase"] is None
    assert data["events"][5]["data"]["message"] == "lora/cat.safetensors could not be written"
    text = reply.body().decode()
    assert "somebody" not in text
    assert str(tmp_path) not in text


def test_a_run_that_goes_on_has_no_phase_of_its_last_attempt(tmp_path: Path) -> None:
    """Its worker is being started: "Saving" was true before it stopped."""
    folder = runs.make_run(tmp_path, PhaseChanged(step=10, phase="saving"))
    assert get(api(tmp_path), f"/runs/{RUN}/snapshot").data["phase"]["phase"] == "saving"
    with RunDatabase(folder.database_path) as database:
        database(to_wire(runs.finished(), seq=database.last_seq() + 1, run_id=RUN))
    panel = PanelApi(lambda: [tmp_path], lambda: {RUN: FollowedRun()})
    data = get(panel, f"/runs/{RUN}/snapshot").data
    assert (data["run"]["state"], data["phase"]) == ("running", None)


def test_a_snapshot_has_the_newest_step_and_knows_that_training_went_on(tmp_path: Path) -> None:
    """A tab that is opened late shows the time left, and not the preview of some steps ago."""
    runs.make_run(tmp_path, PhaseChanged(step=10, phase="previewing", total=1), runs.step(11), runs.rejected(12))
    data = get(api(tmp_path), f"/runs/{RUN}/snapshot").data
    assert data["phase"]["phase"] == "training"
    assert (data["last"]["applied"], data["last"]["eta_seconds"], data["last"]["loss_avg"]) == (11, 3.0, 0.5)
    assert data["last"]["lr"] == {"unet": 1e-4, "te1": 5e-5}


def test_a_run_tells_the_nodes_it_was_begun_from_and_those_that_follow_it(tmp_path: Path) -> None:
    folder = runs.make_run(tmp_path)

    def places(panel: PanelApi) -> list[Any]:
        told = get(panel, f"/runs/{RUN}").data
        return [told["graph_id"], told["node_ids"]]

    assert places(api(tmp_path)) == [None, []]
    folder.write_config({**folder.read_config(), "shown_in": {"graph_id": "g", "node_ids": ["5", "4"]}})
    assert places(api(tmp_path)) == ["g", ["5", "4"]]
    followed = FollowedRun()
    followed.graph_id, followed.node_ids = "other", ("7",)  # type: ignore[attr-defined]
    assert places(PanelApi(lambda: [tmp_path], lambda: {RUN: followed})) == ["other", ["7"]]
    folder.write_config({**folder.read_config(), "shown_in": ["no", "object"]})
    assert places(api(tmp_path)) == [None, []]


def test_curves_of_a_long_run_keep_every_extreme(tmp_path: Path) -> None:
    folder = runs.make_run(tmp_path, *[runs.step(n, 9.0 if n == 777 else 1.0 / n) for n in range(11, 1001)])
    data = get(api(tmp_path), f"/runs/{RUN}/snapshot", points="100").data["curves"]
    assert data["stride"] == 16
    assert len(data["steps"]) <= 100
    assert max(data["metrics"]["loss"]["max"]) == 9.0
    assert data["steps"][data["metrics"]["loss"]["max"].index(9.0)] == 1 + (776 // 16) * 16
    assert folder.path.exists()


def test_a_run_without_a_record_has_an_empty_snapshot(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, RUN)
    folder.write_config({"run_id": RUN, "config": {}})
    data = get(api(tmp_path), f"/runs/{RUN}/snapshot").data
    assert data["seq"] == 0
    assert data["curves"] is None
    assert data["run"]["problem"] == ""
    news = get(api(tmp_path), f"/runs/{RUN}/updates")
    assert (news.status, news.data["events"]) == (200, [])
    folder.database_path.touch()  # its worker is about to fill it
    with folder.lock():
        news = get(api(tmp_path), f"/runs/{RUN}/updates")
        assert (news.status, news.data["events"]) == (200, [])
    folder.database_path.write_bytes(b"no database at all" * 100)
    assert code(get(api(tmp_path), f"/runs/{RUN}/updates")) == (422, "problem")
    assert "run.db" in get(api(tmp_path), f"/runs/{RUN}/snapshot").data["run"]["problem"]


def test_updates_continue_a_snapshot_without_gap_or_repeat(tmp_path: Path) -> None:
    folder = runs.make_run(tmp_path)
    panel = api(tmp_path)
    seq = get(panel, f"/runs/{RUN}/snapshot").data["seq"]
    assert get(panel, f"/runs/{RUN}/updates", after_seq=str(seq)).data["events"] == []
    from trainer_core.events import to_wire

    with RunDatabase(folder.database_path) as database:
        for number, event in enumerate((runs.step(11), runs.rejected(12), runs.step(13)), seq + 1):
            database(to_wire(event, seq=number, run_id=RUN))
    events = get(panel, f"/runs/{RUN}/updates", after_seq=str(seq), after_step="10").data["events"]
    assert [(event["type"], event["step"]) for event in events] == [
        ("StepFinished", 11),
        ("StepRejected", 12),
        ("StepFinished", 13),
    ]
    assert events[0]["data"]["lr"] == {"unet": 1e-4, "te1": 5e-5}
    assert events[1]["data"]["culprits"] == ["unet.mid"]


def test_previews_are_served_by_id(tmp_path: Path) -> None:
    runs.make_run(tmp_path)
    panel = api(tmp_path)
    assert get(panel, f"/runs/{RUN}/previews").data["previews"][0]["prompt"] == "a <b>cat</b>"
    reply = get(panel, f"/runs/{RUN}/previews/10-0")
    assert (reply.content_type, reply.file is not None) == ("image/png", True)
    assert code(get(panel, f"/runs/{RUN}/previews/10-1")) == (404, "no_such_preview")


@pytest.mark.parametrize("target", ["../config.json", "../../../outside.png", "previews/text.png", "previews/link.png"])
def test_a_record_from_elsewhere_cannot_name_other_files(tmp_path: Path, target: str) -> None:
    folder = runs.make_run(tmp_path)
    outside = tmp_path.parent / "outside.png"
    outside.write_bytes((folder.previews / "step-00000010-0.png").read_bytes())
    (folder.previews / "text.png").write_text("no picture")
    (folder.previews / "link.png").symlink_to(outside)
    with RunDatabase(folder.database_path) as database, database._connection as connection:
        connection.execute("UPDATE previews SET file = ?", (target,))
    assert code(get(api(tmp_path), f"/runs/{RUN}/previews/10-0")) == (404, "no_such_preview")


@pytest.mark.parametrize(
    "run_id", ["..", "../..", "%2e%2e", "..\\..", "20261129T171500Z-1a2b/..", "20261129T171500Z-1a2b\n", "cache",
               "20261129T171500Z-0000", "", "C:", "\0", "x" * 5000]
)  # fmt: skip
@pytest.mark.parametrize("rest", ["", "/snapshot", "/previews/10-0", "/report", "/disk"])
def test_what_is_no_run_id_is_refused(tmp_path: Path, run_id: str, rest: str) -> None:
    runs.make_run(tmp_path)
    (tmp_path / "safe_scaler" / "cache").mkdir()
    (tmp_path / "safe_scaler" / "cache" / "config.json").write_text("{}")
    reply = get(api(tmp_path), f"/runs/{run_id}{rest}")
    assert code(reply) in ((404, "no_such_run"), (404, "no_such_route"), (404, "no_such_preview"))


def test_requests_of_foreign_pages_are_refused(tmp_path: Path) -> None:
    runs.make_run(tmp_path)
    panel = api(tmp_path)
    host = {"host": "127.0.0.1:8188"}
    for origin in (
        "http://evil.example",
        "null",
        "http://127.0.0.1:9999",
        "http://localhost:8188",
        "file://",
        "http://[",
    ):
        assert code(get(panel, "/runs", headers={**host, "origin": origin})) == (403, "foreign_origin"), origin
    assert code(get(panel, "/runs", headers={**host, "sec-fetch-site": "cross-site"})) == (403, "foreign_origin")
    for headers in (
        {**host, "origin": "http://127.0.0.1:8188", "sec-fetch-site": "same-origin"},
        {"host": "example.com", "origin": "https://example.com"},
        {"host": "[::1]:8188", "origin": "http://[::1]:8188"},
        host,
    ):
        assert get(panel, "/runs", headers=headers).status == 200, headers
    reply = send(panel, "POST", f"/runs/{RUN}/commands", {"cmd": "stop"}, host="h:1", origin="http://evil")
    assert code(reply) == (403, "foreign_origin")


def test_changes_take_json_alone_and_little_of_it(tmp_path: Path) -> None:
    panel = api(tmp_path)
    path = "/config/refresh_rate"
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        assert code(send(panel, "PATCH", path, {"interval_ms": 500}, content_type=kind)) == (415, "not_json")
    assert code(send(panel, "PATCH", path, b"{" * 60000)) == (400, "bad_json")
    assert code(send(panel, "PATCH", path, b"[" * 60000)) == (400, "bad_json")
    assert code(send(panel, "PATCH", path, b"\xff\xfe")) == (400, "bad_json")
    assert code(send(panel, "PATCH", path, [])) == (400, "bad_json")
    assert code(send(panel, "PATCH", path, b'{"interval_ms": NaN}')) == (400, "bad_json")
    assert code(send(panel, "PATCH", path, b" " * (MAX_BODY + 1))) == (413, "too_long")
    assert code(send(panel, "POST", path, {})) == (405, "method")
    assert code(send(panel, "PATCH", "/nothing", {})) == (404, "no_such_route")


def test_the_refresh_rate_is_set_within_its_range(tmp_path: Path) -> None:
    heard: list[int] = []
    panel = PanelApi(lambda: [tmp_path], on_interval=heard.append)
    assert get(panel, "/config").data["interval_ms"] == 250
    for value in (100, 10_000, 500):
        reply = send(
            panel,
            "PATCH",
            "/config/refresh_rate",
            {"interval_ms": value},
            content_type="application/json; charset=utf-8",
        )
        assert reply.data == {"interval_ms": value}
    for bad in (99, 10_001, 0, -1, "500", 500.0, True, None):
        assert code(send(panel, "PATCH", "/config/refresh_rate", {"interval_ms": bad})) == (400, "bad_interval"), bad
    assert code(send(panel, "PATCH", "/config/refresh_rate", {"interval_ms": 500, "x": 1})) == (400, "bad_interval")
    assert get(panel, "/config").data["interval_ms"] == 500
    assert heard == [100, 10_000, 500]


def test_commands_reach_the_followed_run(tmp_path: Path) -> None:
    runs.make_run(tmp_path)
    followed = FollowedRun()
    panel = PanelApi(lambda: [tmp_path], lambda: {RUN: followed})
    for cmd in ("pause", "resume", "save", "preview", "stop"):
        reply = send(panel, "POST", f"/runs/{RUN}/commands", {"cmd": cmd})
        assert reply.data == {"cmd": cmd, "ok": True, "message": "taken", "answered": True}
    assert followed.sent == ["pause", "resume", "save", "preview", "stop"]
    for body in ({"cmd": "explode"}, {}, {"cmd": 1}, {"cmd": "stop", "path": "/etc"}):
        assert send(panel, "POST", f"/runs/{RUN}/commands", body).status == 400
    assert get(panel, f"/runs/{RUN}").data["live"] is True


def test_a_run_of_another_program_can_be_stopped_but_not_paused(tmp_path: Path) -> None:
    folder = runs.make_run(tmp_path)
    panel = api(tmp_path)
    assert code(send(panel, "POST", f"/runs/{RUN}/commands", {"cmd": "stop"})) == (409, "not_running")
    script = (
        "import sys, time\nfrom trainer_core.runs.folder import RunFolder\n"
        "with RunFolder(sys.argv[1]).lock():\n    print('locked', flush=True)\n    time.sleep(60)"
    )
    command = [sys.executable, "-c", script, str(folder.path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        assert code(send(panel, "POST", f"/runs/{RUN}/commands", {"cmd": "pause"})) == (409, "elsewhere")
        assert code(send(panel, "DELETE", f"/runs/{RUN}", {"confirm": RUN})) == (409, "running")
        reply = send(panel, "POST", f"/runs/{RUN}/commands", {"cmd": "stop"})
        assert reply.data["ok"] is True
        assert holder.wait(20) == -signal.SIGTERM
    assert folder.path.exists()


def test_a_foreign_process_is_never_signalled(tmp_path: Path) -> None:
    """The lock file may name a number that belongs to somebody else by now."""
    folder = runs.make_run(tmp_path)
    with subprocess.Popen(["sleep", "60"]) as stranger, folder.lock():
        import socket

        folder.lock_path.write_text(f"pid {stranger.pid} on {socket.gethostname()}\n")
        assert code(send(api(tmp_path), "POST", f"/runs/{RUN}/commands", {"cmd": "stop"})) == (409, "elsewhere")
        assert stranger.poll() is None
        os.kill(stranger.pid, signal.SIGKILL)


def test_deleting_a_run_needs_its_id_again_and_leaves_the_rest(tmp_path: Path) -> None:
    folder = runs.make_run(tmp_path, runs.finished())
    other = runs.make_run(tmp_path, run_id="20261130T000000Z-ffff", steps=3)
    lora = tmp_path / "loras" / "cat.safetensors"
    lora.parent.mkdir()
    lora.write_bytes(b"weights")
    panel = api(tmp_path)
    use = get(panel, f"/runs/{RUN}/disk").data
    assert use["parts"]["checkpoints"] == 1000
    assert use["total"] == sum(use["parts"].values()) > 1000
    assert code(send(panel, "DELETE", f"/runs/{RUN}", {})) == (400, "not_confirmed")
    assert code(send(panel, "DELETE", f"/runs/{RUN}", {"confirm": other.run_id})) == (400, "not_confirmed")
    assert send(panel, "DELETE", f"/runs/{RUN}", {"confirm": RUN}).data["bytes"] == use["total"]
    assert not folder.path.exists()
    assert lora.exists()
    assert [run["run_id"] for run in get(panel, "/runs").data["runs"]] == [other.run_id]
    assert sorted(path.name for path in (tmp_path / "safe_scaler").iterdir()) == [other.run_id]


def test_the_report_is_shown_without_scripts(tmp_path: Path) -> None:
    folder = runs.make_run(tmp_path, runs.finished())
    panel = api(tmp_path)
    assert code(get(panel, f"/runs/{RUN}/report")) == (404, "no_report")
    folder.report_path.write_text("<h1>report</h1>")
    reply = get(panel, f"/runs/{RUN}/report")
    assert reply.file == folder.report_path
    assert reply.headers["Content-Security-Policy"].startswith("sandbox; default-src 'none'")


def test_numbers_in_the_query_are_bounded(tmp_path: Path) -> None:
    runs.make_run(tmp_path)
    panel = api(tmp_path)
    for bad in ("0", "-5", "1e3", "999999", "9" * 400, "x", "²"):
        assert code(get(panel, f"/runs/{RUN}/snapshot", points=bad)) == (400, "bad_query"), bad
