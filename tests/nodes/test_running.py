"""Which run a Train node works on, how it is followed, and what never leaves a node."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


def test_nothing_that_ends_threads_leaves_a_node(part: Any) -> None:
    def leave() -> None:
        raise SystemExit(2)

    with pytest.raises(RuntimeError, match="asked to end the program"):
        part("boundary").contained(leave)()


def test_every_node_is_contained(pack: Any) -> None:
    for name, cls in pack.NODE_CLASS_MAPPINGS.items():
        assert hasattr(cls.execute, "__wrapped__"), name


def test_the_bar_leaves_cancel_to_the_worker(part: Any, comfyui: Any) -> None:
    """ComfyUI's bar raises and clears the request; the worker must be stopped first, so the request is put back."""
    show = part("host").progress_bar()
    comfyui.interrupted = True
    try:
        show(1, 10)
        assert comfyui.interrupted
    finally:
        comfyui.interrupted = False
    show(2, 10)
    assert comfyui.bars[-1] == (2, 10)


def test_the_bar_is_not_full_while_the_model_is_loaded(part: Any, comfyui: Any, tmp_path: Path) -> None:
    """The scan before it ended at 3 of 3, and loading counts nothing."""
    display = part("following")._Display(tmp_path)

    def phase(name: str, done: int = 0, total: int = 0) -> tuple[int, int]:
        display({"type": "PhaseChanged", "step": 0, "data": {"phase": name, "done": done, "total": total}})
        return comfyui.bars[-1]

    assert phase("scanning", 3, 3) == (3, 3)
    assert phase("loading") == (0, 1)


@pytest.fixture
def config(core: Any, comfyui: Any, tmp_path: Path) -> Any:
    from PIL import Image

    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    settings = {
        "model.path": "toy", "dataset.path": str(tmp_path), "run.max_train_steps": 10, "run.seed": 1,
        "run.output_dir": str(comfyui.root / "output"), "run.output_name": tmp_path.name, "run.device": "cpu",
    }  # fmt: skip
    return core.load_config(None, settings)[0]


def test_a_new_run_is_made_with_its_lora_in_the_loras_folder(part: Any, comfyui: Any, config: Any) -> None:
    chosen = part("choosing").choose_run(config, ["note"], {"data_digest": "d"}, "continue", None)
    stored = chosen.folder.read_config()
    assert Path(stored["final_lora"]) == comfyui.root / "output" / "loras" / f"{config.run.output_name}.safetensors"
    assert (stored["data_digest"], stored["notes"]) == ("d", ["note"])
    assert chosen.note == ""


def test_a_name_that_another_lora_folder_holds_is_not_taken(part: Any, comfyui: Any, config: Any) -> None:
    """LoraLoader would find the other file first."""
    other = comfyui.root / "models" / "loras"
    other.mkdir(parents=True, exist_ok=True)
    (other / f"{config.run.output_name}.safetensors").write_bytes(b"x")
    stored = part("choosing").choose_run(config, [], {}, "continue", None).folder.read_config()
    assert Path(stored["final_lora"]).name == f"{config.run.output_name}-2.safetensors"


