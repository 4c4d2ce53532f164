"""The rules of the code base that would erode if nobody measured them."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "trainer_core"
PRODUCT = sorted(path for name in ("trainer_core", "nodes") for path in (ROOT / name).rglob("*.py"))
EVERYTHING = sorted([*PRODUCT, *(ROOT / "tools").glob("*.py"), *(ROOT / "benchmarks").glob("*.py"), ROOT / "run.py"])

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

#: Started by path in a process of their own.
SCRIPTS = ("worker_main.py", "decode_worker.py")

COMFYUI = ("comfy", "comfy_api", "server", "folder_paths", "execution", "nodes", "aiohttp")
HEAVY = ("torch", "diffusers", "transformers", "peft", "numpy", "PIL")

#: The only places that may catch everything, each a boundary where somebody else's failure must be contained.
BROAD_EXCEPT_ALLOWED = {
    ("nodes/live.py", "publish"): "a subscriber that fails must not end the run",
    ("trainer_core/events.py", "emit"): "a subscriber that fails must not end the run",
    ("trainer_core/build.py", "_write_report"): "a report that fails must not turn a good run into a failed one",
    ("trainer_core/worker_main.py", "_run"): "the worker's boundary: the last event is always RunFinished",
    ("trainer_core/validation/previews.py", "run"): "previews never end a run",
    ("trainer_core/validation/previews.py", "_tell"): "previews never end a run",
    ("trainer_core/validation/stable_loss.py", "run"): "validation never ends a run",
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


MODULES = {module_name(path): path for path in PRODUCT if path.is_relative_to(CORE)}


def test_there_is_something_to_measure() -> None:
    assert len(MODULES) > 20


def test_core_imports_with_comfyui_blocked() -> None:
    """Every module of the core is imported in a process where ComfyUI's modules cannot be."""
    modules = [name for name in MODULES if not name.endswith("__main__")]
    script = f"""
import importlib, importlib.abc, sys

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in {COMFYUI!r}:
            raise ImportError('blocked: ' + name)

sys.meta_path.insert(0, Blocker())
sys.path.insert(0, {str(ROOT)!r})
for name in {modules!r}:
    importlib.import_module(name)
print('imported', len({modules!r}))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT.parent)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith(f"imported {len(modules)}")


def test_core_names_no_comfyui_module() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in MODULES.values()
        for name, level, line in imports(path)
        if level == 0 and name.split(".")[0] in COMFYUI
    ]
    assert found == []


@pytest.mark.parametrize(
    "module",
    [
        "trainer_core",
        "trainer_core.config",
        "trainer_core.config_io",
        "trainer_core.config_rules",
        "trainer_core.errors",
        "trainer_core.events",
        "trainer_core.cli",
    ],
)
def test_light_modules_import_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_the_facade_imports_in_less_than_300_ms() -> None:
    """CPU time of the import alone, the best of three, so that a busy machine does not decide."""
    code = "import time; a = time.process_time(); import trainer_core; print(time.process_time() - a)"
    times = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT).stdout)
        for _ in range(3)
    ]
    assert min(times) < 0.3, times


def imports(path: Path) -> Iterator[tuple[str, int, int]]:
    """(module, level, line) of every import statement in a file, also inside functions."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, 0, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "", node.level, node.lineno


def test_imports_inside_the_core_are_relative() -> None:
    """An absolute import would load a second copy inside ComfyUI, where the pack has a path for a name.

    Scripts put the pack's root on the path themselves.
    """
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in MODULES.values()
        if path.name not in SCRIPTS
        for name, level, line in imports(path)
        if level == 0 and name.split(".")[0] == "trainer_core"
    ]
    assert found == []


def test_nodes_import_the_facade_alone() -> None:
    """A class imported past the facade would exist twice, and `except TrainerError` would not match it."""
    nodes = ROOT / "nodes"
    if not nodes.is_dir():
        pytest.skip("nodes/ comes with a later issue")
    found: list[str] = []
    for path in nodes.rglob("*.py"):
        for name, level, line in imports(path):
            absolute = level == 0 and name.split(".")[0] == "trainer_core"
            below = level > 0 and name.startswith("trainer_core.")
            if absolute or below:
                found.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert found == []


