from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from network_cases import ALL_PARTS, full_network, randomise, unet_inputs
from torch import nn
from torch.nn import functional

from trainer_core.draws import Draws
from trainer_core.errors import AdapterError
from trainer_core.models import SDXLModel, encode_captions, load_sdxl
from trainer_core.networks import DropoutDraws, LoraModule, Target
from trainer_core.networks.dropout import DropoutMasks, DropoutRates, apply_masks
from trainer_core.networks.initial import kohya_down


def weights_of(model: SDXLModel) -> dict[str, torch.Tensor]:
    return {f"{p}.{n}": w.clone() for p in ALL_PARTS for n, w in model.parts[p].state_dict().items()}


def test_untrained_network_computes_the_base_bit_for_bit(model: SDXLModel) -> None:
    inputs = unet_inputs(model)
    with torch.no_grad():
        base, text = model.denoise(*inputs), encode_captions(model, ["a red square", "x"])
        network = full_network(model)
        again, text_again = model.denoise(*inputs), encode_captions(model, ["a red square", "x"])
    network.detach()
    assert torch.equal(base, again)
    assert torch.equal(text.context_BTD, text_again.context_BTD)
    assert torch.equal(text.pooled_BD, text_again.pooled_BD)


def test_detach_and_multiplier_zero_give_the_base_back(model: SDXLModel) -> None:
    inputs, before = unet_inputs(model), weights_of(model)
    with torch.no_grad():
        base = model.denoise(*inputs)
        network = randomise(full_network(model))
        changed = model.denoise(*inputs)
        network.set_multiplier(0.0)
        muted = model.denoise(*inputs)
        network.set_multiplier(1.0)
        with network.detached():
            without = model.denoise(*inputs)
        back = model.denoise(*inputs)
        network.detach()
        after = model.denoise(*inputs)
    assert not torch.equal(base, changed)
    assert torch.equal(base, muted)
    assert torch.equal(base, without)
    assert torch.equal(changed, back)
    assert torch.equal(base, after)
    assert all(torch.equal(value, before[name]) for name, value in weights_of(model).items())
    assert not any("forward" in module.__dict__ for root in model.parts.values() for module in root.modules())


def test_only_adapters_move(model: SDXLModel) -> None:
    before = weights_of(model)
    network = full_network(model)
    start = network.state_dict()
    optimizer = torch.optim.SGD([parameter for _, parameter in network.named_parameters()], lr=1.0)
    for _ in range(2):
        text = encode_captions(model, ["a red square", "two"])
        noisy, timesteps, _, _, ids = unet_inputs(model)
        optimizer.zero_grad()
        model.denoise(noisy, timesteps, text.context_BTD, text.pooled_BD, ids).square().mean().backward()
        optimizer.step()
    moved = {key for key, value in network.state_dict().items() if not torch.equal(value, start[key])}
    network.detach()
    assert all(torch.equal(value, before[name]) for name, value in weights_of(model).items())
    assert all(weight.grad is None for root in model.parts.values() for weight in root.parameters())
    still = {name for name in network.modules if f"{name}.lora_up.weight" not in moved}
    # Text encoder 1's last layer is not used (kohya.md, fact 11): these six must stay zero, everything else must move.
    assert still == {name for name in network.modules if name.startswith("lora_te1_text_model_encoder_layers_2_")}
    assert not any(key.endswith(".alpha") for key in moved)


