"""CLIP tokenizers, built offline: SDXL's from the shipped merges, others from a model's own folder.

The vocabulary follows from the merges (Radford et al. 2021, CLIP's byte-pair encoding): 256 byte symbols, the same with
an end-of-word mark, one token a merge, then start and end of text. The two tokenizers differ in their padding only:
the first pads with end-of-text, the second with id 0 ("!").
"""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ModelFileError
from .configs import SHIPPED

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SDXL_VOCABULARY = 49_408
SDXL_MERGES = 48_894
START, END = "<|startoftext|>", "<|endoftext|>"
FOLDERS = ("tokenizer", "tokenizer_2")
_PADDING = (END, "!")


def byte_symbols() -> list[str]:
    """CLIP's 256 printable stand-ins for bytes, in the order of their ids (`!` is 0)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = len(set(range(256)) - set(printable))
    return [chr(code) for code in printable] + [chr(256 + index) for index in range(others)]


def sdxl_merges() -> list[str]:
    """The 48,894 merges of CLIP's vocabulary, from the shipped data file (credit in NOTICE)."""
    path = SHIPPED["sdxl"] / "clip_merges.txt.gz"
    with gzip.open(path, "rt", encoding="utf-8") as file:
        merges = file.read().splitlines()
    if len(merges) != SDXL_MERGES:
        raise ModelFileError(
            f"'{path}' is damaged: {len(merges)} merges instead of {SDXL_MERGES}. Install the package again.", path
        )
    return merges


def vocabulary_of(merges: list[str]) -> dict[str, int]:
    """Token -> id."""
    symbols = byte_symbols()
    joined = (merge.replace(" ", "") for merge in merges)
    tokens = [*symbols, *(f"{symbol}</w>" for symbol in symbols), *joined, START, END]
    return {token: index for index, token in enumerate(tokens)}


def load_tokenizers(
    folder: Path | None, config_dir: Path | None, vocabulary_sizes: tuple[int, int]
) -> tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase]:
    """The two tokenizers: from `config_dir`, else the model's folder, else shipped ones of the same vocabulary size.

    Raises ModelFileError when none fits the text encoders' vocabularies.
    """
    sizes = dict(zip(FOLDERS, vocabulary_sizes, strict=True))
    shipped: Any = None
    tokenizers: list[Any] = []
    for index, (name, size) in enumerate(sizes.items()):
        candidates = [place / name for place in (config_dir, folder) if place is not None]
        found = next((place for place in candidates if place.is_dir() and any(place.iterdir())), None)
        if found is None and size == SDXL_VOCABULARY:
            shipped = shipped or _sdxl_tables()
            tokenizers.append(_from_tables(shipped[0], shipped[1], _PADDING[index]))
        else:
            tokenizers.append(_from_folder(found or _shipped_toy(name, size), size))
    return tokenizers[0], tokenizers[1]


def _shipped_toy(name: str, size: int) -> Path:
    place = SHIPPED["toy"] / name
    vocabulary = place / "vocab.json"
    if vocabulary.is_file() and len(json.loads(vocabulary.read_text(encoding="utf-8"))) == size:
        return place
    raise ModelFileError(
        f"No {name} for a text encoder with {size} tokens: the shipped ones have {SDXL_VOCABULARY} (SDXL) or "
        f"belong to the toy. Give config_dir with a {name}/ folder (vocab.json and merges.txt), or a diffusers folder."
    )


def _sdxl_tables() -> tuple[dict[str, int], list[str]]:
    merges = sdxl_merges()
    vocabulary = vocabulary_of(merges)
    if len(vocabulary) != SDXL_VOCABULARY:
        raise ModelFileError(
            f"The shipped CLIP vocabulary has {len(vocabulary)} tokens instead of {SDXL_VOCABULARY}. "
            "Install the package again."
        )
    return vocabulary, merges


def _from_tables(vocabulary: Mapping[str, int], merges: list[str], padding: str) -> PreTrainedTokenizerBase:
    """A fast CLIP tokenizer; transformers 5 takes tables, 4 takes files (written to a folder that is deleted)."""
    import transformers

    options: dict[str, Any] = {
        "unk_token": END,
        "bos_token": START,
        "eos_token": END,
        "pad_token": padding,
        "model_max_length": 77,
    }
    if int(transformers.__version__.split(".")[0]) >= 5:
        pairs: Any = [tuple(merge.split(" ")) for merge in merges]
        return transformers.CLIPTokenizer(vocab=dict(vocabulary), merges=pairs, **options)
    with tempfile.TemporaryDirectory(prefix="safe-scaler-") as folder:
        vocab_file, merges_file = Path(folder) / "vocab.json", Path(folder) / "merges.txt"
        vocab_file.write_text(json.dumps(dict(vocabulary)), encoding="utf-8")
        merges_file.write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")
        fast: Any = getattr(transformers, "CLIPTokenizerFast")  # noqa: B009 - not in transformers 5
        return fast(vocab_file=str(vocab_file), merges_file=str(merges_file), **options)


def _from_folder(folder: Path, size: int) -> PreTrainedTokenizerBase:
    import transformers

    tables = (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file()
    if not tables and not (folder / "tokenizer.json").is_file():
        raise ModelFileError(
            f"The tokenizer in '{folder}' has no vocabulary: vocab.json and merges.txt (or tokenizer.json) are "
            "missing. Download the folder again with all its files.",
            folder,
        )
    kind: Any = getattr(transformers, "CLIPTokenizerFast", transformers.CLIPTokenizer)
    try:
        tokenizer = kind.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, TypeError) as error:
        raise ModelFileError(
            f"The tokenizer in '{folder}' cannot be read: {error}. Restore its vocab.json and merges.txt.", folder
        ) from error
    if not 0 < len(tokenizer) <= size or len(tokenizer) <= 3 or tokenizer.eos_token_id is None:
        raise ModelFileError(
            f"The tokenizer in '{folder}' has {len(tokenizer)} tokens, its text encoder {size}. Restore the folder's "
            "vocab.json and merges.txt; they must be the ones that the model was trained with.",
            folder,
        )
    return tokenizer


def count_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    """Tokens of `text` without start and end; more than `max_token_length` of them are cut when it is encoded."""
    return len(tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)["input_ids"])
