"""The toy's tokenizer: CLIP's class and byte symbols, but a few hundred words' worth of vocabulary.

Ids: 0..255 the byte symbols in CLIP's order (`!` = 0), 256..511 the same with the end-of-word mark, then the merges,
then begin-of-text and end-of-text as the two highest ids (CLIP pools at the highest id of a row).
"""

from __future__ import annotations

import json
from pathlib import Path

from . import shapes

BEGIN = "<|startoftext|>"
END = "<|endoftext|>"
#: Words of captions, each one token.
PLAIN_WORDS: tuple[str, ...] = (
    "an", "the", "of", "on", "one", "and", "in", "with", "picture", "drawing", "photo", "image", "plain",
    "background", "centered", "shape", "small", "big", "left", "right", "style", "white", "grey", "brown",
)  # fmt: skip
#: One token each, never in any training caption: free for new concepts.
SPARE_WORDS: tuple[str, ...] = (
    "zorp", "blick", "quib", "wug", "dax", "fep", "tove", "mimsy", "sks", "ohwx", "vorn", "glim", "nurb", "kipo",
    "jask", "yelm",
)  # fmt: skip


def byte_symbols() -> list[str]:
    """CLIP's 256 printable stand-ins for bytes, in id order (GPT-2's reversible byte table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(rest))]


def _apply(word: list[str], merges: dict[tuple[str, str], int]) -> list[str]:
    """Byte-pair encoding: join the best-ranked neighbouring pair until no pair has a rank."""
    while len(word) > 1:
        pairs = list(zip(word, word[1:], strict=False))
        best = min(pairs, key=lambda pair: merges.get(pair, 1 << 30))
        if best not in merges:
            break
        joined: list[str] = []
        for symbol in word:
            if joined and (joined[-1], symbol) == best:
                joined[-1] += symbol
            else:
                joined.append(symbol)
        word = joined
    return word


def build_merges() -> list[tuple[str, str]]:
    """Merges that make every listed word one token.

    A later merge has a worse rank and so never disturbs an earlier word, which always has a better pair left until
    it is whole.
    """
    ranks: dict[tuple[str, str], int] = {}
    words = [*shapes.COLOURS, *shapes.SHAPES, *PLAIN_WORDS, *SPARE_WORDS]
    for word in words:
        symbols = [*word[:-1], word[-1] + "</w>"]
        while len(symbols := _apply(symbols, ranks)) > 1:
            ranks[(symbols[0], symbols[1])] = len(ranks)
    return list(ranks)


def build_vocabulary() -> dict[str, int]:
    """Symbol -> id, see the module's first lines for the order."""
    symbols = byte_symbols()
    tokens = [*symbols, *(symbol + "</w>" for symbol in symbols), *("".join(pair) for pair in build_merges())]
    tokens += [BEGIN, END]
    return {token: index for index, token in enumerate(dict.fromkeys(tokens))}


def write_tokenizer(folder: Path, *, pad_token: str) -> None:
    """Write the files that CLIPTokenizer of transformers 4.x and 5.x both load. `pad_token`: END or ``"!"``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps(build_vocabulary(), ensure_ascii=False), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in build_merges())]
    (folder / "merges.txt").write_bytes(("\n".join(lines) + "\n").encode("utf-8"))

    def special(content: str, *, normalized: bool) -> dict[str, object]:
        return {"content": content, "lstrip": False, "normalized": normalized, "rstrip": False, "single_word": False}

    tokens = {
        "bos_token": special(BEGIN, normalized=True),
        "eos_token": special(END, normalized=False),
        "unk_token": special(END, normalized=False),
        "pad_token": pad_token,
    }
    settings = {
        "add_prefix_space": False,
        **tokens,
        "do_lower_case": True,
        "errors": "replace",
        "model_max_length": 77,
        "tokenizer_class": "CLIPTokenizer",
    }
    _write_json(folder / "special_tokens_map.json", tokens)
    _write_json(folder / "tokenizer_config.json", settings)


def _write_json(path: Path, content: object) -> None:
    path.write_bytes((json.dumps(content, indent=2, ensure_ascii=False, sort_keys=True) + "\n").encode("utf-8"))
