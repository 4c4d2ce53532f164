"""The check before the first step on the micro toy: it names exactly what is broken, mends it, and changes nothing
else.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from run_setup import small_config
from torch.utils.checkpoint import checkpoint

from trainer_core.assemble import assemble
from trainer_core.config_io import from_dict
from trainer_core.drill import inject
from trainer_core.drill.site import Site
from trainer_core.errors import HealthError
from trainer_core.events import EventBus
from trainer_core.health.audit import audit
from trainer_core.health.repair import refusal, repair
from trainer_core.prepare import create_run
from trainer_core.runs.database import RunDatabase
from trainer_core.runs.protocol import Commands


@pytest.fixture(scope="module")
def site(micro_model: Path, pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """One assembled run of the UNet's attention and text encoder 1; every test undoes what it breaks."""
    config = small_config(
        micro_model,
        pictures,
        tmp_path_factory.mktemp("runs"),
        lora={"preset": "attention"},
        optimizer={"te2_lr": 0.0},
        health={"audit": "off"},
    )
    folder = create_run(config)
    stored = folder.read_config()
    events: list[dict[str, Any]] = []
    bus = EventBus(run_id="audit")
    bus.subscribe(events.append)
    with RunDatabase(folder.database_path) as database:
        made = assemble(folder, stored, from_dict(stored["config"]), bus=bus, commands=Commands(), database=database)
        assert made is not None
        trainer = made.trainer
        assert trainer.health is not None
        yield SimpleNamespace(trainer=trainer, health=trainer.health, plant=Site(trainer, 3, 1), events=events)
        trainer.health.close()


def look(site: SimpleNamespace) -> Any:
    return audit(site.trainer, site.health.tensors, site.health.allowed)


def modules_of(report: Any) -> set[str]:
    return {name.partition(".")[0] for name in report.named}


def test_a_sound_run_is_silent_and_stays_bit_for_bit(site: SimpleNamespace) -> None:
    parameters = site.plant.parameters()
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    random = torch.get_rng_state()
    report = look(site)
    assert report.sound, report.findings
    assert site.health.allowed, "text encoder 1's last layer gets no gradient by design"
    assert {report.tensors[name].gradient for name in site.health.allowed} == {"none"}
    assert all(torch.equal(before[name], parameter) for name, parameter in parameters.items())
    assert all(parameter.grad is None for parameter in parameters.values())
    assert torch.equal(random, torch.get_rng_state())
    assert site.trainer.parts.network.container.training


def test_cut_adapters_are_named_exactly(site: SimpleNamespace) -> None:
    planted = inject.cut_adapters(site.plant)
    try:
        report = look(site)
    finally:
        for module in site.plant.modules():
            module.__dict__.pop("_down", None)
    assert {finding.kind for finding in report.findings} == {"DISCONNECTED"}
    assert report.named == {f"{module}.lora_down.weight" for module in planted.modules}
    assert look(site).sound


def test_replaced_tensors_are_named_and_mended_without_training_more(site: SimpleNamespace) -> None:
    trained = set(site.plant.parameters())
    planted = inject.orphaned_parameters(site.plant)
    report = look(site)
    assert {(finding.kind, finding.cause) for finding in report.findings} == {("STALE", "outside")}
    assert modules_of(report) == set(planted.modules)
    mended, done = repair(site.trainer, site.health.tensors, site.health.allowed, report)
    assert mended.sound
    assert [one.mended for one in done] == [True]
    assert "optimizer holds the live tensors" in done[0].action
    held = {id(p) for group in site.trainer.parts.optimizer.param_groups for p in group["params"]}
    assert held == {id(parameter) for parameter in site.plant.parameters().values()}
    assert set(site.plant.parameters()) == trained


def test_switched_off_and_cast_tensors_are_mended(site: SimpleNamespace) -> None:
    first, second, *_ = site.plant.modules()
    first.requires_grad_(False)
    second.lora_up.weight.data = second.lora_up.weight.data.bfloat16()
    report = look(site)
    assert {(f.kind, f.cause) for f in report.findings} == {("FROZEN", "off"), ("STALE", "dtype")}
    mended, done = repair(site.trainer, site.health.tensors, site.health.allowed, report)
    assert mended.sound
    assert len(done) == 2
    assert second.lora_up.weight.dtype == torch.float32


