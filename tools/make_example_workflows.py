"""Writes `example_workflows/*.json`, graphs as ComfyUI's front end saves them, from the node classes themselves.

    python tools/make_example_workflows.py [--check]

Widget values stand in a file by position, so they are taken from INPUT_TYPES: an added widget cannot shift them.
`--check` writes nothing and ends with 1 when a file is not what would be written.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "example_workflows"
TOY = "toy (built in, for a first try)"
BYPASSED = 4

Declaration = tuple[Any, dict[str, Any]]

#: Nodes of ComfyUI itself: (sockets, widgets with their values, outputs).
_CORE: dict[str, tuple[dict[str, str], list[str], list[tuple[str, str]]]] = {
    "PreviewImage": ({"images": "IMAGE"}, [], []),
    "CheckpointLoaderSimple": ({}, ["ckpt_name"], [("MODEL", "MODEL"), ("CLIP", "CLIP"), ("VAE", "VAE")]),
    "LoraLoader": (
        {"model": "MODEL", "clip": "CLIP"},
        ["lora_name", "strength_model", "strength_clip"],
        [("MODEL", "MODEL"), ("CLIP", "CLIP")],
    ),
    "CLIPTextEncode": ({"clip": "CLIP"}, ["text"], [("CONDITIONING", "CONDITIONING")]),
    "EmptyLatentImage": ({}, ["width", "height", "batch_size"], [("LATENT", "LATENT")]),
    "KSampler": (
        {"model": "MODEL", "positive": "CONDITIONING", "negative": "CONDITIONING", "latent_image": "LATENT"},
        ["seed", "control_after_generate", "steps", "cfg", "sampler_name", "scheduler", "denoise"],
        [("LATENT", "LATENT")],
    ),
    "VAEDecode": ({"samples": "LATENT", "vae": "VAE"}, [], [("IMAGE", "IMAGE")]),
    "MarkdownNote": ({}, ["text"], []),
}
_WIDGETS = ("INT", "FLOAT", "STRING", "BOOLEAN")


def pack() -> Any:
    """The pack under another name, with stand-ins for the two modules of ComfyUI that declarations look at."""
    folders = types.ModuleType("folder_paths")
    folders.get_filename_list = lambda kind: []  # type: ignore[attr-defined]
    folders.get_output_directory = lambda: str(ROOT / "no such folder")  # type: ignore[attr-defined]
    server = types.ModuleType("server")
    server.PromptServer = type("PromptServer", (), {})  # type: ignore[attr-defined]
    sys.modules.update(folder_paths=folders, server=server)
    spec = importlib.util.spec_from_file_location(
        "pack_of_examples", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
    )
    assert spec is not None, "the pack has an __init__.py"
    assert spec.loader is not None, "a file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@dataclass
class Graph:
    """A graph that grows. `add` returns the node's id; links are `(id, output name)` as input values."""

    classes: dict[str, Any]
    names: dict[str, str]
    nodes: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    links: list[list[Any]] = field(default_factory=list[list[Any]])
    groups: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def add(self, kind: str, pos: tuple[int, int], size: tuple[int, int], *, mode: int = 0, **values: Any) -> int:
        sockets, widgets, outputs = self._shape(kind)
        unknown = set(values) - set(sockets) - {name for name, _ in widgets}
        assert not unknown, f"{kind} has no input {unknown}"
        node: dict[str, Any] = {
            "id": len(self.nodes) + 1,
            "type": kind,
            "pos": list(pos),
            "size": list(size),
            "flags": {},
            "order": len(self.nodes),
            "mode": mode,
            "inputs": [],
            "outputs": [{"name": name, "type": type_, "links": []} for name, type_ in outputs],
            "properties": {"Node name for S&R": kind},
            "widgets_values": [_plain(values.get(name), default) for name, default in widgets],
        }
        self.nodes.append(node)
        for name, type_ in sockets.items():
            node["inputs"].append({"name": name, "type": type_, "link": self._link(values.get(name), node, type_)})
        for name, _ in widgets:
            if isinstance(values.get(name), tuple):
                entry = {"name": name, "type": "COMBO", "widget": {"name": name}}
                node["inputs"].append({**entry, "link": self._link(values[name], node, "COMBO")})
        return int(node["id"])

    def _shape(self, kind: str) -> tuple[dict[str, str], list[tuple[str, Any]], list[tuple[str, str]]]:
        if kind in _CORE:
            sockets, widgets, outputs = _CORE[kind]
            return sockets, [(name, None) for name in widgets], outputs
        cls = self.classes[kind]
        declared: dict[str, Declaration] = {}
        for part in ("required", "optional"):
            declared |= cls.INPUT_TYPES().get(part, {})
        is_widget = {
            name: (isinstance(d[0], list) or d[0] in _WIDGETS) and not d[1].get("forceInput")
            for name, d in declared.items()
        }
        sockets = {name: str(d[0]) for name, d in declared.items() if not is_widget[name]}
        widgets = [(name, d[1].get("default")) for name, d in declared.items() if is_widget[name]]
        return sockets, widgets, list(zip(cls.RETURN_NAMES, (str(t) for t in cls.RETURN_TYPES), strict=True))

    def _link(self, value: Any, target: dict[str, Any], type_: str) -> int | None:
        if value is None:
            return None
        source = self.nodes[value[0] - 1]
        slot = next(i for i, output in enumerate(source["outputs"]) if output["name"] == value[1])
        number = len(self.links) + 1
        source["outputs"][slot]["links"].append(number)
        self.links.append([number, source["id"], slot, target["id"], len(target["inputs"]), type_])
        return number

    def to_json(self) -> dict[str, Any]:
        return {
            "last_node_id": len(self.nodes),
            "last_link_id": len(self.links),
            "nodes": self.nodes,
            "links": self.links,
            "groups": self.groups,
            "config": {},
            "extra": {},
            "version": 0.4,
        }


