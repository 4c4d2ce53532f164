"""Captions -> the UNet's context and pooled vector, as SDXL was trained and as kohya-ss/sd-scripts does it.

Shapes: B captions, T tokens (77, or 75 n + 2 for longer limits), D features.
Context: second-last hidden states of both encoders, before the final norm, side by side (Podell et al. 2023, 2.1).
Pooled: encoder 2's projected final state at the first end-of-text of the first 75-token chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .sdxl import SDXLModel
from .weighted_text import weighted_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHUNK = 75
WINDOW = CHUNK + 2
TOKEN_LENGTHS = (75, 150, 225)


class TextEmbeds(NamedTuple):
    """A caption as the UNet needs it, on its device, in the encoders' type: context (B, T, D1 + D2), pooled (B, D2)."""

    context_BTD: torch.Tensor
    pooled_BD: torch.Tensor


def encode_captions(
    model: SDXLModel, captions: Sequence[str], *, max_token_length: int = CHUNK, weighted: bool = False
) -> TextEmbeds:
    """Encode plain captions; every character reaches the tokenizer as written, longer text than the limit is cut.

    Gradients flow where the caller enabled them (adapters in the encoders); an empty caption is the encoded empty text.
    `weighted`: brackets in captions are weights (`weighted_text`).
    """
    if not captions:
        raise ValueError("encode_captions needs at least one caption")
    chunks = [_chunks(tokenizer, captions, max_token_length, weighted) for tokenizer in model.tokenizers]
    ids_BNW = [ids for ids, _ in chunks]
    first, second = model.text_encoders
    hidden_1, _ = _run(first, ids_BNW[0])
    hidden_2, last_2 = _run(second, ids_BNW[1])
    end_id: Any = model.tokenizers[1].eos_token_id
    pooled_BD = second.text_projection(_first_end(last_2, ids_BNW[1], int(end_id)))
    states = [_joined(hidden_1), _joined(hidden_2)]
    for place, (_, weights_BNW) in enumerate(chunks):
        if weights_BNW is not None:
            states[place] = states[place] * _joined(weights_BNW.unsqueeze(-1).to(states[place]))
    # The encoders may lie in host memory (memory.text_encoders).
    return TextEmbeds(torch.cat(states, dim=-1).to(model.device), pooled_BD.to(model.device))


def token_chunks(
    tokenizer: PreTrainedTokenizerBase, captions: Sequence[str], max_token_length: int = CHUNK
) -> torch.Tensor:
    """Token ids (B, N, 77) of N chunks: each has a start, 75 tokens of the caption and an end.

    The text is tokenised once to 75 N + 2 with padding; chunk i is [start] + ids[1 + 75 i : 76 + 75 i] + [last id].
    With a padding that is not end-of-text (tokenizer 2) two ids are mended so that every chunk has an end-of-text:
    the last one where text runs up to it, the first of an otherwise empty chunk (sd-scripts' rule).
    """
    return _chunks(tokenizer, captions, max_token_length, False)[0]


def _chunks(
    tokenizer: PreTrainedTokenizerBase, captions: Sequence[str], max_token_length: int, weighted: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Ids as `token_chunks` says and, where captions carry weights, the weight of each, both (B, N, 77)."""
    if max_token_length not in TOKEN_LENGTHS:
        raise ValueError(f"max_token_length must be one of {TOKEN_LENGTHS}, got {max_token_length}")
    if weighted:
        ids_BT, weights_BT = weighted_rows(tokenizer, captions, max_token_length + 2)
        return _mended(_split(ids_BT), tokenizer), _split(weights_BT)
    tokenised: Any = tokenizer(
        list(captions), padding="max_length", truncation=True, max_length=max_token_length + 2, return_tensors="pt"
    )
    return _mended(_split(tokenised["input_ids"]), tokenizer), None


def _split(row_BT: torch.Tensor) -> torch.Tensor:
    """A row of 75 N + 2 as N chunks (B, N, 77), each with the row's first and last element around its 75."""
    body_BNC = row_BT[:, 1:-1].unflatten(1, (-1, CHUNK))
    count = body_BNC.shape[1]
    start_BN1 = row_BT[:, :1].unsqueeze(1).expand(-1, count, -1)
    last_BN1 = row_BT[:, -1:].unsqueeze(1).expand(-1, count, -1)
    return torch.cat([start_BN1, body_BNC, last_BN1], dim=-1)


def _mended(chunks_BNW: torch.Tensor, tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """Chunks that each hold an end-of-text; a single one does already."""
    if chunks_BNW.shape[1] == 1:
        return chunks_BNW
    end_id: Any = tokenizer.eos_token_id
    pad_id: Any = tokenizer.pad_token_id
    if pad_id != end_id:
        full_BN = (chunks_BNW[..., -2] != end_id) & (chunks_BNW[..., -2] != pad_id)
        chunks_BNW[..., -1] = torch.where(full_BN, end_id, chunks_BNW[..., -1])
        empty_BN = chunks_BNW[..., 1] == pad_id
        chunks_BNW[..., 1] = torch.where(empty_BN, end_id, chunks_BNW[..., 1])
    return chunks_BNW


def _run(encoder: Any, ids_BNW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Second-last hidden states and normed last states, both (B, N, 77, D)."""
    chunks = ids_BNW.shape[:2]
    ids = ids_BNW.flatten(0, 1).to(_device_of(encoder))
    found = encoder(input_ids=ids, output_hidden_states=True, return_dict=True)
    return found.hidden_states[-2].unflatten(0, chunks), found.last_hidden_state.unflatten(0, chunks)


def _device_of(encoder: Any) -> torch.device:
    inner = getattr(encoder, "text_model", encoder)
    return inner.final_layer_norm.weight.device


def _first_end(last_BNWD: torch.Tensor, ids_BNW: torch.Tensor, end_id: int) -> torch.Tensor:
    """States at the first end-of-text of chunk 0, (B, D)."""
    place_B = (ids_BNW[:, 0] == end_id).int().argmax(dim=-1).to(last_BNWD.device)
    return last_BNWD[torch.arange(last_BNWD.shape[0], device=last_BNWD.device), 0, place_B]


def _joined(hidden_BNWD: torch.Tensor) -> torch.Tensor:
    """Chunks back in a row: the first start, every chunk's 75 inner states, the last end: (B, 75 N + 2, D)."""
    if hidden_BNWD.shape[1] == 1:
        return hidden_BNWD[:, 0]
    inner = hidden_BNWD[:, :, 1:-1].flatten(1, 2)
    return torch.cat([hidden_BNWD[:, 0, :1], inner, hidden_BNWD[:, -1, -1:]], dim=1)