@pytest.fixture
def unfinished(part: Any, core: Any, config: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run of `config` that stopped at step 4 with a checkpoint."""
    folder = part("choosing").choose_run(config, [], {"data_digest": "d"}, "new run", None).folder
    info = core.RunInfo(folder, "stopped", folder.read_config()["config_hash"], step=4)
    monkeypatch.setattr(core, "newest_with_hash", lambda output, digest: info if digest == info.config_hash else None)
    monkeypatch.setattr(core, "can_go_on", lambda run: True)
    return info


def test_a_run_that_another_process_still_writes_is_waited_for(
    part: Any, core: Any, unfinished: Any, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ComfyUI that was restarted: its old worker saves for some seconds, and Run is pressed meanwhile."""
    from dataclasses import replace

    choosing = part("choosing")
    monkeypatch.setattr(choosing, "_LOOK_EVERY_S", 0.001)
    running = replace(unfinished, state="running")
    states = iter([running, running, unfinished])
    monkeypatch.setattr(core, "newest_with_hash", lambda *_: next(states))
    chosen = choosing.choose_run(config, [], {"data_digest": "d"}, "continue", None)
    assert chosen.folder.path == unfinished.folder.path
    monkeypatch.setattr(core, "newest_with_hash", lambda *_: running)
    monkeypatch.setattr(choosing, "PATIENCE_S", 0.01)
    with pytest.raises(core.ResourceError, match="still being written by another process .*has not ended within 0 s"):
        choosing.choose_run(config, [], {"data_digest": "d"}, "continue", None)


def test_cancel_ends_the_wait_for_another_process(
    part: Any, core: Any, comfyui: Any, unfinished: Any, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    monkeypatch.setattr(core, "newest_with_hash", lambda *_: replace(unfinished, state="running"))
    monkeypatch.setattr(comfyui, "interrupted", True)
    with pytest.raises(Exception, match="^$") as raised:
        part("choosing").choose_run(config, [], {"data_digest": "d"}, "continue", None)
    assert type(raised.value).__name__ == "Interrupted"


def test_the_interrupted_run_of_the_same_settings_goes_on(part: Any, unfinished: Any, config: Any) -> None:
    chosen = part("choosing").choose_run(config, [], {"data_digest": "d"}, "continue", None)
    assert chosen.folder.path == unfinished.folder.path
    assert chosen.note == f"Continued run {unfinished.run_id} from step 4. Set start to 'new run' to train afresh."


def test_the_step_is_that_of_the_checkpoint_and_not_the_last_one_decided(
    part: Any, core: Any, unfinished: Any, config: Any, monkeypatch: Any
) -> None:
    """A run that was killed at step 4 with a checkpoint of step 3."""
    monkeypatch.setattr(core, "newest_whole", lambda folder: SimpleNamespace(step=3))
    chosen = part("choosing").choose_run(config, [], {"data_digest": "d"}, "continue", None)
    assert chosen.note.startswith(f"Continued run {unfinished.run_id} from step 3.")


def test_latest_is_looked_at_again_when_the_run_has_a_newer_checkpoint(
    pack: Any, part: Any, unfinished: Any, monkeypatch: Any
) -> None:
    """ComfyUI hands out the old checkpoint again as long as this does not change."""
    entry = part("run_lists").Entry
    told = []
    for name in ("step-00000004", "step-00000006"):
        found = entry(unfinished, name, 0, "", "")
        monkeypatch.setattr(part("resume"), "latest_good", lambda found=found: found)
        told.append(pack.NODE_CLASS_MAPPINGS["SafeScalerResume"].IS_CHANGED())
    assert told[0] != told[1]


def test_latest_is_what_was_written_last(part: Any, unfinished: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run stopped long ago came before one that has just finished."""
    lists = part("run_lists")
    stopped, finished = replace(unfinished, state="stopped"), replace(unfinished, state="finished")
    entries = [
        lists.Entry(stopped, "step-00000087", 87, "", "", 1000.0),
        lists.Entry(finished, "step-00000300", 300, "", "", 2000.0),
        lists.Entry(finished, "step-00000350", 350, "torn", "", 3000.0),
    ]
    monkeypatch.setattr(lists, "checkpoint_entries", lambda: entries)
    assert lists.latest_good().checkpoint == "step-00000300"


def test_the_report_of_a_chosen_run_is_made_again_when_the_run_has_gone_on(
    pack: Any, part: Any, core: Any, unfinished: Any
) -> None:
    """ComfyUI shows the report of step 4 again as long as this does not change."""
    from trainer_core.events import RunFinished, to_wire
    from trainer_core.runs.database import RunDatabase

    node = pack.NODE_CLASS_MAPPINGS["SafeScalerReport"]
    line = f"{unfinished.run_id} · stopped · step 4"
    told = []
    for step in (4, 6):
        with RunDatabase(unfinished.folder.database_path) as record:
            event = RunFinished(step=step, status="stopped", message="", applied=step, rejected=0)
            record(to_wire(event, seq=record.last_seq() + 1, run_id=unfinished.run_id))
        told.append(node.IS_CHANGED(choose=line))
    assert told[0] != told[1]
    assert node.IS_CHANGED(choose=line) == told[1], "nothing has happened since"
    unfinished.folder.config_path.unlink()
    assert "is gone" in node.IS_CHANGED(choose=line)
    assert node.IS_CHANGED(choose=part("report").LINKED, run=None) == part("report").LINKED


def test_it_does_not_go_on_when_that_is_not_wanted_or_the_pictures_changed(
    part: Any, unfinished: Any, config: Any
) -> None:
    choose = part("choosing").choose_run
    assert choose(config, [], {"data_digest": "d"}, "new run", None).folder.path != unfinished.folder.path
    changed = choose(config, [], {"data_digest": "other"}, "continue", None)
    assert changed.folder.path != unfinished.folder.path
    assert "pictures or captions have changed" in changed.note


def test_other_settings_are_another_run(part: Any, core: Any, unfinished: Any, config: Any) -> None:
    other = core.with_settings(config, {"lora.rank": 5})
    chosen = part("choosing").choose_run(other, [], {"data_digest": "d"}, "continue", None)
    assert chosen.folder.path != unfinished.folder.path


def test_the_resume_branch_is_asked_for_only_when_it_is_used(pack: Any) -> None:
    node = pack.NODE_CLASS_MAPPINGS["SafeScalerTrain"]()
    assert node.check_lazy_status(start="continue", resume=None) == ["resume"]
    assert node.check_lazy_status(start="new run", resume=None) == []
    assert node.check_lazy_status(start="continue") == []
    assert node.check_lazy_status(start="continue", resume=object()) == []


def test_a_linked_checkpoint_that_is_not_used_is_said(part: Any, config: Any, tmp_path: Path) -> None:
    handle = part("handles").CheckpointHandle(tmp_path, "step-00000004", 4, "exact")
    chosen = part("choosing").choose_run(config, [], {}, "new run", handle)
    assert "not used" in chosen.note


def test_a_warm_start_without_a_lora_of_that_step_names_the_steps_that_have_one(
    part: Any, core: Any, unfinished: Any, config: Any
) -> None:
    (unfinished.folder.loras / "x-step00000006.safetensors").write_bytes(b"x")
    handle = part("handles").CheckpointHandle(unfinished.folder.path, "step-00000004", 4, "warm start")
    with pytest.raises(core.CheckpointError, match="no LoRA file of step 4.*with a file: 6"):
        part("choosing").choose_run(config, [], {}, "continue", handle)


def test_a_changed_rank_is_refused_by_name_before_a_worker_starts(
    part: Any, core: Any, unfinished: Any, config: Any
) -> None:
    import torch

    from trainer_core.checkpoints.store import CheckpointStore, RunState

    scalars = {"config": core.to_dict(core.with_settings(config, {"lora.rank": 3}))}
    tensors = {"a": torch.ones(2)}
    CheckpointStore(unfinished.folder.checkpoints).save(RunState(tensors, tensors, scalars), 4)
    handle = part("handles").CheckpointHandle(unfinished.folder.path, "step-00000004", 4, "exact")
    said = rf"(?s)step-00000004 of run {unfinished.run_id}.*lora.rank: 3 in the checkpoint, 16 now"
    with pytest.raises(core.CheckpointError, match=said):
        part("choosing").choose_run(config, [], {}, "continue", handle)
    more = core.with_settings(config, {"lora.rank": 3, "run.max_train_steps": 4})
    with pytest.raises(core.CheckpointError, match="Nothing is left to train"):
        part("choosing").choose_run(more, [], {}, "continue", handle)


@pytest.fixture
def one_bit_wrong(core: Any, unfinished: Any, config: Any) -> Any:
    """The stopped run with checkpoints of steps 4 and 6; that of step 6 looks good and is not."""
    import torch

    from trainer_core.checkpoints.store import CheckpointStore, RunState

    tensors, store = {"a": torch.ones(200)}, CheckpointStore(unfinished.folder.checkpoints)
    for step in (4, 6):
        saved = store.save(RunState(tensors, tensors, {"config": core.to_dict(config)}), step)
    file = saved.path / "adapter.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    return unfinished


def test_a_damaged_checkpoint_that_was_asked_for_by_name_is_refused(
    part: Any, core: Any, one_bit_wrong: Any, config: Any
) -> None:
    """The worker would go on from the one before, and nobody asked for that."""
    handle = part("handles").CheckpointHandle(one_bit_wrong.folder.path, "step-00000006", 6, "exact")
    with pytest.raises(core.CheckpointError, match=r"step-00000006 .* is damaged: adapter\.safetensors does not match"):
        part("choosing").choose_run(config, [], {}, "continue", handle)


def test_the_latest_good_checkpoint_is_one_that_is_good(
    part: Any, core: Any, one_bit_wrong: Any, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lists = part("run_lists")
    monkeypatch.setattr(core, "list_runs", lambda *_, **__: [one_bit_wrong])
    found = lists.find_entry(lists.LATEST)
    assert found.checkpoint == "step-00000004"
    handle = part("handles").CheckpointHandle(one_bit_wrong.folder.path, found.checkpoint, found.step, "exact")
    monkeypatch.setattr(core, "change_run", lambda *_, **__: None)
    chosen = part("choosing").choose_run(config, [], {}, "continue", handle)
    assert chosen.folder.path == one_bit_wrong.folder.path, "in place: the damaged one is passed over"
    assert chosen.note.startswith(f"Exact resume of run {one_bit_wrong.run_id} from step-00000004")
    again = part("choosing").choose_run(config, [], {"data_digest": "d"}, "continue", None)
    assert again.note.startswith(f"Continued run {one_bit_wrong.run_id} from step 4.")


def test_the_resume_list_is_empty_but_for_latest_where_nothing_was_trained(
    part: Any, core: Any, monkeypatch: Any
) -> None:
    lists = part("run_lists")
    monkeypatch.setattr(core, "list_runs", lambda *_, **__: [])
    assert lists.checkpoint_entries() == []
    with pytest.raises(core.CheckpointError, match="no run with a good checkpoint yet"):
        lists.find_entry(lists.LATEST)
    with pytest.raises(core.CheckpointError, match="is gone"):
        lists.find_entry("20260101T000000Z-abcd · step-00000004 · verified · finished")


@pytest.mark.parametrize(("written", "numbers"), [("0, 0.5; 1", [0.0, 0.5, 1.0]), ("", [1.0]), ("1,1", [1.0])])
def test_strengths(part: Any, written: str, numbers: list[float]) -> None:
    assert part("preview_lora").read_strengths(written) == numbers


def test_a_strength_that_is_no_number_is_named(part: Any, core: Any) -> None:
    with pytest.raises(core.ConfigError, match="strong"):
        part("preview_lora").read_strengths("0, strong")


def test_the_base_model_is_one_column(part: Any, tmp_path: Path) -> None:
    cells = part("preview_lora").grid_cells([("a", tmp_path), ("b", tmp_path)], [0.0, 1.0])
    assert [cell.label for cell in cells] == ["base model", "a, strength 1", "b, strength 1"]
    assert cells[0].file is None


def test_a_missing_checkpoint_file_is_said_at_once(pack: Any) -> None:
    check = pack.NODE_CLASS_MAPPINGS["SafeScalerLoadSDXL"].VALIDATE_INPUTS
    assert "no checkpoint 'gone.safetensors' any more" in check(checkpoint="gone.safetensors")
    assert check(checkpoint="toy (built in, for a first try)") is True


def test_a_stop_that_no_worker_hears_is_kept(
    part: Any, core: Any, comfyui: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two starts of a worker there is nobody to read a command."""
    live, seen = part("live"), []

    class BetweenStarts:
        def __init__(self, run_dir: Path, on_event: Any, *, should_stop: Any) -> None:
            self.should_stop, self.on_event = should_stop, on_event

        def send(self, cmd: str) -> str:
            return "lost"

        def run(self) -> str:
            run = live.live_runs()[tmp_path.name]
            seen.append(self.should_stop())
            assert run.send("stop", timeout=0.0).ok
            seen.append(self.should_stop())
            return "over"

    monkeypatch.setattr(core, "Supervisor", BetweenStarts)
    assert part("following").follow(tmp_path, "4") == "over"
    assert seen == [False, True]
    assert live.live_runs() == {}


def test_making_a_run_brings_neither_diffusers_nor_peft_into_the_host() -> None:
    """ComfyUI's process stays as it was: what builds a model's layers is checked by the worker."""
    import subprocess
    import sys

    root = Path(__file__).resolve().parents[2]
    code = """
import sys
from trainer_core.config_io import load_config
from trainer_core.prepare import checked
settings = {
    "model.path": "toy", "dataset.path": ".", "run.max_train_steps": 1, "run.device": "cpu",
    "lora.network": "peft:dora", "lora.preset": "style_blocks",
}
checked(load_config(None, settings, light=True)[0], light=True)
print([name for name in ("diffusers", "peft", "transformers") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
