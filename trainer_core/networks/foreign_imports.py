"""Finding a foreign network module by its dotted name, what its import lacks, and which arguments it reads."""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import AdapterError, ConfigError, Problem

SD_SCRIPTS_VARIABLE = "SD_SCRIPTS_PATH"
_INSTALL = {"lycoris": "lycoris-lora", "cv2": "opencv-python-headless", "PIL": "pillow"}
_ADDED_BY_TRAINER = {"dropout"}


def import_network_module(name: str, sd_scripts: str | None = None) -> ModuleType:
    """Import a foreign module; `networks.*` comes from an sd-scripts checkout.

    Args:
        name: dotted name.
        sd_scripts: folder of the checkout; without it the one that SD_SCRIPTS_PATH names.

    Raises:
        AdapterError: it is not there, or its imports fail (everything that is missing is named).
    """
    folder = _checkout(name, sd_scripts)
    with _on_path(folder):
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            raise AdapterError(_import_trouble(name, folder, error)) from error
    if not hasattr(module, "create_network"):
        raise AdapterError(f"'{name}' is no network module: it has no create_network().")
    return module


def _checkout(name: str, given: str | None) -> str | None:
    """The sd-scripts folder that `name` lies in; None for modules from elsewhere."""
    if not name.startswith("networks."):
        return None
    folder, source = (given, "lora.sd_scripts_path") if given else (os.environ.get(SD_SCRIPTS_VARIABLE), "")
    source = source or SD_SCRIPTS_VARIABLE
    if not folder:
        raise AdapterError(
            f"'{name}' is part of sd-scripts. Set {SD_SCRIPTS_VARIABLE} (or lora.sd_scripts_path) to the folder of an "
            "sd-scripts checkout, or use lora.network = 'native', which trains the same LoRA."
        )
    folder = str(Path(folder).expanduser())
    if not (Path(folder) / Path(*name.split("."))).with_suffix(".py").is_file():
        raise AdapterError(f"{source} is '{folder}', but there is no '{name.replace('.', '/')}.py' in it.")
    loaded = sys.modules.get(name)
    if loaded is not None and not str(getattr(loaded, "__file__", "")).startswith(str(Path(folder))):
        raise AdapterError(
            f"'{name}' is loaded from '{getattr(loaded, '__file__', '?')}' in this process already, so the one in "
            f"'{folder}' cannot be taken. Start a process of its own."
        )
    return folder


def _import_trouble(name: str, folder: str | None, error: ImportError) -> str:
    missing = missing_imports(name, folder) or [getattr(error, "name", None) or str(error)]
    packages = " ".join(_INSTALL.get(module, module) for module in missing)
    where = f" in {sys.executable}"
    return (
        f"The network module '{name}' cannot be imported{where}: {error}. Missing: {', '.join(missing)}. "
        f"Try: pip install {packages}" + (". Or use lora.network = 'native'." if folder else ".")
    )


def missing_imports(name: str, folder: str | None) -> list[str]:
    """Top-level modules that `name` and the files of its own checkout import and that are not installed here.

    Only imports at the top of a file count: those inside functions may never run.
    """
    if folder is None:
        top = name.split(".")[0]
        return [] if _is_installed(top) else [top]
    missing: dict[str, None] = {}
    seen: set[str] = set()
    queue = [name]
    while queue:
        current = queue.pop()
        path = (Path(folder) / Path(*current.split("."))).with_suffix(".py")
        if current in seen or not path.is_file():
            continue
        seen.add(current)
        for imported in _imports(path):
            top = imported.split(".")[0]
            if (Path(folder) / top).is_dir():
                queue.append(imported)
            elif not _is_installed(top):
                missing[top] = None
    return sorted(missing)


def _imports(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _is_installed(top: str) -> bool:
    if top in sys.modules:
        return True
    try:
        return importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        return False


def refuse_unknown_arguments(module: ModuleType, arguments: Mapping[str, str]) -> None:
    """Foreign modules take any keyword and ignore what they do not know; a typing error would be lost.

    Raises:
        ConfigError: with the nearest name that the module reads.
    """
    known = known_arguments(module)
    problems = []
    for key in arguments:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"Did you mean '{near[0]}'? " if near else ""
            fix = f"{hint}'{module.__name__}' reads: {', '.join(sorted(known))}."
            problems.append(Problem("lora.network_args", key, f"'{module.__name__}' does not read it", fix))
    if problems:
        raise ConfigError(problems)


def known_arguments(module: ModuleType) -> set[str]:
    """Names that `create_network` reads from its keyword arguments, found in its source text and in the functions of
    the module that it hands them on to (sd-scripts' `parse_block_lr_kwargs`)."""
    source = _source(module.create_network)
    if source is None:
        return set()
    read = _read_keys(source)
    for helper in re.findall(r"(\w+)\([^()]*\bkwargs\b[^()]*\)", source):
        function = getattr(module, helper, None)
        if inspect.isfunction(function) and (text := _source(function)) is not None:
            read |= _read_keys(text)
    named = inspect.signature(module.create_network).parameters
    own = {"multiplier", "network_dim", "network_alpha", "vae", "text_encoder", "unet", "kwargs", "neuron_dropout"}
    return read | (set(named) - own) | _ADDED_BY_TRAINER


def _source(function: Callable[..., Any]) -> str | None:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return None


def _read_keys(source: str) -> set[str]:
    return set(re.findall(r"kwargs(?:\.get\(|\.pop\(|\[)\s*[\"'](\w+)[\"']", source))


@contextmanager
def _on_path(folder: str | None) -> Iterator[None]:
    """The folder at the end of the import path inside the block, where it can shadow nothing."""
    if folder is None:
        yield
        return
    sys.path.append(folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
