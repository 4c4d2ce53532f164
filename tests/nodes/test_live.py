"""The registry of live runs and the relay to browsers."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest


def event(kind: str, /, seq: int = 1, run_id: str = "r", step: int = 0, **data: Any) -> dict[str, Any]:
    return {"v": 1, "seq": seq, "type": kind, "run_id": run_id, "step": step, "time": 0.0, "data": data}


@pytest.fixture
def run(part: Any, tmp_path: Path) -> Any:
    return part("live").LiveRun(
        "r", tmp_path, "4", lambda cmd: f"id-{cmd}", monitor_node_id="5", graph_id="g", prompt_id="p"
    )


def test_a_run_is_live_while_it_is_followed(part: Any, run: Any) -> None:
    live = part("live")
    with live.following(run):
        assert live.live_runs() == {"r": run}
    assert live.live_runs() == {}


def test_node_ids(run: Any) -> None:
    assert run.node_ids == ("4", "5")


def test_send_returns_the_workers_answer(part: Any, run: Any) -> None:
    def answer() -> None:
        run.take(event("Ack", id="id-save", cmd="save", ok=True, message="taken"))

    threading.Timer(0.05, answer).start()
    ack = run.send("save", timeout=5.0)
    assert (ack.ok, ack.answered, ack.message) == (True, True, "taken")


def test_send_does_not_wait_for_ever(run: Any) -> None:
    ack = run.send("stop", timeout=0.01)
    assert (ack.ok, ack.answered) == (True, False)
    assert "after its present micro-batch" in ack.message


def test_unknown_commands_and_arguments_are_refused_without_reaching_the_worker(part: Any, tmp_path: Path) -> None:
    sent: list[str] = []
    run = part("live").LiveRun("r", tmp_path, "4", sent.append)
    assert "Known are stop, save, preview, pause, resume" in run.send("explode").message
    assert "takes no arguments, got step" in run.send("save", {"step": 3}).message
    assert sent == []


def test_a_failing_subscriber_ends_nothing(part: Any, run: Any, caplog: pytest.LogCaptureFixture) -> None:
    live = part("live")
    got: list[Any] = []

    def fail(_: Any) -> None:
        raise ValueError("broken")

    ends = [live.subscribe(fail), live.subscribe(got.append)]
    live.publish(run, event("Warned", topic="x", message="y"))
    live.publish(run, event("Warned", topic="x", message="z"))
    for end in ends:
        end()
    assert [message["event"]["data"]["message"] for message in got] == ["y", "z"]
    place = {"run_id": "r", "graph_id": "g", "node_id": "4", "monitor_node_id": "5"}
    assert got[0] | {"event": None} == place | {"event": None}
    assert "a subscriber failed on Warned of run r" in caplog.text


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def relayed(part: Any) -> tuple[Any, list[dict[str, Any]], Clock]:
    sent: list[dict[str, Any]] = []
    clock = Clock()
    relay = part("relay").Relay(lambda channel, message: sent.append({"channel": channel, **message}), clock=clock)
    return relay, sent, clock


def message(ev: dict[str, Any]) -> dict[str, Any]:
    return {"run_id": ev["run_id"], "node_id": "4", "monitor_node_id": None, "event": ev}


def test_steps_of_an_interval_travel_together_and_in_order(relayed: Any) -> None:
    relay, sent, clock = relayed
    for step in range(1, 6):
        relay(message(event("StepFinished", step, step=step)))
    assert [m["event"]["step"] for m in sent] == [1]
    clock.now += 0.3
    relay.tick()
    assert [m["event"]["step"] for m in sent] == [1, 5]
    assert [earlier["step"] for earlier in sent[1]["earlier"]] == [2, 3, 4]
    assert "earlier" not in sent[0]
    assert sent[0]["channel"] == "safe_scaler.event"


def test_other_events_go_at_once_after_the_steps_before_them(relayed: Any) -> None:
    relay, sent, _ = relayed
    relay(message(event("StepFinished", 1, step=1)))
    relay(message(event("StepFinished", 2, step=2)))
    relay(message(event("StepRejected", 3, step=3, loss=None)))
    assert [m["event"]["seq"] for m in sent] == [1, 2, 3]


def test_runs_do_not_wait_for_each_other(relayed: Any) -> None:
    relay, sent, _ = relayed
    for run_id in ("a", "b"):
        relay(message(event("StepFinished", 1, run_id=run_id, step=1)))
    assert [m["run_id"] for m in sent] == ["a", "b"]


def test_nothing_waits_when_a_run_ends(relayed: Any) -> None:
    relay, sent, _ = relayed
    relay(message(event("StepFinished", 1, step=1)))
    relay(message(event("StepFinished", 2, step=2)))
    relay(message(event("RunFinished", 3, step=2, lora="lora/x.safetensors")))
    assert [m["event"]["seq"] for m in sent] == [1, 2, 3]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), object()])
def test_what_is_no_json_is_dropped_and_said(relayed: Any, bad: Any, caplog: pytest.LogCaptureFixture) -> None:
    relay, sent, _ = relayed
    relay(message(event("Verdict", kind="x", value=bad)))
    relay(message(event("Verdict", kind="y")))
    assert [m["event"]["data"]["kind"] for m in sent] == ["y"]
    assert "an event of run r is no JSON" in caplog.text
    json.dumps(sent, allow_nan=False)


@pytest.mark.parametrize(
    ("file", "shown"),
    [
        ("previews/a.png", "previews/a.png"),
        ("/home/me/ComfyUI/output/loras/x.safetensors", "x.safetensors"),
        ("C:\\ComfyUI\\output\\loras\\x.safetensors", "x.safetensors"),
    ],
)
def test_browsers_get_no_paths_of_the_machine(relayed: Any, file: str, shown: str) -> None:
    relay, sent, _ = relayed
    relay(message(event("LoraSaved", file=file)))
    assert sent[0]["event"]["data"]["file"] == shown


@pytest.mark.parametrize("interval", [99, 10_001, 0, -5])
def test_intervals_outside_the_limits_are_refused(relayed: Any, interval: int) -> None:
    relay, _, _ = relayed
    with pytest.raises(ValueError, match="interval_ms must be 100 to 10000"):
        relay.set_interval(interval)
    relay.set_interval(100)
    assert relay.interval_ms == 100


def test_messages_tell_no_places_of_the_machine(part: Any) -> None:
    sent: list[dict[str, Any]] = []
    relay = part("relay").Relay(lambda _, message: sent.append(message), folders=lambda: (Path("/srv/My Drive/out"),))
    words = "Run r failed; see /srv/My Drive/out/safe_scaler/r/run.log and '/home/me/My Models/sdxl.safetensors'."
    relay(message(event("StepFinished", 1, step=1)))
    relay(message(event("StepFinished", 2, step=2, note="/home/me/x")))
    relay(message(event("RunFinished", 3, message=words, lora=None)))
    assert sent[-1]["event"]["data"]["message"] == ("Run r failed; see safe_scaler/r/run.log and 'sdxl.safetensors'.")
    assert "/home" not in json.dumps(sent)


class Queue:
    """ComfyUI's prompt queue, as far as it is asked."""

    def __init__(self, *waiting: tuple[Any, ...], running: tuple[Any, ...] = ()) -> None:
        self.running, self.waiting = list(running), list(waiting)

    def get_current_queue(self) -> tuple[list[Any], list[Any]]:
        return self.running, self.waiting