def _plain(value: Any, default: Any) -> Any:
    return default if value is None or isinstance(value, tuple) else value


# ---------------------------------------------------------------------------------------------------- the examples


def _start(
    graph: Graph, *, targets: dict[str, Any] | None = None, data: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Load SDXL, Training Dataset, Configure LoRA Targets at the left; returns Train's three links."""
    model = graph.add("SafeScalerLoadSDXL", (20, 60), (330, 130), checkpoint=TOY)
    dataset = graph.add(
        "SafeScalerDataset", (20, 240), (330, 780), folder="toy", model=(model, "model"), **(data or {})
    )
    settings = {"rank": 16, "conv_rank": 16, "model": (model, "model"), **(targets or {})}
    layers = graph.add("SafeScalerTargets", (20, 1070), (330, 420), **settings)
    return {"model": (model, "model"), "dataset": (dataset, "dataset"), "targets": (layers, "targets")}


_TOY_TRAIN: dict[str, Any] = {
    "purpose": "own settings",
    "vram": "own settings",
    "steps": 300,
    "learning_rate": 2e-3,
    "batch_size": 8,
    "schedule": "cosine",
    "preview_prompts": "a red zorp --d 1\na blue zorp --d 2",
    "preview_every": 100,
    "preview_steps": 20,
    "save_every": 100,
}


def _note(graph: Graph, text: str, pos: tuple[int, int], size: tuple[int, int] = (380, 240)) -> None:
    graph.add("MarkdownNote", pos, size, text=text)


def first_lora(graph: Graph) -> None:
    links = _start(graph)
    graph.add("SafeScalerTrain", (400, 60), (420, 960), output_name="first_lora", **links, **_TOY_TRAIN)
    _note(
        graph,
        "## First LoRA\nPress **Run**: the built-in toy model learns the word *zorp* (a heart) from 24 drawn pictures, "
        "on any computer, in minutes.\n\nFor your own LoRA: choose your SDXL checkpoint in **Load SDXL**, write the "
        "folder of your pictures into **Training Dataset**, and in **Train** choose *purpose* and *vram* (not *own "
        "settings*), set *steps*, *learning_rate*, *batch_size* to 0, and empty *preview_prompts*.",
        (850, 60),
    )


def style_with_validation(graph: Graph) -> None:
    links = _start(graph, targets={"layers": "style_blocks"}, data={"validation_split": 0.2})
    train = graph.add(
        "SafeScalerTrain", (400, 60), (420, 960), output_name="style", validate_every=25, lora_every=100,
        **links, **_TOY_TRAIN,
    )  # fmt: skip
    report = graph.add("SafeScalerReport", (850, 60), (380, 560), run=(train, "run"))
    graph.add("PreviewImage", (1260, 60), (420, 420), images=(train, "validation_images"))
    graph.add("PreviewImage", (1260, 520), (420, 420), images=(report, "charts"))
    _note(
        graph,
        "## A style, with a validation loss\nA fifth of the pictures is held out. When the validation loss stops "
        "falling while the training loss goes on, more steps only learn the pictures by heart: take an earlier LoRA "
        "(one is saved every 100 steps).",
        (850, 660),
    )


def resume(graph: Graph) -> None:
    links = _start(graph)
    checkpoint = graph.add("SafeScalerResume", (400, 1070), (420, 130))
    graph.add(
        "SafeScalerTrain", (400, 60), (420, 960), output_name="first_lora", resume=(checkpoint, "checkpoint"),
        **links, **{**_TOY_TRAIN, "steps": 400},
    )  # fmt: skip
    _note(
        graph,
        "## Go on from a checkpoint\nRun *First LoRA* before. Here steps is 400 instead of 300: the run goes on from "
        "step 300 with optimizer, schedule and data order as if it had never stopped. A finished run stays as it is; "
        "the longer one is a new run.\n\n*warm start* begins a new run with the LoRA instead.",
        (850, 60),
    )


def train_then_generate(graph: Graph) -> None:
    links = _start(graph)
    train = graph.add("SafeScalerTrain", (400, 60), (420, 960), output_name="use_me", **links, **_TOY_TRAIN)
    graph.add(
        "SafeScalerPreview", (850, 60), (420, 620), run=(train, "run"), strengths="0, 0.5, 1",
        prompts="a red zorp\na green zorp\na blue square", sampling_steps=20, guidance=3.0,
    )  # fmt: skip
    base = graph.add(
        "CheckpointLoaderSimple", (850, 760), (320, 100), mode=BYPASSED, ckpt_name="sd_xl_base_1.0.safetensors"
    )
    lora = graph.add(
        "LoraLoader", (1200, 760), (320, 130), mode=BYPASSED, model=(base, "MODEL"), clip=(base, "CLIP"),
        lora_name=(train, "lora_name"), strength_model=1.0, strength_clip=1.0,
    )  # fmt: skip
    words = graph.add("CLIPTextEncode", (1200, 940), (320, 120), mode=BYPASSED, clip=(lora, "CLIP"), text="zorp")
    none = graph.add("CLIPTextEncode", (1200, 1100), (320, 120), mode=BYPASSED, clip=(lora, "CLIP"), text="")
    empty = graph.add("EmptyLatentImage", (850, 910), (320, 110), mode=BYPASSED, width=1024, height=1024, batch_size=1)
    sampled = graph.add(
        "KSampler", (1550, 760), (320, 270), mode=BYPASSED, model=(lora, "MODEL"), positive=(words, "CONDITIONING"),
        negative=(none, "CONDITIONING"), latent_image=(empty, "LATENT"), seed=1, control_after_generate="fixed",
        steps=25, cfg=6.0, sampler_name="euler", scheduler="normal", denoise=1.0,
    )  # fmt: skip
    picture = graph.add(
        "VAEDecode", (1550, 1070), (320, 60), mode=BYPASSED, samples=(sampled, "LATENT"), vae=(base, "VAE")
    )
    graph.add("PreviewImage", (1900, 760), (360, 360), mode=BYPASSED, images=(picture, "IMAGE"))
    _note(
        graph,
        "## Train, then generate\n**Preview LoRA** samples the finished LoRA at three strengths. The grey nodes below "
        "are ComfyUI's own sampler: with a real SDXL checkpoint in *Load SDXL* and in *Load Checkpoint*, select them "
        "and press **Ctrl+B** to switch them on. (ComfyUI cannot load the toy.)",
        (1300, 60),
    )


def health_investigation(graph: Graph) -> None:
    links = _start(graph)
    monitor = graph.add("SafeScalerGradientMonitor", (850, 660), (420, 620))
    train = graph.add(
        "SafeScalerTrain", (400, 60), (420, 960), output_name="too_fast", monitor=(monitor, "monitor"), **links,
        **{**_TOY_TRAIN, "learning_rate": 0.05, "steps": 150},
    )  # fmt: skip
    report = graph.add("SafeScalerReport", (850, 60), (420, 560), run=(train, "run"))
    graph.add("PreviewImage", (1300, 60), (480, 480), images=(report, "charts"))
    _note(
        graph,
        "## What goes wrong when the learning rate is too high\n25 times the usual rate. Watch the **monitor** while "
        "it runs, and read the **report** afterwards. Then set *learning_rate* to 0.002 and compare.",
        (1300, 660),
    )


def fault_drill(graph: Graph) -> None:
    links = _start(graph)
    monitor = graph.add("SafeScalerGradientMonitor", (850, 660), (420, 620))
    train = graph.add(
        "SafeScalerTrain", (400, 60), (420, 960), output_name="drill", monitor=(monitor, "monitor"), **links,
        **{**_TOY_TRAIN, "steps": 60, "preview_prompts": "none", "more_settings": 'run.drill = "nan-latent"'},
    )  # fmt: skip
    report = graph.add("SafeScalerReport", (850, 60), (420, 560), run=(train, "run"))
    graph.add("PreviewImage", (1300, 60), (480, 480), images=(report, "charts"))
    _note(
        graph,
        "## A fault on purpose\n*more_settings* of **Train** says `run.drill = \"nan-latent\"`: at step 24 one "
        "picture's latents become NaN. The picture is named and left out, the step is computed again without it, and "
        "training goes on; the report says when and why.\n\nOthers: `lr-times-200` (goes back, halves the rate), "
        "`nan-weight`, `cut-adapter`, `te2-detached`; `safe-scaler drill --list` names all. It works with the toy "
        "only, and its LoRA is of no use.",
        (1300, 660), (480, 330),
    )  # fmt: skip


EXAMPLES = {
    "first_lora": first_lora,
    "style_with_validation": style_with_validation,
    "resume": resume,
    "train_then_generate": train_then_generate,
    "health_investigation": health_investigation,
    "fault_drill": fault_drill,
}


def main(words: list[str]) -> int:
    module = pack()
    different = []
    for name, build in EXAMPLES.items():
        graph = Graph(module.NODE_CLASS_MAPPINGS, module.NODE_DISPLAY_NAME_MAPPINGS)
        build(graph)
        text = json.dumps(graph.to_json(), indent=1, ensure_ascii=False) + "\n"
        file = FOLDER / f"{name}.json"
        if not file.is_file() or file.read_text(encoding="utf-8") != text:
            different.append(name)
            if "--check" not in words:
                file.write_text(text, encoding="utf-8")
    print(f"{len(EXAMPLES)} examples, {len(different)} {'differ' if '--check' in words else 'written'}")
    return 1 if different and "--check" in words else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
