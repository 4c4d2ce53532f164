"""The command line: `safe-scaler COMMAND ...` or `python -m trainer_core COMMAND ...`.

Exit codes: 0 done or stopped by the user with everything saved; 1 failed; 2 the settings or the command are wrong;
130 interrupted before anything ran. Heavy libraries are imported by the command that needs them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import __version__
from .cli_files import COMMANDS as FILE_COMMANDS
from .cli_health import COMMANDS as HEALTH_COMMANDS
from .cli_runs import find_run, run_to_resume
from .cli_together import (
    launch_problem,
    launched,
    limit_of,
    resume_together,
    speaks,
    start_or_go_on,
    tell_files,
    train_together,
)
from .config_fields import did_you_mean
from .config_io import asked_settings, load_config, with_settings
from .console import ConsoleProgress, make_safe
from .errors import ConfigError, Problem, TrainerError
from .options import Resolved, habit_notes, parse_argv, resolve

if TYPE_CHECKING:
    from .build import TrainResult
    from .config import TrainConfig

EXIT_FAILED = 1
EXIT_WRONG = 2
EXIT_INTERRUPTED = 130

_USAGE = """usage: safe-scaler COMMAND ...

  train [CONFIG.toml] [--name value ...]   train a LoRA (train --help lists the settings)
  resume RUN [--name value ...]            go on with a stopped or interrupted run
  demo [--json] [--seed N]                 teach the built-in toy model a new word and show what it learnt
  scan FOLDER [--json]                     look at a picture folder as training would
  inspect PATH [--json]                    explain a LoRA, a base model, a checkpoint or a run
  coverage [CONFIG | RUN] [--svg FILE]     which layers get adapters, and which of them learn
  convert FILE --format FORM [--dtype D]   a LoRA under other names: kohya, diffusers, comfyui, peft
  resize FILE --rank N | --keep SHARE      a LoRA of lower rank
  merge MODEL LORA[=S] ... --output FILE   a model with LoRAs merged in
  extract BASE TUNED --output FILE         a LoRA from the difference of two models
  panel [--output_dir DIR] [--port N]      show runs live in a browser (needs gradio)
  health RUN [--json | --ring]             gradient health of a run: its table, or its flight recorder
  drill [FAULT...] [--list] [--json]       break a toy run on purpose and show what is noticed
  doctor [--json]                          check devices, number formats, memory, disk and libraries
  --version
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Errors a user can act on are printed without a traceback."""
    for stream in (sys.stdout, sys.stderr):
        make_safe(stream)
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_USAGE, end="", file=sys.stdout if words else sys.stderr)
        return 0 if words else EXIT_WRONG
    if words[0] == "--version":
        print(f"safe-scaler {__version__}")
        return 0
    command = _COMMANDS.get(words[0])
    if command is None:
        return _wrong(
            f"there is no command {words[0]!r}. {did_you_mean(words[0], _COMMANDS, '')}".rstrip() + f"\n\n{_USAGE}"
        )
    try:
        return command(words[1:])
    except ConfigError as error:
        return _wrong(str(error))
    except TrainerError as error:
        print(f"safe-scaler: {error}", file=sys.stderr)
        return EXIT_FAILED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the reader (head, less) left; nothing more to say
        return 0
    except KeyboardInterrupt:
        print("\nsafe-scaler: interrupted before anything ran", file=sys.stderr)
        return EXIT_INTERRUPTED


def _wrong(message: str) -> int:
    if speaks():
        print(f"safe-scaler: {message}", file=sys.stderr)
    return EXIT_WRONG


# ---------------------------------------------------------------------------------------------------------- train


def train(words: Sequence[str]) -> int:
    """`train [CONFIG] [flags]`: resolve the settings, then train in this process or under a supervisor."""
    if {"-h", "--help", "--help-all"} & set(words):
        from .options_help import train_help

        print(train_help(everything="--help-all" in words), end="")
        return 0
    resolved, config_file = _settings(words)
    if "resume" in resolved.special:
        settings = _asked(resolved, config_file)
        run_dir = run_to_resume(str(resolved.special["resume"]), settings, resolved.notes)
        if run_dir is not None:
            return _resume(run_dir, settings, resolved)
    config, notes = load_config(
        config_file, resolved.settings, resolved.special.get("preset"), earlier=resolved.problems
    )
    notes = [*resolved.notes, *habit_notes(resolved.used, _all_set(config_file, resolved)), *notes]
    from .prepare import create_run

    if launched() > 1:
        return train_together(lambda: start_or_go_on(config, notes), limit_s=limit_of(config), around=_log_to)
    folder = create_run(config, notes)
    if resolved.special.get("supervise"):
        return _supervise(folder.path)
    return _run_here(folder.path)


def _all_set(config_file: Path | None, resolved: Resolved) -> dict[str, Any]:
    """Settings by flag; with a file or preset everything counts as set on purpose."""
    from .config_fields import FIELDS

    on_purpose = config_file is not None or "preset" in resolved.special
    return dict.fromkeys(FIELDS) if on_purpose else resolved.settings


def _settings(words: Sequence[str], expected: int = 1) -> tuple[Resolved, Path | None]:
    """Flags resolved, and the config file among the positional words (at most `expected` of them)."""
    pairs, positional, problems = parse_argv(words)
    resolved = resolve(pairs, text=True)
    resolved.problems[:0] = problems
    for word in positional[expected:]:
        why = "is a word of its own: options begin with --, and values with blanks need quotes"
        resolved.problems.append(Problem("command line", word, why, "Quote it, or take it out."))
    asked = resolved.special.get("config_file")
    if asked is not None and positional[:expected]:
        why = f"a config file is given twice, also {positional[0]!r}"
        resolved.problems.append(Problem("--config", asked, why, "Keep one."))
    name = asked if asked is not None else (positional[0] if positional[:expected] else None)
    if name is not None and not str(name).strip():  # an unset variable of a script; not the folder of the command
        fix = "Give its path. If a variable of a script should hold it, that is unset."
        resolved.problems.append(Problem("command line", name, "an empty word stands where a path belongs", fix))
    if resolved.special.get("supervise") and launched() > 1:
        fix = "Leave it out: torchrun --max-restarts N restarts all processes, and the run goes on from its checkpoint."
        resolved.problems.append(Problem("--supervise", True, "does not go with several processes", fix))
    if trouble := launch_problem():
        resolved.problems.append(trouble)
    return resolved, None if name is None else Path(str(name)).expanduser()


def settings_of(words: Sequence[str]) -> TrainConfig:
    """The config that `train` would take from these words; its rules are not checked."""
    resolved, config_file = _settings(words)
    preset = resolved.special.get("preset")
    return load_config(config_file, resolved.settings, preset, earlier=resolved.problems, check=False)[0]


def _run_here(run_dir: Path, settings: Mapping[str, Any] | None = None) -> int:
    """Train a run in this process, with Ctrl-C as `stop`; `settings` are changes to a run that is resumed."""
    from .libraries import import_libraries

    import_libraries()
    from .build import resume_run, run
    from .runs.protocol import Commands, stop_on_signals

    commands = Commands()
    console = ConsoleProgress()
    with _log_to(run_dir), stop_on_signals(commands):
        if settings:
            changes = partial(with_settings, settings=settings)
            result = resume_run(run_dir, changes, commands=commands, sink=console)
        else:
            result = run(run_dir, commands=commands, sink=console)
    console.close()
    return _tell(result)


class _RunLog(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """A full disk: what matters is told by events too, and a traceback for each line would bury them."""

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the last lines do not fit either
            super().close()


@contextlib.contextmanager
def _log_to(run_dir: Path) -> Iterator[None]:
    """Log records and libraries' warnings go to the run's own log; the console shows events."""
    handler = _RunLog(run_dir / "run.log", encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.setLevel(level)
        root.removeHandler(handler)
        handler.close()


def _tell(result: TrainResult) -> int:
    tell_files(result.lora, result.report, result.run_dir, go_on=result.status == "stopped" and result.step > 0)
    if result.report is None:
        print(f"safe-scaler: the report could not be written; {result.run_dir / 'run.log'} says why", file=sys.stderr)
    if result.status == "failed":
        print(f"safe-scaler: {result.message}", file=sys.stderr)
    if result.status == "stopped" and result.step == 0:
        return EXIT_INTERRUPTED
    return result.exit_code


def _supervise(run_dir: Path) -> int:
    """Train a run in a worker process that is started again when it dies."""
    from .runs.protocol import Commands, stop_on_signals
    from .runs.supervisor import supervise

    commands = Commands()
    console = ConsoleProgress()
    with stop_on_signals(commands):
        outcome = supervise(run_dir, console, should_stop=commands.should_stop)
    console.close()
    report = run_dir / "report.html"
    lora = None if outcome.lora is None else Path(outcome.lora)
    tell_files(
        lora, report if report.exists() else None, run_dir, go_on=outcome.status == "stopped" and outcome.step > 0
    )
    if outcome.status == "failed":
        print(f"safe-scaler: {outcome.message}", file=sys.stderr)
        return EXIT_FAILED
    return EXIT_INTERRUPTED if outcome.status == "stopped" and outcome.step == 0 else 0


# --------------------------------------------------------------------------------------------------------- resume


def resume(words: Sequence[str]) -> int:
    """`resume RUN [flags]`: RUN is a run folder, or a folder that holds runs (its newest one is taken)."""
    if not words or words[0] in ("-h", "--help"):
        print(
            "usage: safe-scaler resume RUN [--name value ...]\n\nRUN: a run folder, or an output folder (newest run)."
        )
        return 0 if words else EXIT_WRONG
    resolved, asked = _settings(words)
    if asked is None:
        return _wrong("give the run folder: safe-scaler resume RUN")
    settings = _asked(resolved, None)
    return _resume(find_run(asked), settings, resolved)


def _asked(resolved: Resolved, config_file: Path | None) -> dict[str, Any]:
    """The changes to a run that goes on: all that flags, file and preset ask for."""
    preset = resolved.special.get("preset")
    settings, notes = asked_settings(config_file, resolved.settings, preset, earlier=resolved.problems)
    resolved.notes.extend(notes)
    return settings


def _resume(run_dir: Path, settings: dict[str, Any], resolved: Resolved) -> int:
    if launched() > 1:
        return resume_together(run_dir, settings, around=_log_to)
    if not resolved.special.get("supervise"):
        return _run_here(run_dir, settings)
    if settings:
        from .prepare import change_run

        change_run(run_dir, partial(with_settings, settings=settings))
    return _supervise(run_dir)


# --------------------------------------------------------------------------------------------- the other commands


def demo(words: Sequence[str]) -> int:
    """`demo`: see `trainer_core.demo`."""
    parser = argparse.ArgumentParser(prog="safe-scaler demo", description="Teach the toy model a new word.")
    parser.add_argument("--json", action="store_true", help="print the scores as JSON in the last line")
    parser.add_argument("--seed", type=int, default=0, help="seed of all draws")
    parser.add_argument("--output_dir", "--output-dir", default="output", help="folder for results")
    args = parser.parse_args(words)
    from . import demo as module

    return module.main(args)


def scan(words: Sequence[str]) -> int:
    """`scan FOLDER [--json] [data-set flags]`: what training would see. With --json the exit code says whether the
    scan ran, not whether the pictures can be trained on."""
    if not words or words[0] in ("-h", "--help"):
        print("usage: safe-scaler scan FOLDER [--json] [--dataset.NAME value ...] [--bucket.NAME value ...]")
        return 0 if words else EXIT_WRONG
    as_json = "--json" in words
    resolved, folder = _settings([word for word in words if word != "--json"])
    if folder is None:
        return _wrong("give the folder: safe-scaler scan FOLDER")
    resolved.settings.setdefault("dataset.path", str(folder))
    config, _ = load_config(None, resolved.settings, earlier=resolved.problems, check=False)
    from .data import examine_dataset

    report = examine_dataset(config.dataset, config.bucket, 1024)
    if as_json:
        print(json.dumps(report.to_json(), allow_nan=False))
        return 0
    print(report.summary())
    return EXIT_FAILED if report.error else 0


def inspect(words: Sequence[str]) -> int:
    """`inspect PATH [--json]`."""
    parser = argparse.ArgumentParser(
        prog="safe-scaler inspect", description="Explain a LoRA, model, checkpoint or run."
    )
    parser.add_argument("path", help="a file or folder, or the word toy")
    parser.add_argument("--json", action="store_true", help="print the facts as JSON")
    args = parser.parse_args(words)
    from .inspect_path import inspect_path

    facts, text = inspect_path(args.path)
    print(json.dumps(facts, allow_nan=False, default=str) if args.json else text)
    return 0


def doctor(words: Sequence[str]) -> int:
    """`doctor [--json]`: exit code 1 when something is missing that training needs."""
    parser = argparse.ArgumentParser(prog="safe-scaler doctor", description="Check this machine for training.")
    parser.add_argument("--json", action="store_true", help="print the facts as JSON")
    parser.add_argument("--output_dir", "--output-dir", default="output", help="folder that must be writable")
    args = parser.parse_args(words)
    from .doctor import examine, report

    facts = examine(Path(args.output_dir))
    print(json.dumps(facts, allow_nan=False) if args.json else report(facts))
    return EXIT_FAILED if facts["missing"] else 0


def panel(words: Sequence[str]) -> int:
    """`panel`: the runs of some output folders in a browser, until Ctrl-C."""
    from .panel.app import DEFAULT_PORT, serve

    parser = argparse.ArgumentParser(prog="safe-scaler panel", description="Show runs live in a browser.")
    parser.add_argument("--output_dir", "--output-dir", nargs="+", default=["output"], help="folders that hold runs")
    parser.add_argument("--host", default="127.0.0.1", help="address to serve at; 0.0.0.0 lets the whole network in")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT)
    args = parser.parse_args(words)
    shown = f"[{args.host}]" if ":" in args.host else args.host
    line = f"Panel: http://{shown}:{args.port}/  (Ctrl-C ends it; runs go on)"
    serve(
        [Path(folder).expanduser() for folder in args.output_dir],
        args.host,
        args.port,
        partial(print, line, flush=True),
    )
    return 0


_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "train": train,
    "resume": resume,
    "demo": demo,
    "scan": scan,
    "inspect": inspect,
    "panel": panel,
    "doctor": doctor,
    **FILE_COMMANDS,
    **HEALTH_COMMANDS,
}

if __name__ == "__main__":
    sys.exit(main())