class Dense(nn.Module):
    """The dense equivalent of an adapted layer, computed independently: (W + scale * up @ down) x."""

    def __init__(self, module: LoraModule) -> None:
        super().__init__()
        self.down, self.up = (nn.Parameter(w.weight.detach().clone()) for w in (module.lora_down, module.lora_up))
        self.base, self.scale = module.base, module.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base = self.base
        weight = base.weight + self.scale * torch.einsum("or,r...->o...", self.up.flatten(1), self.down)
        if isinstance(base, nn.Conv2d):
            return functional.conv2d(x, weight, base.bias, base.stride, base.padding)
        return functional.linear(x, weight, base.bias)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_forward_and_gradients_equal_a_dense_computation(model: SDXLModel, checkpointing: bool) -> None:
    network = randomise(full_network(model))
    model.set_gradient_checkpointing(checkpointing)
    inputs = unet_inputs(model)
    output = model.denoise(*inputs)
    output.square().mean().backward()
    gradients = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
    network.detach()
    model.set_gradient_checkpointing(False)

    dense = {name: Dense(module) for name, module in network.modules.items() if module.part == "unet"}
    originals = {name: network.modules[name].base for name in dense}
    try:
        for name, base in originals.items():
            base.forward = dense[name].forward  # type: ignore[method-assign]
            dense[name].base = copy.copy(base)
        expected = model.denoise(*inputs)
        expected.square().mean().backward()
    finally:
        for base in originals.values():
            del base.__dict__["forward"]
    assert (output - expected).abs().max() <= 5e-6
    assert len(gradients) == 2 * len(dense)
    for name, module in dense.items():
        for key, parameter in (("down", module.down), ("up", module.up)):
            ours = gradients[f"{name}.lora_{key}.weight"]
            assert ours.dtype == torch.float32
            assert (ours - parameter.grad).norm() <= 5e-5 * parameter.grad.norm() + 1e-10, (name, key)


def test_weights_stay_fp32_and_compute_follows_the_base(model: SDXLModel) -> None:
    layer = nn.Linear(8, 6).to(torch.bfloat16)
    module = LoraModule(Target("unet", "x", "lora_unet_x", layer), rank=2, alpha=2.0)
    nn.init.normal_(module.lora_down.weight)
    nn.init.normal_(module.lora_up.weight)
    module.attach()
    output = layer(torch.ones(1, 3, 8, dtype=torch.bfloat16))
    assert output.dtype == torch.bfloat16
    output.float().sum().backward()
    assert module.lora_down.weight.dtype == module.lora_down.weight.grad.dtype == torch.float32
    seen: list[torch.dtype] = []
    full = nn.Linear(8, 6)
    other = LoraModule(Target("unet", "y", "lora_unet_y", full), rank=2, alpha=2.0)
    nn.init.normal_(other.lora_down.weight)
    nn.init.normal_(other.lora_up.weight)
    other.attach()
    with torch.autocast("cpu", torch.bfloat16):
        full.register_forward_hook(lambda m, i, o: seen.append(o.dtype))
        full(torch.ones(1, 3, 8))
    assert seen == [torch.bfloat16]


def test_detach_refuses_while_something_lies_on_top() -> None:
    layer = nn.Linear(4, 4)
    first, second = (LoraModule(Target("unet", "x", f"n{i}", layer), rank=1, alpha=1.0) for i in range(2))
    first.attach()
    second.attach()
    with pytest.raises(AdapterError, match="put on top"):
        first.detach()
    second.detach()
    first.detach()
    assert "forward" not in layer.__dict__


def test_convolutions_with_groups_are_refused() -> None:
    layer = nn.Conv2d(4, 4, 3, groups=2)
    with pytest.raises(AdapterError, match="2 groups"):
        LoraModule(Target("unet", "x", "n", layer), rank=1, alpha=1.0)


@pytest.mark.parametrize("shape", [(3, 5, 4), (3, 4), (3, 4, 2, 2)])
@pytest.mark.parametrize(("seed", "drops_module"), [(3, True), (4, False)])
def test_dropout_equals_kohyas_draws(shape: tuple[int, ...], seed: int, drops_module: bool) -> None:
    """kohya.md 1.6: torch.rand(1) for the module, F.dropout, then rand(B, rank) > p and a scale of 1 / (1 - p)."""
    hidden = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(seed)
    assert bool(torch.rand(1) < 0.3) is drops_module
    wanted = functional.dropout(hidden, p=0.25)
    mask = torch.rand((shape[0], 4)) > 0.5
    wanted = wanted * mask.view({3: (3, 1, 4), 2: (3, 4), 4: (3, 4, 1, 1)}[len(shape)]) * (1 / (1 - 0.5))
    torch.manual_seed(seed)
    module_draw = torch.rand(1).expand(shape[0])
    # F.dropout keeps where a Bernoulli draw is one; its uniform numbers are recovered from that draw.
    kept = torch.empty(shape).bernoulli_(0.75)
    masks = DropoutMasks(module_B=module_draw, neuron=kept, rank_BR=torch.rand((shape[0], 4)))
    ours = apply_masks(hidden, masks, DropoutRates(neuron=0.25, rank=0.5, module=0.3))
    assert torch.equal(ours, torch.zeros_like(wanted) if drops_module else wanted)


