"""Writes what is derived from the node classes: `locales/en/nodeDefs.json` and the tables in `web/docs/<Node>.md`.

    python tools/make_node_texts.py [--check]

The words around the tables are written by hand and stay. `--check` writes nothing and ends with 1 when something
differs, or when another language lacks a text.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from make_example_workflows import ROOT, pack  # noqa: E402

BEGIN, END = "<!-- made by tools/make_node_texts.py -->", "<!-- end -->"
Texts = dict[str, dict[str, Any]]


def node_texts(module: Any) -> Texts:
    """The English texts of every node in the form ComfyUI's front end reads."""
    found: Texts = {}
    for kind, cls in module.NODE_CLASS_MAPPINGS.items():
        inputs = {
            name: {"name": name.replace("_", " "), "tooltip": options["tooltip"]}
            for name, (_, options) in declared_inputs(cls).items()
        }
        outputs = {
            str(i): {"name": name.replace("_", " "), "tooltip": tooltip}
            for i, (name, tooltip) in enumerate(zip(cls.RETURN_NAMES, cls.OUTPUT_TOOLTIPS, strict=True))
        }
        found[kind] = {
            "display_name": module.NODE_DISPLAY_NAME_MAPPINGS[kind],
            "description": cls.DESCRIPTION,
            "inputs": inputs,
            "outputs": outputs,
        }
    return found


def declared_inputs(cls: Any) -> dict[str, tuple[Any, dict[str, Any]]]:
    types = cls.INPUT_TYPES()
    return {**types.get("required", {}), **types.get("optional", {})}


def tables(cls: Any) -> str:
    """Inputs and outputs of a node as Markdown tables."""
    rows = [
        f"| `{name}` | {_kind(kind)} | {_default(options)} | {_cell(options['tooltip'])} |"
        for name, (kind, options) in declared_inputs(cls).items()
    ]
    outs = [
        f"| `{name}` | {_kind(str(kind))} | {_cell(tooltip)} |"
        for name, kind, tooltip in zip(cls.RETURN_NAMES, cls.RETURN_TYPES, cls.OUTPUT_TOOLTIPS, strict=True)
    ]
    head = ["| input | kind | default | what it does |", "|---|---|---|---|"]
    return "\n".join([*head, *rows, "", "| output | kind | what it is |", "|---|---|---|", *outs])


def _kind(kind: Any) -> str:
    if isinstance(kind, list):
        return "list"
    return {"INT": "whole number", "FLOAT": "number", "STRING": "text", "BOOLEAN": "yes or no"}.get(
        kind, str(kind).removeprefix("SAFE_SCALER_").lower().replace("combo,string", "name")
    )


def _default(options: dict[str, Any]) -> str:
    value = options.get("default", "")
    return "" if value == "" else f"`{value}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def with_tables(page: str, made: str) -> str:
    """`page` with the part between the marks replaced; the marks are added at the end where there are none."""
    block = f"{BEGIN}\n\n{made}\n\n{END}"
    if BEGIN not in page:
        return f"{page.rstrip()}\n\n{block}\n"
    before, rest = page.split(BEGIN, 1)
    return f"{before}{block}{rest.split(END, 1)[1]}"


def missing_texts(wanted: Texts, have: Texts) -> list[str]:
    """Places of `wanted` that `have` has no text for, and places it has too many."""

    def places(tree: Any, at: str = "") -> set[str]:
        if not isinstance(tree, dict):
            return {at}
        return {place for key, value in tree.items() for place in places(value, f"{at}/{key}")}

    return sorted(places(wanted) ^ places(have))


def main(words: list[str]) -> int:
    check = "--check" in words
    module = pack()
    files = {
        ROOT / "locales" / "en" / "nodeDefs.json": json.dumps(node_texts(module), indent=1, ensure_ascii=False) + "\n"
    }
    for kind, cls in module.NODE_CLASS_MAPPINGS.items():
        file = ROOT / "web" / "docs" / f"{kind}.md"
        page = file.read_text(encoding="utf-8") if file.is_file() else f"# {module.NODE_DISPLAY_NAME_MAPPINGS[kind]}\n"
        files[file] = with_tables(page, tables(cls))
    different = [file for file, text in files.items() if not file.is_file() or file.read_text(encoding="utf-8") != text]
    problems = [str(file.relative_to(ROOT)) for file in different]
    if not check:
        for file in different:
            file.write_text(files[file], encoding="utf-8")
        problems = []
    for folder in sorted((ROOT / "locales").iterdir()):
        if folder.name != "en" and (folder / "nodeDefs.json").is_file():
            have = json.loads((folder / "nodeDefs.json").read_text(encoding="utf-8"))
            problems += [f"locales/{folder.name}: {place}" for place in missing_texts(node_texts(module), have)]
    print("\n".join(problems) or f"{len(files)} files as they should be")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
