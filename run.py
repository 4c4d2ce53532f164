#!/usr/bin/env python3
"""Set everything up and run: `python run.py demo`, `python run.py test`, `python run.py train ...`.

Makes a virtual environment (`.venv`, or --venv FOLDER), installs what is missing once, and then runs the command in
it. Standard library only, on Linux, macOS and Windows.

Which torch: the pip requirement in SAFE_SCALER_TORCH if set; else the calling Python's own torch where it has one;
else plain `torch` (on Linux without an NVIDIA GPU the small CPU build, where its index can be reached).
"""

from __future__ import annotations

import sys

if sys.version_info < (3, 10):  # noqa: UP036 - said in words to whoever starts this with an older Python
    sys.exit("Safe-Scaler needs Python 3.10 or newer, this is %d.%d." % sys.version_info[:2])  # noqa: UP031

import hashlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
INDEX_PATIENCE_S = 6.0
STILL_EVERY_S = 20.0
STAMP = "safe-scaler.json"
# Test files side by side, one a core; whole files, because a file's tests share what they make. `test -n 0` undoes it.
# In the order of the folders: left to itself xdist begins with the files of most tests, and ends with long ones alone.
PARALLEL = ("-n", "auto", "--maxprocesses=4", "--dist=loadfile", "--no-loadscope-reorder")
USAGE = """usage: python run.py [--venv FOLDER] COMMAND ...

  demo            teach the built-in toy model a new word and show what it learnt
  test [...]      run the tests (more words go to pytest)
  train, resume, scan, inspect, doctor ...
                  as `safe-scaler COMMAND`; `python run.py train --help` lists the settings
"""


class SetupError(Exception):
    """The environment could not be made; the text says why and what to do."""


def say(text: str) -> None:
    print(f"run.py: {text}", flush=True)