def test_module_dropout_drops_whole_rows() -> None:
    masks = DropoutMasks(module_B=torch.tensor([0.1, 0.9]))
    ours = apply_masks(torch.ones(2, 3, 4), masks, DropoutRates(module=0.5))
    assert ours[0].abs().sum() == 0
    assert torch.equal(ours[1], torch.ones(3, 4))


def dropout_output(model: SDXLModel, keys: tuple[str, ...], rows: slice, epoch: int = 0) -> torch.Tensor:
    network = randomise(full_network(model, dropout=0.2, rank_dropout=0.2, module_dropout=0.2, preset="b_lora"))
    network.set_draws(DropoutDraws(Draws(4), epoch, keys))
    with torch.no_grad():
        output = model.denoise(*(value[rows] for value in unet_inputs(model)))
    network.detach()
    return output


def test_dropout_masks_follow_the_sample_not_the_batch(model: SDXLModel) -> None:
    both = dropout_output(model, ("a", "b"), slice(0, 2))
    second = dropout_output(model, ("b",), slice(1, 2))
    assert torch.allclose(both[1:], second, atol=1e-5)
    assert not torch.allclose(second, dropout_output(model, ("c",), slice(1, 2)), atol=1e-3)
    assert not torch.allclose(second, dropout_output(model, ("b",), slice(1, 2), epoch=1), atol=1e-3)


def test_dropout_recomputes_the_same_mask_under_checkpointing(model: SDXLModel) -> None:
    gradients = []
    for checkpointing in (False, True):
        network = randomise(full_network(model, dropout=0.3, rank_dropout=0.3, preset="b_lora"))
        network.set_draws(DropoutDraws(Draws(4), 0, ("a", "b")))
        model.set_gradient_checkpointing(checkpointing)
        model.denoise(*unet_inputs(model)).square().mean().backward()
        gradients.append({name: p.grad for name, p in network.named_parameters() if p.grad is not None})
        network.detach()
    model.set_gradient_checkpointing(False)
    for name, gradient in gradients[0].items():
        assert torch.allclose(gradient, gradients[1][name], rtol=1e-4, atol=1e-9), name


def test_dropout_without_draws_is_an_error_and_eval_needs_none(model: SDXLModel) -> None:
    network = randomise(full_network(model, dropout=0.2))
    inputs = unet_inputs(model)
    with pytest.raises(AdapterError, match="set_draws"):
        model.denoise(*inputs)
    network.set_draws(DropoutDraws(Draws(4), 0, ("a", "b", "c")))
    with pytest.raises(AdapterError, match="keys for 3 samples"):
        model.denoise(*inputs)
    network.eval()
    model.denoise(*inputs)
    network.detach()


def test_kohya_init_equals_three_draws_of_torchs_stream() -> None:
    torch.manual_seed(9)
    wanted = []
    for _ in range(2):
        down, up = nn.Linear(6, 3, bias=False), nn.Linear(3, 5, bias=False)
        nn.init.kaiming_uniform_(down.weight, a=5**0.5)
        wanted.append(down.weight)
        assert up.weight is not None
    generator = torch.Generator().manual_seed(9)
    for weight in wanted:
        assert torch.equal(kohya_down(torch.Size((3, 6)), torch.Size((5, 3)), generator), weight)


