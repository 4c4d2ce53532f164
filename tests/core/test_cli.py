"""The command line as a person meets it: what is printed, where, and the exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from run_setup import small_config

from trainer_core import __version__
from trainer_core.build import TrainResult
from trainer_core.cli import EXIT_FAILED, EXIT_WRONG, _tell, main
from trainer_core.cli_together import program, start_or_go_on, train_together
from trainer_core.distributed.processes import ToldElsewhereError
from trainer_core.errors import ResourceError

ROOT = Path(__file__).resolve().parents[2]


def command(model: Path, pictures: Path, output: Path, *more: str) -> list[str]:
    """The command at the end of issue 2 with its paths, two steps long and small enough for a test."""
    return [
        "train",
        f"--pretrained_model_name_or_path={model}",
        f"--train_data_dir={pictures}",
        f"--output_dir={output}",
        "--resolution=64",
        "--train_batch_size=2",
        "--gradient_accumulation_steps=2",
        "--learning_rate=1e-4",
        "--lr_scheduler=cosine_with_restarts",
        "--lr_warmup_steps=1",
        "--max_train_steps=2",
        "--lora_rank=4",
        "--lora_alpha=4",
        "--lora_dropout=0.1",
        "--save_steps=2",
        "--validation_prompt=a red circle --s 2 --w 64 --h 64",
        "--validation_steps=1",
        "--mixed_precision=no",
        "--gradient_checkpointing",
        "--workers=0",
        *more,
    ]


def run_folders(output: Path) -> list[Path]:
    return [file.parent for file in (output / "safe_scaler").glob("*/config.json")]


def python(*words: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
    )


# ------------------------------------------------------------------------------------------------------- whole runs


def test_train_inspect_and_resume(
    micro_model: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(micro_model, pictures, tmp_path)) == 0
    out = capsys.readouterr().out
    assert "Training unet on 6 pictures for 2 steps (cpu, fp32)" in out
    assert "step 2/2 100%" in out
    assert "checkpoint step-00000002" in out
    assert "note: --lora_dropout: dropout acts after lora_down here" in out
    lora = tmp_path / "lora.safetensors"
    assert f"LoRA:   {lora}" in out
    assert lora.is_file()
    (run,) = run_folders(tmp_path)
    assert f"Run:    {run}" in out
    assert (run / "report.html").is_file()
    assert (run / "run.log").is_file()

    assert main(["inspect", str(lora)]) == 0
    assert "does something: yes" in capsys.readouterr().out
    assert main(["inspect", str(run), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["kind"], facts["status"], facts["step"]) == ("run", "finished", 2)
    assert main(["inspect", str(run / "checkpoints" / "step-00000002")]) == 0
    assert "at step 2" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path)]) == 0
    assert "1 runs in" in capsys.readouterr().out

    assert main(["resume", str(tmp_path), "--max_train_steps", "3"]) == 0
    out = capsys.readouterr().out
    assert f"newest run in {tmp_path}" in out
    assert "resumed from step-00000002" in out
    assert "step 3/3 100%" in out


def test_under_accelerate_launch(micro_model: Path, pictures: Path, tmp_path: Path) -> None:
    """`accelerate launch -m trainer_core train ...` with one process, as in the issue."""
    launcher = ["-m", "accelerate.commands.launch", "--num_processes=1", "--num_machines=1", "--dynamo_backend=no"]
    words = command(micro_model, pictures, tmp_path)
    done = python(*launcher, "--cpu", "--mixed_precision=no", "-m", "trainer_core", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "lora.safetensors").is_file()
    assert "step 2/2 100%" in done.stdout


@pytest.mark.slow
def test_supervised(micro_model: Path, pictures: Path, tmp_path: Path) -> None:
    words = f"--model.path {micro_model} --dataset.path {pictures} --output_dir {tmp_path} --batch_size 2 --workers 0"
    quick = "--lora.rank 2 --max_train_steps 1 --validation.enabled false --supervise"
    done = python("-m", "trainer_core", "train", *words.split(), *quick.split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "lora.safetensors").is_file()
    assert "step 1/1 100%" in done.stdout
    (run,) = run_folders(tmp_path)
    assert f"Report: {run / 'report.html'}" in done.stdout


def test_resume_from_checkpoint_latest(
    micro_model: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first start has nothing to resume, says so and trains; the second goes on with the first's run."""
    words = command(micro_model, pictures, tmp_path, "--resume_from_checkpoint=latest")
    assert main(words) == 0
    assert "there is no run in" in capsys.readouterr().out
    longer = [word.replace("--max_train_steps=2", "--max_train_steps=3") for word in words]
    assert main(longer) == 0
    out = capsys.readouterr().out
    assert "resumed from step-00000002" in out
    assert "step 3/3 100%" in out
    assert len(run_folders(tmp_path)) == 1


