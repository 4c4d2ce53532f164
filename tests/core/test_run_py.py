"""The set-up script: which torch it takes, how it falls back, and what it says. No network, no real installation."""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """run.py as a module of its own, without the wish for a torch that this machine may have set."""
    spec = importlib.util.spec_from_file_location("run_py_under_test", ROOT / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.delenv("SAFE_SCALER_TORCH", raising=False)
    return module


class Pip:
    """Stands for pip: keeps what was asked, fails for words that hold `bad`."""

    def __init__(self, run: ModuleType, bad: str = "nothing") -> None:
        self.calls: list[list[str]] = []
        self.bad = bad
        self.error = run.SetupError

    def __call__(self, python: Path, words: list[str], *, what: str, patient: bool = True) -> None:
        self.calls.append(words)
        if self.bad in words:
            raise self.error(f"{what} could not be installed")


def machine(
    run: ModuleType, monkeypatch: pytest.MonkeyPatch, *, has: bool = False, nvidia: bool = False, index: bool = False
) -> None:
    """torch here already or not, an NVIDIA GPU or not, PyTorch's own index in reach or not."""
    answers = iter([has, True, True])
    monkeypatch.setattr(run, "works", lambda python: next(answers))
    monkeypatch.setattr(run, "has_nvidia", lambda: nvidia)
    monkeypatch.setattr(run, "index_answers", lambda url: index)
    monkeypatch.setattr(run.sys, "platform", "linux")


CPU_INDEX = "https://download.pytorch.org/whl/cpu"


@pytest.mark.parametrize(
    ("facts", "asked"),
    [
        ({"has": True}, []),
        ({"nvidia": True, "index": True}, [["install", "torch"]]),
        ({"index": True}, [["install", "--index-url", CPU_INDEX, "torch"]]),
        ({"index": False}, [["install", "torch"]]),
    ],
)
def test_which_torch(
    run: ModuleType, monkeypatch: pytest.MonkeyPatch, facts: dict[str, bool], asked: list[list[str]]
) -> None:
    pip = Pip(run)
    monkeypatch.setattr(run, "pip", pip)
    machine(run, monkeypatch, **facts)
    run.install_torch(Path("python"))
    assert pip.calls == asked


def test_the_wish_comes_first(run: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = Pip(run)
    monkeypatch.setattr(run, "pip", pip)
    machine(run, monkeypatch, has=True, nvidia=True, index=True)
    monkeypatch.setenv("SAFE_SCALER_TORCH", "torch==2.13.0")
    run.install_torch(Path("python"))
    assert pip.calls == [["install", "torch==2.13.0"]]


def test_an_index_that_answers_and_then_fails_is_left(run: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = Pip(run, bad="--index-url")
    monkeypatch.setattr(run, "pip", pip)
    machine(run, monkeypatch, index=True)
    run.install_torch(Path("python"))
    assert pip.calls[-1] == ["install", "torch"]


def test_no_cpu_index_on_systems_whose_plain_torch_is_small(run: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for system in ("darwin", "win32"):
        pip = Pip(run)
        monkeypatch.setattr(run, "pip", pip)
        machine(run, monkeypatch, index=True)
        monkeypatch.setattr(run.sys, "platform", system)
        run.install_torch(Path("python"))
        assert pip.calls == [["install", "torch"]]


def test_an_index_that_hangs_costs_seconds(run: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "INDEX_PATIENCE_S", 0.5)
    with socket.socket() as server:  # takes the connection and never answers
        server.bind(("127.0.0.1", 0))
        server.listen()
        started = time.monotonic()
        assert run.index_answers(f"http://127.0.0.1:{server.getsockname()[1]}/torch/") is False
        assert time.monotonic() - started < 10
    assert run.index_answers("http://127.0.0.1:1/torch/") is False
    assert run.index_answers("nonsense") is False


def test_torch_that_cannot_be_imported_is_said(run: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "pip", Pip(run))
    machine(run, monkeypatch)
    monkeypatch.setattr(run, "works", lambda python: False)
    monkeypatch.setattr(
        run.subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 1, "", "OSError: libcudart.so is missing")
    )
    with pytest.raises(run.SetupError, match="libcudart.so is missing"):
        run.install_torch(Path("python"))


def test_a_complete_environment_is_left_alone(run: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    steps: list[str] = []
    monkeypatch.setattr(run, "works", lambda python: True)
    monkeypatch.setattr(run, "make_venv", lambda venv, python: steps.append("venv"))
    monkeypatch.setattr(run, "install_torch", lambda python: steps.append("torch"))
    monkeypatch.setattr(run, "pip", lambda python, words, what: steps.append(words[-1].removeprefix(str(ROOT))))
    run.prepare(tmp_path, with_tests=False)
    assert steps == ["venv", "torch", ""]
    run.prepare(tmp_path, with_tests=False)
    assert len(steps) == 3
    run.prepare(tmp_path, with_tests=True)  # tests need more
    assert steps[3:] == ["venv", "torch", "[test]"]
    run.prepare(tmp_path, with_tests=False)  # and what they need stays
    run.prepare(tmp_path, with_tests=True)
    assert len(steps) == 6
    monkeypatch.setenv("SAFE_SCALER_TORCH", "torch==9")
    run.prepare(tmp_path, with_tests=False)  # another wish is another environment
    assert len(steps) == 9


def test_a_damaged_stamp_means_set_up_again(run: ModuleType, tmp_path: Path) -> None:
    for text in ("", "[]", "{"):
        (tmp_path / run.STAMP).write_text(text, encoding="utf-8")
        assert run.read_stamp(tmp_path) == {}
    run.write_stamp(tmp_path, {"key": "k"})
    assert json.loads((tmp_path / run.STAMP).read_text(encoding="utf-8")) == {"key": "k"}


def test_a_folder_with_something_else_in_it_is_refused(run: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "photo.png").write_bytes(b"x")
    with pytest.raises(run.SetupError, match="no virtual environment"):
        run.make_venv(tmp_path, tmp_path / "bin" / "python")
    assert (tmp_path / "photo.png").exists()


def test_the_calling_pythons_torch_is_seen(run: ModuleType, tmp_path: Path) -> None:
    """Also from inside another virtual environment, whose packages --system-site-packages alone would not show."""
    import torch

    home = run.calling_torch()
    assert home == Path(torch.__file__).parent.parent
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    python = venv / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    assert subprocess.run([str(python), "-c", "import torch"], capture_output=True).returncode != 0
    (run.site_packages(python) / "safe_scaler_calling_python.pth").write_text(f"{home}\n", encoding="utf-8")
    done = subprocess.run([str(python), "-c", "import torch; print(torch.__file__)"], capture_output=True, text=True)
    assert done.stdout.strip() == torch.__file__


def test_pips_last_words_are_shown(run: ModuleType) -> None:
    with pytest.raises(run.SetupError) as error:
        run.pip(Path(sys.executable), ["install", "--no-index", "no-such-package-of-ours"], what="the libraries")
    assert "the libraries could not be installed" in str(error.value)
    assert "no-such-package-of-ours" in str(error.value)
    assert "start again" in str(error.value)


def test_usage_and_wrong_words(run: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main([]) == 2
    assert run.main(["--help"]) == 0
    assert run.main(["--venv"]) == 2
    assert "python run.py" in capsys.readouterr().out


def test_commands_that_are_printed_name_run_py(run: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """`safe-scaler` lies in an environment that is on nobody's PATH."""
    given: dict[str, str] = {}
    monkeypatch.setattr(run, "prepare", lambda *_, **__: Path("python"))
    monkeypatch.setattr(run, "hand_over", lambda _, environment, **__: given.update(environment) or 0)
    monkeypatch.setattr("sys.argv", ["../pack/run.py", "demo"])
    assert run.main(["demo"]) == 0
    assert given["SAFE_SCALER_PROGRAM"] == "python ../pack/run.py"


def test_a_failed_set_up_is_said_in_words(
    run: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(venv: Path, *, with_tests: bool) -> Path:
        raise run.SetupError("torch could not be installed: the disk is full")

    monkeypatch.setattr(run, "prepare", fail)
    assert run.main(["demo"]) == 1
    assert "the disk is full" in capsys.readouterr().out