def top_level_edges(name: str) -> set[str]:
    """Modules of the core that `name` imports when it is imported itself (not inside functions or TYPE_CHECKING)."""
    path = MODULES[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    for node in load_time_statements(parsed(path).body):
        if not isinstance(node, ast.ImportFrom) or node.level == 0:
            continue
        base = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package
        target = f"{base}.{node.module}" if node.module else base
        for alias in node.names:
            deeper = f"{target}.{alias.name}"
            found.add(deeper if deeper in MODULES else target)
    return {module for module in found if module in MODULES and module != name}


def load_time_statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        yield node
        for part in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With):
                yield from load_time_statements(getattr(node, part, []))


def test_no_import_cycle() -> None:
    edges = {name: top_level_edges(name) for name in MODULES}
    assert sum(len(targets) for targets in edges.values()) > 20
    state: dict[str, int] = {}
    trail: list[str] = []

    def visit(name: str) -> list[str] | None:
        state[name] = 1
        trail.append(name)
        for target in sorted(edges[name]):
            if state.get(target) == 1:
                return [*trail[trail.index(target) :], target]
            if target not in state and (cycle := visit(target)):
                return cycle
        trail.pop()
        state[name] = 2
        return None

    for name in sorted(edges):
        if name not in state:
            cycle = visit(name)
            assert cycle is None, " -> ".join(cycle or [])


@pytest.mark.parametrize("path", EVERYTHING, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_sizes(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_FILE_LINES
    long = [
        f"{node.name} has {(node.end_lineno or 0) - node.lineno + 1} lines"
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert long == []


def test_no_catch_all_names() -> None:
    forbidden = {"utils", "util", "helpers", "helper", "common", "misc"}
    assert [path for path in EVERYTHING if path.stem in forbidden or path.parent.name in forbidden] == []


def broad_handlers(path: Path) -> Iterator[tuple[str, int]]:
    """(name of the function, line) of every handler for Exception, BaseException or everything.

    One that ends in a bare `raise` only tidies up and is no boundary.
    """

    def walk(node: ast.AST, function: str) -> Iterator[tuple[str, int]]:
        for child in ast.iter_child_nodes(node):
            inside = child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else function
            if isinstance(child, ast.ExceptHandler) and is_broad(child.type) and not raises_on(child):
                yield function, child.lineno
            yield from walk(child, inside)

    yield from walk(parsed(path), "")


def raises_on(handler: ast.ExceptHandler) -> bool:
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None


def is_broad(kind: ast.expr | None) -> bool:
    if kind is None:
        return True
    names = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return any(isinstance(name, ast.Name) and name.id in ("Exception", "BaseException") for name in names)


def test_broad_except_only_at_the_named_boundaries() -> None:
    found = {
        (path.relative_to(ROOT).as_posix(), function): line
        for path in PRODUCT
        for function, line in broad_handlers(path)
    }
    extra = [
        f"{file}:{line} in {function}"
        for (file, function), line in found.items()
        if (file, function) not in BROAD_EXCEPT_ALLOWED
    ]
    assert extra == []
    unused = [key for key in BROAD_EXCEPT_ALLOWED if key not in found and (ROOT / key[0]).exists()]
    assert unused == []  # an entry that allows nothing is taken out


def test_every_function_is_typed() -> None:
    untyped = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in PRODUCT
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_typed(node)
    ]
    assert untyped == []


def is_typed(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    plain = [argument for argument in arguments if argument.arg not in ("self", "cls")]
    return node.returns is not None and all(argument.annotation is not None for argument in plain)


def test_requirements_repeat_the_project_file() -> None:
    """ComfyUI's manager reads requirements.txt, pip the project file: one list. torch stands in neither."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    listed = [line for line in lines if line and not line.startswith("#")]
    assert listed == project["dependencies"]
    names = [line.split(">")[0].split(";")[0].strip() for line in listed]
    assert not {"torch", "torchvision"} & set(names)
    assert [line for line in listed if any(cap in line.split(";")[0] for cap in ("==", "<", "~="))] == []


def test_run_py_uses_the_standard_library_alone() -> None:
    names = {name.split(".")[0] for name, level, _ in imports(ROOT / "run.py") if level == 0}
    assert names - set(sys.stdlib_module_names) == set()
