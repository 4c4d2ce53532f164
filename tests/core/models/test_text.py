"""Captions to context and pooled vector, with the rules of kohya-ss/sd-scripts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainer_core.models import SDXLModel, encode_captions, token_chunks, tokenizers

END, BEGIN = 49407, 49406


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    return tokenizers.load_tokenizers(None, None, (49_408, 49_408))


def _words(count: int) -> str:
    return " ".join(["cat"] * count)


def test_short_limit_is_one_padded_window(pair: tuple[Any, Any]) -> None:
    first = token_chunks(pair[0], ["a cat", _words(100)])
    assert first.shape == (2, 1, 77)
    assert first[0, 0].tolist() == [BEGIN, 320, 2368] + [END] * 74
    assert first[1, 0].tolist() == [BEGIN] + [2368] * 75 + [END]
    second = token_chunks(pair[1], ["a cat", _words(75)])
    assert second[0, 0].tolist() == [BEGIN, 320, 2368, END] + [0] * 73
    assert second[1, 0].tolist() == [BEGIN] + [2368] * 75 + [END]


def test_long_caption_of_tokenizer_1_ends_every_chunk_with_end_of_text(pair: tuple[Any, Any]) -> None:
    chunks = token_chunks(pair[0], [_words(100)], 225)[0]
    assert chunks.shape == (3, 77)
    assert chunks[0].tolist() == [BEGIN] + [2368] * 75 + [END]
    assert chunks[1].tolist() == [BEGIN] + [2368] * 25 + [END] * 51
    assert chunks[2].tolist() == [BEGIN] + [END] * 76


def test_long_caption_of_tokenizer_2_is_mended_as_in_sd_scripts(pair: tuple[Any, Any]) -> None:
    """Padding is id 0: a chunk that text fills gets its end back, an empty chunk begins with an end."""
    chunks = token_chunks(pair[1], [_words(100)], 225)[0]
    assert chunks[0].tolist() == [BEGIN] + [2368] * 75 + [END]
    assert chunks[1].tolist() == [BEGIN] + [2368] * 25 + [END] + [0] * 50
    assert chunks[2].tolist() == [BEGIN, END] + [0] * 75


@pytest.mark.parametrize(
    ("count", "limit"), [(74, 150), (75, 150), (76, 150), (149, 150), (150, 150), (151, 150), (260, 225)]
)
def test_both_tokenizers_give_the_same_length_at_every_edge(pair: tuple[Any, Any], count: int, limit: int) -> None:
    for tokenizer in pair:
        chunks = token_chunks(tokenizer, [_words(count), ""], limit)
        assert chunks.shape == (2, limit // 75, 77)
        body = chunks[0, :, 1:-1].flatten()
        assert int((body == 2368).sum()) == min(count, limit)
        assert bool((chunks == END).any(dim=-1).all())


def test_unknown_limit_is_refused(toy: SDXLModel) -> None:
    with pytest.raises(ValueError, match="max_token_length must be one of"):
        encode_captions(toy, ["a"], max_token_length=77)
    with pytest.raises(ValueError, match="at least one caption"):
        encode_captions(toy, [])


def test_one_window_equals_the_libraries_own_outputs(toy: SDXLModel) -> None:
    captions = ["a red square", "", "a blue circle"]
    embeds = encode_captions(toy, captions)
    hidden = []
    for encoder, tokenizer in zip(toy.text_encoders, toy.tokenizers, strict=True):
        ids: Any = tokenizer(captions, padding="max_length", truncation=True, max_length=77, return_tensors="pt")
        out: Any = encoder(input_ids=ids["input_ids"], output_hidden_states=True)
        assert len(out.hidden_states) == encoder.config.num_hidden_layers + 1
        hidden.append(out.hidden_states[-2])
    assert torch.equal(embeds.context_BTD, torch.cat(hidden, dim=-1))
    assert torch.allclose(embeds.pooled_BD, out.text_embeds, atol=1e-6)
    assert embeds.context_BTD.shape == (3, 77, 96)


def test_context_is_before_the_last_layer_and_before_the_final_norm(toy: SDXLModel) -> None:
    """Layer by layer by hand, so that a library's change of what `hidden_states` means is noticed."""
    encoder: Any = toy.text_encoders[0]
    inner = getattr(encoder, "text_model", encoder)
    ids = token_chunks(toy.tokenizers[0], ["a red square"])[:, 0]
    state = inner.embeddings(input_ids=ids)
    mask = torch.full((77, 77), float("-inf")).triu(1)[None, None]
    for layer in list(inner.encoder.layers)[:-1]:
        state = _output(layer, state, mask)
    assert torch.allclose(encode_captions(toy, ["a red square"]).context_BTD[..., :32], state, atol=1e-5)


def _output(layer: Any, state: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    try:
        found = layer(state, mask)
    except TypeError:  # transformers 4 asks for a causal mask as well
        found = layer(state, mask, None)
    return found[0] if isinstance(found, tuple) else found


def test_long_context_is_joined_from_its_chunks(toy: SDXLModel) -> None:
    caption = "a red square " * 40
    embeds = encode_captions(toy, [caption, "a red square"], max_token_length=150)
    assert embeds.context_BTD.shape == (2, 152, 96)
    parts = []
    for encoder, tokenizer in zip(toy.text_encoders, toy.tokenizers, strict=True):
        chunks = token_chunks(tokenizer, [caption], 150)[0]
        out: Any = encoder(input_ids=chunks, output_hidden_states=True)
        state = out.hidden_states[-2]
        parts.append(torch.cat([state[0, :1], state[0, 1:76], state[1, 1:76], state[1, 76:]]))
    assert torch.allclose(embeds.context_BTD[0], torch.cat(parts, dim=-1), atol=1e-6)
    first = encode_captions(toy, [caption]).pooled_BD
    assert torch.allclose(embeds.pooled_BD[:1], first, atol=1e-6)  # of chunk 0 alone


def test_batch_does_not_change_a_caption(toy: SDXLModel) -> None:
    together = encode_captions(toy, ["a red square", "a blue circle"])
    alone = encode_captions(toy, ["a blue circle"])
    assert torch.allclose(together.context_BTD[1], alone.context_BTD[0], atol=1e-6)
    assert not torch.allclose(together.pooled_BD[0], together.pooled_BD[1], atol=1e-3)


def test_gradients_flow_where_they_are_wanted(toy: SDXLModel) -> None:
    from trainer_core.models import load_sdxl

    assert not encode_captions(toy, ["a"]).context_BTD.requires_grad
    model = load_sdxl("toy")
    inner: Any = model.text_encoders[1].text_model
    weight = inner.encoder.layers[-1].mlp.fc1.weight.requires_grad_(True)
    embeds = encode_captions(model, ["a red square"])
    assert not embeds.context_BTD.requires_grad  # the last layer acts through the pooled vector only
    embeds.pooled_BD.sum().backward()
    assert weight.grad is not None
    assert float(weight.grad.abs().sum()) > 0