def test_the_id_of_a_graph_is_taken_from_what_the_browser_sends_beside_it(part: Any) -> None:
    graph_id = part("host").graph_id
    assert graph_id({"workflow": {"id": "2daa6570-7a9c"}}) == "2daa6570-7a9c"
    for nothing in (None, {}, [], {"workflow": None}, {"workflow": {"id": 7}}, {"workflow": {"id": "x" * 65}}):
        assert graph_id(nothing) is None


def test_runs_that_wait_in_comfyuis_queue(part: Any, run: Any, comfyui: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    train = {"class_type": "SafeScalerTrain", "inputs": {"output_name": "cat" * 100, "steps": 400}}
    linked = {"class_type": "SafeScalerTrain", "inputs": {"output_name": ["2", 0], "steps": 0}}
    browser = {"extra_pnginfo": {"workflow": {"id": "g"}}}
    queue = Queue((7, "late", {"4": linked, "5": {"class_type": "KSampler", "inputs": {}}}, {}, []),
                  (3, "soon", {"4": train, "junk": None}, browser, []))  # fmt: skip
    server = type("Server", (), {"prompt_queue": queue})()
    monkeypatch.setattr(part("host"), "prompt_server", lambda: server)
    waiting = part("waiting").waiting_runs
    with part("live").following(run):
        assert waiting() == [
            {"prompt_id": "soon", "graph_id": "g", "node_id": "4", "name": ("cat" * 100)[:80], "steps": 400,
             "position": 1, "waiting_for": "r"},
            {"prompt_id": "late", "graph_id": None, "node_id": "4", "name": "", "steps": None, "position": 2,
             "waiting_for": "r"},
        ]  # fmt: skip
    assert waiting()[0]["waiting_for"] is None
    monkeypatch.setattr(part("host"), "prompt_server", lambda: None)
    assert waiting() == []


def test_a_graph_that_has_its_turn_gets_ready_until_its_run_begins(
    part: Any, comfyui: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = {name: {"class_type": "SafeScalerTrain", "inputs": {"output_name": name}} for name in ("4", "5", "6")}
    queue = Queue(running=((0, "turn", {**nodes, "7": {"class_type": "KSampler"}}, {}, []),))
    monkeypatch.setattr(part("host"), "prompt_server", lambda: type("Server", (), {"prompt_queue": queue})())
    monkeypatch.setattr(part("host"), "is_over", lambda node: node == "6")  # it came from ComfyUI's cache
    live = part("live")

    def ready() -> list[tuple[str, int, object]]:
        return [(one["node_id"], one["position"], one["waiting_for"]) for one in part("waiting").waiting_runs()]

    assert ready() == [("4", 0, None), ("5", 0, None)]
    run = live.LiveRun("r", Path("r"), "4", lambda _: "1", prompt_id="turn")
    with live.following(run):
        assert ready() == [("5", 0, None)]
    assert ready() == [("5", 0, None)]  # over, and the node makes its results
    queue.running = [(1, "next", nodes, {}, [])]
    assert [node for node, *_ in ready()] == ["4", "5"]