def test_resume_takes_the_whole_command(
    micro_model: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """The config file says where the runs lie and what changes, as the flags do; a preset is no exception."""
    monkeypatch.chdir(tmp_path)
    stranger = command(micro_model, pictures, tmp_path / "output")
    assert main(stranger) == 0, "a run of something else in the default folder"
    lines = ["[run]", f"output_dir = '{tmp_path / 'mine'}'", "max_train_steps = 2", "[checkpoint]", "keep_last = 1"]
    (tmp_path / "run.toml").write_text("\n".join(lines), encoding="utf-8")
    left_out = ("--output_dir", "--max_train_steps", "--save_steps")
    words = [word for word in command(micro_model, pictures, tmp_path) if not word.startswith(left_out)]
    assert main([*words, "run.toml", "--resume_from_checkpoint=latest"]) == 0
    assert f"there is no run in {tmp_path / 'mine'} yet" in capsys.readouterr().out
    text = (tmp_path / "run.toml").read_text(encoding="utf-8").replace("max_train_steps = 2", "max_train_steps = 3")
    (tmp_path / "run.toml").write_text(text, encoding="utf-8")
    assert main([*words, "run.toml", "--resume_from_checkpoint=latest"]) == 0
    assert "step 3/3 100%" in capsys.readouterr().out
    (run,) = run_folders(tmp_path / "mine")
    stored = json.loads((run / "config.json").read_text(encoding="utf-8"))["config"]
    assert (stored["run"]["max_train_steps"], stored["checkpoint"]["keep_last"]) == (3, 1)
    assert main(["resume", str(run), "--preset", "kohya"]) == EXIT_FAILED
    assert "dataset.compat: 'none' in the checkpoint, 'kohya' now" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------- what is refused


def test_all_problems_in_one_message_and_nothing_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out"
    words = f"train --output_dir {output} --rnak 4 --batch_size 0 --fp8_base --learning_rate nan --model.path /no/such"
    assert main(words.split()) == EXIT_WRONG
    captured = capsys.readouterr()
    assert captured.out == ""
    text = captured.err
    assert "The settings have 7 problems:" in text
    for part in ("Did you mean --rank?", "cannot be 0", "--mixed_precision bf16", "not a finite number", "/no/such"):
        assert part in text
    assert "Traceback" not in text
    assert not output.exists()


def test_file_and_line_problems_come_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[lora]\nrnak = 4\n[run]\nmax_train_steps = -1\n", encoding="utf-8")
    assert main(["train", str(file), "extra", "--rnak", "3"]) == EXIT_WRONG
    text = capsys.readouterr().err
    assert "Did you mean lora.rank?" in text
    assert "Did you mean --rank?" in text
    assert "cannot be negative" in text
    assert "'extra': is a word of its own" in text


def test_supervise_does_not_go_with_several_processes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", "--supervise"]) == EXIT_WRONG
    assert "torchrun --max-restarts" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    assert main(["train", "--supervise"]) == EXIT_WRONG
    assert capsys.readouterr().err == "", "one process speaks"


@pytest.mark.parametrize(
    ("environment", "part"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}, "Add --multi_gpu"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "each would train a run of its own"),
    ],
)
def test_a_launcher_that_starts_less_than_was_asked_for_is_refused(
    environment: dict[str, str], part: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["train"]) == EXIT_WRONG
    assert part in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert main(["train"]) == EXIT_WRONG
    assert part not in capsys.readouterr().err, "--num_processes 1 is what was asked for"