def test_network_can_be_made_and_trained_inside_inference_mode(micro_folder: object) -> None:
    from pathlib import Path

    from trainer_core.models import load_sdxl

    own = load_sdxl(Path(str(micro_folder)))
    with torch.inference_mode():
        network = randomise(full_network(own))
        own.denoise(*unet_inputs(own))
        state = network.state_dict()
    own.denoise(*unet_inputs(own)).square().mean().backward()
    assert all(p.grad is not None for p in network.parameters_of("unet").values())
    assert len(state) == 3 * len(network.modules)


def gradients_with(model: SDXLModel, recompute: bool) -> dict[str, torch.Tensor]:
    network = randomise(full_network(model))
    if not recompute:
        assert network._sources is not None
        network._sources.remove()
    text = encode_captions(model, ["a red square", "two"])
    noisy, timesteps, _, _, ids = unet_inputs(model)
    model.denoise(noisy, timesteps, text.context_BTD, text.pooled_BD, ids).square().mean().backward()
    network.detach()
    return {name: p.grad for name, p in network.named_parameters() if p.grad is not None}


def test_recomputed_inputs_give_the_same_gradients(model: SDXLModel) -> None:
    plain, ours = gradients_with(model, recompute=False), gradients_with(model, recompute=True)
    assert plain.keys() == ours.keys()
    assert len(ours) > 500
    for name, gradient in plain.items():
        assert (gradient - ours[name]).norm() <= 1e-5 * gradient.norm() + 1e-12, name


def kept_bytes(model: SDXLModel) -> int:
    kept: dict[int, torch.UntypedStorage] = {}  # held, so that no address is counted for two tensors
    weights = {weight.untyped_storage()._cdata for weight in model.unet.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model.denoise(*unet_inputs(model, batch=2, side=16))
    del output
    return sum(storage.nbytes() for storage in kept.values())


def test_inputs_of_adapted_layers_are_not_kept(micro_folder: Path) -> None:
    model = load_sdxl(micro_folder)  # its own: hooks of other tests' networks would count too
    network = randomise(full_network(model, conv_rank=0, rank=1, alpha=1.0))
    with_sources = kept_bytes(model)
    assert network._sources is not None
    network._sources.remove()
    without = kept_bytes(model)
    network.detach()
    assert with_sources < 0.9 * without, (with_sources, without)  # 0.873 on the micro toy at rank 1
    assert not any(module._forward_hooks for root in model.parts.values() for module in root.modules())


def test_under_checkpointing_nothing_is_noted_for_recomputation(model: SDXLModel) -> None:
    network = randomise(full_network(model))
    norm = model.unet.down_blocks[1].attentions[0].transformer_blocks[0].norm1
    seen: list[bool] = []
    handle = norm.register_forward_hook(lambda m, i, o: seen.append(hasattr(o, "_safe_scaler_source")))
    model.denoise(*unet_inputs(model))
    model.set_gradient_checkpointing(True)
    model.denoise(*unet_inputs(model))
    model.set_gradient_checkpointing(False)
    handle.remove()
    network.detach()
    assert seen == [True, False]


def test_compiled_blocks_compute_and_learn_the_same(model: SDXLModel) -> None:
    network = randomise(full_network(model, preset="b_lora", conv_rank=0))
    block = model.unet.up_blocks[0].attentions[0].transformer_blocks[0]
    draws = Draws(2)
    x, context = draws.normal(0, "x", "t", (2, 16, 64)), draws.normal(0, "c", "t", (2, 77, 96))
    name = "lora_unet_output_blocks_0_1_transformer_blocks_0_ff_net_2.lora_down.weight"
    parameter = dict(network.named_parameters())[name]
    results = []
    for run in (block, torch.compile(block, backend="aot_eager")):
        parameter.grad = None
        output = run(x, encoder_hidden_states=context)
        output.square().mean().backward()
        assert parameter.grad is not None
        results.append((output.detach(), parameter.grad))
    network.detach()
    torch._dynamo.reset()
    assert (results[0][0] - results[1][0]).abs().max() <= 5e-6
    assert (results[0][1] - results[1][1]).norm() <= 5e-5 * results[0][1].norm()