def test_a_block_computed_without_gradients_is_found_by_name(site: SimpleNamespace) -> None:
    """no_grad around one transformer: the report names it, nothing mends it, and the refusal says both."""
    unet: Any = site.trainer.parts.model.unet
    path = "up_blocks.0.attentions.0"
    block = unet.get_submodule(path)
    original = block.forward

    def frozen(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return original(*args, **kwargs)

    block.forward = frozen
    try:
        report = look(site)
        mended, done = repair(site.trainer, site.health.tensors, site.health.allowed, report)
    finally:
        del block.forward
    assert {finding.kind for finding in report.findings} == {"DISCONNECTED"}
    assert {m.name for m in site.plant.modules() if m.path.startswith(path + ".")} <= modules_of(report)
    assert report.broken is not None
    assert report.broken.kind == "off"
    assert report.broken.module.startswith(f"unet.{path}.")
    assert not mended.sound
    error = refusal(mended, done)
    assert isinstance(error, HealthError)
    assert "gradients switched off" in str(error)
    assert "Tried without success" not in str(error)


def test_a_rate_of_zero_for_lora_up_is_told(site: SimpleNamespace) -> None:
    optimizer = site.trainer.parts.optimizer
    before = [
        {**group, "params": list(group["params"]), "names": list(group["names"])} for group in optimizer.param_groups
    ]
    inject.b_rate_zero(site.plant)
    report = look(site)
    optimizer.param_groups[:] = before
    assert {(finding.kind, finding.cause) for finding in report.findings} == {("IMBALANCED", "b rate")}
    assert all(".lora_up" in name for name in report.named)
    assert look(site).sound


def test_a_text_encoder_that_is_not_reached_is_an_error(site: SimpleNamespace) -> None:
    encoder: Any = site.trainer.parts.model.text_encoders[0]
    original = encoder.forward

    def frozen(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return original(*args, **kwargs)

    encoder.forward = frozen
    site.health.config = site.trainer.config.health.__class__(audit="check")
    try:
        with pytest.raises(HealthError, match="Text encoder 1 is trained, but no gradient reaches it"):
            site.health.audit()
    finally:
        del encoder.forward
    assert site.health.audit().sound


def wrapped(owner: Any, name: str, wrap: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put `wrap(original)` in the place of a method of one object, for one test."""
    monkeypatch.setattr(owner, name, wrap(getattr(owner, name)), raising=False)


def trainable(site: SimpleNamespace) -> set[str]:
    """Everything that learns: what needs a gradient in any part of the model, and what the optimizer holds."""
    model, optimizer = site.trainer.parts.model, site.trainer.parts.optimizer
    names = {id(p): f"{part}.{n}" for part, root in model.parts.items() for n, p in root.named_parameters()}
    names |= {id(p): n for n, p in site.plant.parameters().items()}
    roots = [*model.parts.values(), site.trainer.parts.network.container]
    asked = {names[id(p)] for root in roots for p in root.parameters() if p.requires_grad}
    held = {names.get(id(p), "foreign") for group in optimizer.param_groups for p in group["params"]}
    return asked | held


def plant_detached_output(site: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The adapter's output is detached: both of its factors get nothing, and nothing raises."""
    module = site.plant.modules()[4]
    wrapped(module, "delta", lambda original: lambda *args: original(*args).detach(), monkeypatch)
    return {f"{module.name}.lora_down.weight", f"{module.name}.lora_up.weight"}


def plant_reentrant(site: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """diffusers' own switch with the reentrant checkpoint. Text encoder 1 is trained here, so the first transformer is
    handed its captions past the checkpoint: no input of it needs a gradient then."""
    unet = site.trainer.parts.model.unet
    name, first = next((n, m) for n, m in unet.named_modules() if type(m).__name__ == "Transformer2DModel")
    inside = set(first.modules())

    def reentrant(function: Any, hidden: torch.Tensor, *rest: Any) -> Any:
        if function in inside:
            return checkpoint(lambda x: function(x, *rest), hidden, use_reentrant=True)
        return checkpoint(function, hidden, *rest, use_reentrant=True)

    unet.enable_gradient_checkpointing(gradient_checkpointing_func=reentrant)
    modules = [m.name for m in site.plant.modules() if m.path.startswith(name + ".")]
    return {f"{module}.{factor}.weight" for module in modules for factor in ("lora_down", "lora_up")}


def plant_half(site: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """`module.to` keeps the parameters' identity, and rounds them."""
    module = site.plant.modules()[2]
    before = id(module.lora_up.weight)
    module.to(torch.bfloat16)
    assert id(module.lora_up.weight) == before
    return {f"{module.name}.lora_down.weight", f"{module.name}.lora_up.weight"}


MATRIX = {
    "adapter's output detached": (plant_detached_output, "DISCONNECTED", "", ""),
    "reentrant checkpoint": (plant_reentrant, "DISCONNECTED", "reentrant", "is no longer reentrant"),
    "module.to(bfloat16)": (plant_half, "STALE", "", "kept in fp32 again"),
}


@pytest.mark.parametrize("row", MATRIX)
def test_chain_break_matrix(row: str, site: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the matrix that train on in silence: named exactly, cut found where modules show it, mended where that is
    possible, and never by training more. (The rows detach between A and B, and a parameter that was replaced, are tests
    of their own above.)"""
    plant, kind, broken, action = MATRIX[row]
    before = trainable(site)
    model = site.trainer.parts.model
    try:
        planted = plant(site, monkeypatch)
        report = look(site)
        assert {finding.kind for finding in report.findings} == {kind}
        assert report.named == planted
        assert ("" if report.broken is None else report.broken.kind) == broken
        mended, done = repair(site.trainer, site.health.tensors, site.health.allowed, report)
    finally:
        monkeypatch.undo()
        model.set_gradient_checkpointing(False)
        model.unet.train(False)
        site.health.refresh()
    assert mended.sound == bool(action)
    assert [one.action for one in done if action not in one.action] == []
    assert trainable(site) == before
    assert look(site).sound


def test_in_place_arithmetic_is_fine_until_it_overwrites_what_backward_needs(
    site: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The matrix's other rows: h += 1 gives right gradients and is silent; overwriting a saved tensor raises in torch
    itself and never trains on."""
    block = site.trainer.parts.model.unet.get_submodule("up_blocks.0.attentions.0")

    def plain(original: Any) -> Any:
        def forward(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            output = original(hidden * 1.0, *args, **kwargs)
            output[0].add_(1.0)
            return output

        return forward

    def overwritten(original: Any) -> Any:
        def forward(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            needed = hidden.exp()
            output = original(needed, *args, **kwargs)
            needed.add_(1.0)
            return output

        return forward

    with monkeypatch.context() as patch:
        wrapped(block, "forward", plain, patch)
        assert look(site).sound
    with monkeypatch.context() as patch:
        wrapped(block, "forward", overwritten, patch)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            look(site)
    assert look(site).sound


def test_a_repair_that_would_train_more_is_refused(site: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rung does; one that would is an error and not a run that trains what nobody asked for."""
    network = site.trainer.parts.network
    first, *_ = site.plant.modules()
    first.requires_grad_(False)
    report = look(site)
    original = network.parameters_of

    def widen(trainer: Any, found: Any) -> str:
        base = trainer.parts.model.unet.conv_in.weight
        extra = lambda part: {**original(part), **({"conv_in.weight": base} if part == "unet" else {})}  # noqa: E731
        monkeypatch.setattr(network, "parameters_of", extra)
        return "the base is trained as well"

    monkeypatch.setattr("trainer_core.health.repair._RUNGS", (widen,))
    try:
        with pytest.raises(HealthError, match="would have trained tensors that nobody asked for"):
            repair(site.trainer, site.health.tensors, site.health.allowed, report)
    finally:
        monkeypatch.undo()
        first.requires_grad_(True)
    assert look(site).sound


def test_watching_reads_nothing_from_the_device(site: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fast or full measurement: not one read more than a step without gradient health."""
    trainer, counts = site.trainer, {"reads": 0}
    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "__index__"):
        original = getattr(torch.Tensor, name)

        def counted(self: torch.Tensor, *args: Any, _original: Any = original) -> Any:
            counts["reads"] += 1
            return _original(self, *args)

        monkeypatch.setattr(torch.Tensor, name, counted)

    def reads(*, watched: bool, due: bool) -> int:
        trainer.health, counts["reads"] = site.health if watched else None, 0
        site.health.probe.due = due
        assert trainer.train_step()
        return counts["reads"]

    trainer.parts.network.train()
    reads(watched=True, due=True)  # the optimizer's state is made in the first step
    rows_before = site.health.latest
    plain, fast, full = reads(watched=False, due=False), reads(watched=True, due=False), reads(watched=True, due=True)
    assert plain >= 1, "the step's own reading"
    assert fast == plain
    assert full == plain
    assert site.health.latest is not rows_before
    assert site.health.latest.slow is not None