@pytest.mark.parametrize(
    ("rank", "error", "expected"),
    [
        ("0", ToldElsewhereError("Process 1 failed: no disk"), "safe-scaler: Process 1 failed: no disk\n"),
        ("1", ToldElsewhereError("Process 0 failed: no disk"), ""),
        ("1", ResourceError("no memory here"), "safe-scaler: process 1: no memory here\n"),
    ],
)
def test_every_process_tells_what_began_in_it(
    rank: str, error: Exception, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from trainer_core.distributed import launch

    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(launch, "run_together", fail)
    assert train_together(Path, limit_s=1.0, around=lambda path: None) == EXIT_FAILED
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize(
    ("status", "step", "told"), [("stopped", 3, True), ("stopped", 0, False), ("finished", 3, False)]
)
def test_how_to_go_on_is_said_where_that_can_be(
    status: str,
    step: int,
    told: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["/home/me/bin/safe-scaler", "train"])
    monkeypatch.delenv("SAFE_SCALER_PROGRAM", raising=False)
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    result = TrainResult(status, "", tmp_path, None, None, step, step, 0, None)
    _tell(result)
    printed = capsys.readouterr()
    assert (f"Go on:  safe-scaler resume {tmp_path}" in printed.out) == told
    assert "the report could not be written" in printed.err


def test_a_printed_command_is_one_that_can_be_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SAFE_SCALER_PROGRAM", raising=False)
    monkeypatch.setattr("sys.argv", ["/opt/pack/trainer_core/__main__.py"])
    assert program() == "python -m trainer_core"
    monkeypatch.setenv("SAFE_SCALER_PROGRAM", "python ../run.py")
    assert program() == "python ../run.py"


def test_processes_that_their_launcher_restarts_go_on_with_their_run(
    micro_model: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(micro_model, pictures, tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    first, second = start_or_go_on(config, []), start_or_go_on(config, [])
    assert first != second, "two launches are two runs"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert start_or_go_on(config, []) == second, "the newest one of this launcher"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")
    assert start_or_go_on(config, []) not in (first, second)


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        (["trian"], EXIT_WRONG, "there is no command 'trian'. Did you mean train?"),
        ([], EXIT_WRONG, "usage: safe-scaler"),
        (["resume"], EXIT_WRONG, "usage: safe-scaler resume"),
        (["resume", "/no/such"], EXIT_WRONG, "there is no such folder"),
        (["resume", ""], EXIT_WRONG, "an empty word stands where a path belongs"),
        (["resume", " ", "--supervise"], EXIT_WRONG, "If a variable of a script should hold it, that is unset"),
        (["scan", ""], EXIT_WRONG, "an empty word stands where a path belongs"),
        (["resume", str(ROOT / "tests")], EXIT_WRONG, "holds no runs"),
        (["scan"], EXIT_WRONG, "usage: safe-scaler scan"),
        (["inspect", "/no/such"], EXIT_FAILED, "there is no such file or folder"),
        (["inspect", str(ROOT / "tests")], EXIT_FAILED, "holds no runs"),
        (["train", "/no/such.toml"], EXIT_WRONG, "there is no such file"),
    ],
)
def test_wrong_words(words: list[str], code: int, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == code
    captured = capsys.readouterr()
    assert part in captured.out + captured.err
    assert "Traceback" not in captured.err


def test_inspect_names_what_a_file_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, content in (("empty.safetensors", b""), ("page.safetensors", b"<!doctype html>" * 9)):
        file = tmp_path / name
        file.write_bytes(content)
        assert main(["inspect", str(file)]) == EXIT_FAILED
        text = capsys.readouterr().err
        assert name in text
        assert ("empty" if not content else "web page") in text


# ------------------------------------------------------------------------------------------------- the other commands


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"safe-scaler {__version__}\n"
    assert main(["--help"]) == 0
    assert "resume RUN" in capsys.readouterr().out
    assert main(["train", "--help"]) == 0
    assert "--lora.rank" in capsys.readouterr().out


def test_scan_prints_one_object(pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    for file in sorted(pictures.iterdir())[:4]:
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "broken.png").write_bytes(b"no picture")
    assert main(["scan", str(folder), "--json", "--workers", "0"]) == 0
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert {"items", "ignored", "warnings"} <= set(facts)
    usable = {row["file"]: row["usable"] for row in facts["items"]}
    assert usable == {"000.png": True, "001.png": True, "broken.png": False}
    row = facts["items"][0]
    assert {"file", "usable", "reason", "upright_size", "bucket", "caption", "warnings"} == set(row)
    assert main(["scan", str(folder), "--workers", "0"]) == 0
    assert "broken.png" in capsys.readouterr().out


def test_scan_of_nothing_fails_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["scan", str(tmp_path / "empty"), "--workers", "0"]) == EXIT_FAILED
    assert main(["scan", str(tmp_path / "empty"), "--json", "--workers", "0"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["error"]


def test_doctor_proves_its_claims(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--output_dir", str(tmp_path / "out")]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["missing"] == []
    assert facts["disk"]["writable"] is True
    assert facts["libraries"]["torch"]
    cpu = facts["devices"][0]
    assert cpu["device"] == "cpu"
    assert cpu["formats"]["fp32"] == "ok"
    assert list(tmp_path.iterdir()) == []  # the test file is gone, and no folder was made
    assert main(["doctor"]) == 0
    assert "Ready to train." in capsys.readouterr().out


def test_doctor_names_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer_core import doctor

    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "peft" else "1.0")
    monkeypatch.setattr(doctor.os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    facts = doctor.examine(tmp_path)
    assert any("peft is not installed" in text for text in facts["missing"])
    assert any("No space left on device" in text for text in facts["missing"])
    assert facts["disk"]["writable"] is False
    assert "Not ready to train." in doctor.report(facts)


def test_doctor_finds_a_wrong_product(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from trainer_core import doctor

    assert doctor._proof("cpu", "fp32") == "ok"
    monkeypatch.setattr(doctor, "_MATRIX", 8)
    real = torch.cos
    monkeypatch.setattr(torch, "cos", lambda value: real(value) * torch.tensor(float("nan")))
    assert doctor._proof("cpu", "fp32").startswith("wrong by")


def test_terminals_without_unicode(tmp_path: Path) -> None:
    done = python(
        "-m", "trainer_core", "inspect", str(tmp_path / "caf\u00e9 \u732b"), environment={"PYTHONIOENCODING": "ascii"}
    )
    assert done.returncode == EXIT_FAILED
    assert "caf\\xe9 \\u732b" in done.stderr


def test_file_commands_that_cannot_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file where a folder should be, a full disk: said in a sentence, no traceback."""
    from safetensors.torch import save_file

    place = "lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q"
    pair = {f"{place}.lora_down.weight": torch.ones(4, 640), f"{place}.lora_up.weight": torch.ones(640, 4)}
    save_file(pair, tmp_path / "a.safetensors")
    (tmp_path / "file").write_text("x", encoding="utf-8")
    for words in (["convert", "--format", "comfyui"], ["convert", "--format", "peft"], ["resize", "--rank", "2"]):
        target = str(tmp_path / "file" / "out.safetensors")
        assert main([*words, str(tmp_path / "a.safetensors"), "--output", target]) == EXIT_FAILED
        assert "Check the path, its rights and its disk." in capsys.readouterr().err
