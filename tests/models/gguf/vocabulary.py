"""Tokenizers as llama.cpp's converter writes them into GGUF files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
from gguf import TokenType
from tokenizers import Tokenizer


def byte_level(writer: gguf.GGUFWriter, source: Path, size: int, pre: str = "gpt-2") -> None:
    """A byte-level vocabulary, its merges, special tokens and chat template."""
    _model(writer, "gpt2", pre)
    _vocabulary(writer, source, size)
    fields = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in fields["model"]["merges"]]
    writer.add_token_merges(merges)
    _special(writer, source)


def pieces(
    writer: gguf.GGUFWriter, source: Path, size: int, scores: Callable[[str, int], float] = lambda _token, _number: 0.0
) -> None:
    """A sentencepiece vocabulary with scores by token and id."""
    _model(writer, "llama", "default")
    tokens = _vocabulary(writer, source, size)
    writer.add_token_scores([scores(token, number) for number, token in enumerate(tokens)])
    _special(writer, source)


def _model(writer: gguf.GGUFWriter, model: str, pre: str) -> None:
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)


def _vocabulary(writer: gguf.GGUFWriter, source: Path, size: int) -> list[str]:
    tokenizer: Any = Tokenizer.from_file(str(source / "tokenizer.json"))
    names = {number: token for token, number in tokenizer.get_vocab(with_added_tokens=True).items()}
    added = tokenizer.get_added_tokens_decoder()
    unknown = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))["model"].get("unk_token")
    tokens, kinds = list[str](), list[int]()
    for number in range(size):
        token = names.get(number, f"[PAD{number}]")
        if number not in names:
            kind = TokenType.UNUSED
        elif number in added:
            kind = TokenType.CONTROL if added[number].special else TokenType.USER_DEFINED
            kind = TokenType.UNKNOWN if token == unknown and "▁" in "".join(names.values()) else kind
        else:
            kind = TokenType.BYTE if token.startswith("<0x") and len(token) == 6 else TokenType.NORMAL
        tokens.append(token)
        kinds.append(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    return tokens


def _special(writer: gguf.GGUFWriter, source: Path) -> None:
    config = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    for kind in ("bos", "eos", "unk", "pad"):
        token = config.get(f"{kind}_token")
        if token is not None and (number := tokenizer.token_to_id(token)) is not None:
            getattr(writer, f"add_{kind}_token_id")(number)
    for kind in ("bos", "eos"):
        if f"add_{kind}_token" in config:
            getattr(writer, f"add_add_{kind}_token")(config[f"add_{kind}_token"])
    if isinstance(template := config.get("chat_template"), str):
        writer.add_chat_template(template)