def main(words: list[str]) -> int:
    venv = ROOT / ".venv"
    if words[:1] == ["--venv"]:
        if len(words) < 2:
            say("--venv needs a folder")
            return 2
        venv = Path(words[1]).expanduser().absolute()
        words = words[2:]
    if not words or words[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if words else 2
    try:
        python = prepare(venv, with_tests=words[0] == "test")
    except SetupError as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        say("interrupted; the next start goes on with the set-up")
        return 130
    environment = {**os.environ, "PYTHONUTF8": "1", "SAFE_SCALER_PROGRAM": f"python {sys.argv[0]}"}
    if words[0] == "test":
        environment["OMP_NUM_THREADS"] = "1"
        return hand_over([str(python), "-m", "pytest", *PARALLEL, *words[1:]], environment, cwd=ROOT)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return hand_over([str(python), "-m", "trainer_core", *words], environment)


def hand_over(command: Sequence[str], environment: dict[str, str], cwd: Path | None = None) -> int:
    """Run the command in place of this process (POSIX), or as a child whose Ctrl-C it gets itself (Windows)."""
    if cwd is not None:
        os.chdir(cwd)
    sys.stdout.flush()
    if os.name == "posix":
        os.execve(command[0], list(command), environment)
    process = subprocess.Popen(command, env=environment)
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:  # the console sends it to the child too, which stops in its own way
            continue


# ------------------------------------------------------------------------------------------------ the environment


def prepare(venv: Path, *, with_tests: bool) -> Path:
    """The Python of a complete environment in `venv`; made or completed when it is not. Raises `SetupError`."""
    python = venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    wanted = {"key": requirements_key(), "tests": with_tests}
    have = read_stamp(venv)
    if have.get("key") == wanted["key"] and (have.get("tests") or not with_tests) and works(python):
        return python
    started = time.monotonic()
    say(f"setting up {venv} (once; later starts skip this)")
    make_venv(venv, python)
    install_torch(python)
    extra = "[test]" if with_tests else ""
    say("installing the libraries")
    pip(python, ["install", *editable(extra)], what="the libraries")
    write_stamp(venv, {**wanted, "tests": with_tests or bool(have.get("tests"))})
    say(f"set up in {time.monotonic() - started:.0f} s")
    return python


def editable(extra: str) -> list[str]:
    return ["--editable", f"{ROOT}{extra}"]


def requirements_key() -> str:
    """Changes when what must be installed changes: the project file, the wish for torch, the calling Python."""
    digest = hashlib.sha256((ROOT / "pyproject.toml").read_bytes())
    for part in (os.environ.get("SAFE_SCALER_TORCH", ""), sys.version, sys.prefix, str(ROOT)):
        digest.update(b"\0" + part.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def read_stamp(venv: Path) -> dict[str, object]:
    try:
        data = json.loads((venv / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def write_stamp(venv: Path, data: dict[str, object]) -> None:
    temporary = venv / (STAMP + ".new")
    temporary.write_text(json.dumps(data), encoding="utf-8")
    temporary.replace(venv / STAMP)


def works(python: Path) -> bool:
    if not python.exists():
        return False
    try:
        return subprocess.run([str(python), "-c", "import torch, pip"], capture_output=True).returncode == 0
    except OSError:
        return False


def make_venv(venv: Path, python: Path) -> None:
    """An environment of its own that also sees the calling Python's packages where that one has torch."""
    if venv.exists() and not (venv / "pyvenv.cfg").exists() and any(venv.iterdir()):
        raise SetupError(f"{venv} exists and is no virtual environment; give another folder with --venv")
    torch_home = None if os.environ.get("SAFE_SCALER_TORCH") else calling_torch()
    if not has_pip(python):
        flags = ["--clear"] if venv.exists() else []
        flags += ["--system-site-packages"] if torch_home else []
        done = subprocess.run([sys.executable, "-m", "venv", *flags, str(venv)], capture_output=True, text=True)
        if done.returncode != 0 or not has_pip(python):
            raise SetupError(
                f"the virtual environment could not be made:\n{(done.stdout + done.stderr).strip()}\n"
                "On Debian and Ubuntu: apt install python3-venv. Elsewhere: install a full Python 3.10 or newer."
            )
    if torch_home:
        # A venv made from a venv sees only the base Python's packages: name the folder that holds torch.
        (site_packages(python) / "safe_scaler_calling_python.pth").write_text(f"{torch_home}\n", encoding="utf-8")


def has_pip(python: Path) -> bool:
    if not python.exists():
        return False
    try:
        return subprocess.run([str(python), "-m", "pip", "--version"], capture_output=True).returncode == 0
    except OSError:
        return False


def site_packages(python: Path) -> Path:
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    return Path(done.stdout.strip())


# ---------------------------------------------------------------------------------------------------------- torch


def calling_torch() -> Path | None:
    """The folder that holds the calling Python's torch, when that torch can be imported."""
    if importlib.util.find_spec("torch") is None:
        return None
    code = "import torch, pathlib; print(pathlib.Path(torch.__file__).parent.parent)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return Path(done.stdout.strip()) if done.returncode == 0 else None


def install_torch(python: Path) -> None:
    """torch by the rules in this file's docstring; raises `SetupError` when none can be had."""
    asked = os.environ.get("SAFE_SCALER_TORCH")
    if asked:
        say(f"installing {asked} (SAFE_SCALER_TORCH)")
        pip(python, ["install", *asked.split()], what=asked)
    elif works(python):
        say("using the torch that is here already")
    elif not has_nvidia() and sys.platform == "linux" and index_answers(CPU_INDEX + "/torch/"):
        say("no NVIDIA GPU is seen: installing the CPU build of torch")
        try:
            pip(python, ["install", "--index-url", CPU_INDEX, "torch"], what="torch", patient=False)
        except SetupError:
            say("the CPU build cannot be had from its index; taking torch from the configured index")
            pip(python, ["install", "torch"], what="torch")
    else:
        say("installing torch (a large download)")
        pip(python, ["install", "torch"], what="torch")
    if not works(python):
        done = subprocess.run([str(python), "-c", "import torch"], capture_output=True, text=True)
        raise SetupError(f"torch is installed and cannot be imported:\n{tail(done.stderr)}")


def has_nvidia() -> bool:
    if shutil.which("nvidia-smi"):
        try:
            return subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=20).returncode == 0
        except (OSError, subprocess.TimeoutExpired):
            return False
    return Path("/proc/driver/nvidia/version").exists()


def index_answers(url: str) -> bool:
    """Whether the index answers within a few seconds; name look-ups that hang count as no."""
    answers: list[bool] = []

    def ask() -> None:
        try:
            with urllib.request.urlopen(url, timeout=INDEX_PATIENCE_S) as reply:
                answers.append(reply.status == 200)
        except (OSError, urllib.error.URLError, ValueError):
            answers.append(False)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(INDEX_PATIENCE_S)
    return answers == [True]


# ------------------------------------------------------------------------------------------------------------ pip


def pip(python: Path, words: list[str], *, what: str, patient: bool = True) -> None:
    """Run pip with a sign of life every few seconds; raises `SetupError` with pip's last lines."""
    options = ["--disable-pip-version-check", "--no-input"]
    options += [] if patient else ["--retries", "1", "--timeout", "15"]
    # Compiling every file of torch takes a minute; Python compiles the few that are used when they are used.
    command = [str(python), "-m", "pip", *options, *words, *(["--no-compile"] if words[0] == "install" else [])]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8", errors="replace"
    )
    lines: list[str] = []
    over = threading.Event()
    threading.Thread(target=say_still, args=(lines, over), daemon=True).start()
    assert process.stdout is not None, "started with a pipe"
    try:
        for line in process.stdout:
            lines.append(line.strip())
        process.wait()
    except KeyboardInterrupt:
        process.kill()
        raise
    finally:
        over.set()
    if process.returncode != 0:
        raise SetupError(
            f"{what} could not be installed (pip ended with {process.returncode}):\n{tail(chr(10).join(lines))}\n"
            f"{advice(platform.python_version())}"
        )


def say_still(lines: list[str], over: threading.Event) -> None:
    """Say every few seconds what pip is at."""
    started = time.monotonic()
    while not over.wait(STILL_EVERY_S):
        at = f": {shorten(lines[-1])}" if lines else ""
        say(f"  {time.monotonic() - started:.0f} s{at}")


def advice(version: str) -> str:
    return (
        "Check the network and the free disk space, then start again: what is installed already is kept.\n"
        f"If it says 'no matching distribution', a library may not support Python {version} yet: use 3.10 to 3.13."
    )


def shorten(text: str, width: int = 100) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def tail(text: str, count: int = 12) -> str:
    return "\n".join(f"    {line}" for line in text.strip().splitlines()[-count:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
