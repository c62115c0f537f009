"""A tokenizer's files, and those about a chat, from the metadata of a GGUF file.

Vocabulary, merges and template are a stranger's: what is made of them goes the way of any published tokenizer, in a
process of its own.
"""

from __future__ import annotations

import json
from typing import Any

from ..visible import as_name
from . import splits
from .metadata import Metadata
from .parts import Gguf

_Merges = list[tuple[str, str]]

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5  # of token_type
_SPACE = "\u2581"  # that pieces have for a space
_LONGEST_PIECE = 256  # characters of a token that is merged of others
_SAMPLING = (("temperature", "temp"), ("top_k", "top_k"), ("top_p", "top_p"), ("min_p", "min_p"))
_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def file(gguf: Gguf, name: str) -> bytes | None:
    """The content of a file beside a published model's weights; None if the GGUF file says nothing of it.

    Raises:
        ValueError: the metadata does not describe a tokenizer that can be made; says why.
    """
    data = Metadata(gguf)
    if name not in _FILES:
        return None
    if name == "tokenizer.json":
        return _contained(data)
    if name == "chat_template.jinja":
        return data.text("tokenizer.chat_template").encode() or None
    fields = _config(data) if name == "tokenizer_config.json" else _generation(data)
    return json.dumps(fields, indent=2).encode()


def _contained(data: Metadata) -> bytes:
    try:
        return _tokenizer(data)
    except (ValueError, KeyboardInterrupt, SystemExit):
        raise
    # The library raises bare Exceptions, and a BaseException without a public type where its Rust code panics.
    except BaseException as error:
        raise ValueError(as_name(str(error)) or type(error).__name__) from error


def _tokenizer(data: Metadata) -> bytes:
    """tokenizer.json. The library would write it too, and print where ids are missing between others."""
    from tokenizers import Tokenizer

    tokens, kinds = _vocabulary(data)
    kind = data.text("tokenizer.ggml.model")
    makers = {"gpt2": _byte_level, "llama": _pieces, "gemma4": _gemma}
    if kind not in makers:
        raise ValueError(f"it is of the type {as_name(kind)!r}; {', '.join(makers)} are known")
    used = {token: number for number, token in enumerate(tokens) if kinds[number] != _UNUSED}
    made, merges = makers[kind](data, used)
    fields = json.loads(made.to_str())
    fields["model"] |= {"vocab": used, "merges": merges}
    added = {number: token for token, number in used.items() if kinds[number] in (_CONTROL, _UNKNOWN, _USER_DEFINED)}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    fields["added_tokens"] = [
        {"id": number, "content": token, **plain, "special": kinds[number] != _USER_DEFINED}
        for number, token in added.items()
    ]
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
    Tokenizer.from_str(text)  # which checks it
    return text.encode()


def _vocabulary(data: Metadata) -> tuple[list[str], list[int]]:
    """Tokens by id, and what kind each is."""
    tokens = data.texts("tokenizer.ggml.tokens")
    if not tokens:
        raise ValueError("it has no tokens")
    kinds = data.wholes("tokenizer.ggml.token_type", len(tokens)) if data.says("tokenizer.ggml.token_type") else []
    kinds = kinds or [1] * len(tokens)
    for number, token in enumerate(tokens):
        if kinds[number] == _USER_DEFINED and token and not token.strip(" "):  # the converter wrote these as they look
            tokens[number], kinds[number] = _SPACE * len(token), 1
    seen = [token for number, token in enumerate(tokens) if kinds[number] != _UNUSED]
    if len({*seen}) < len(seen):
        raise ValueError("it has a token twice")
    return tokens, kinds


def _merges(data: Metadata) -> _Merges:
    """Pairs, the first to be merged first. A space within a token is written as another sign."""
    pairs = [tuple(merge.split(" ")) for merge in data.texts("tokenizer.ggml.merges")]
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError("one of its merges is no pair")
    return pairs  # pyright: ignore[reportReturnType]


def _byte_level(data: Metadata, _vocabulary: dict[str, int]) -> tuple[Any, _Merges]:
    """A tokenizer without vocabulary, and the merges."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    way = data.text("tokenizer.ggml.pre")
    made: Any = Tokenizer(models.BPE(ignore_merges=splits.keeps_words(way)))
    if splits.normalizes(way):
        made.normalizer = normalizers.NFC()
    made.pre_tokenizer = splits.splitter(way)
    made.decoder = decoders.ByteLevel()
    return made, _merges(data)


def _pieces(data: Metadata, vocabulary: dict[str, int]) -> tuple[Any, _Merges]:
    """The same of sentencepiece: what is merged first has the better score."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = data.reals("tokenizer.ggml.scores", len(vocabulary))
    merges = _merges(data) if data.says("tokenizer.ggml.merges") else _by_scores(data, vocabulary, scores)
    made: Any = Tokenizer(models.BPE(unk_token=_unknown(data), byte_fallback=True, fuse_unk=True))
    spaces = normalizers.Replace(" ", _SPACE)
    before = data.flag("tokenizer.ggml.add_space_prefix", default=True)
    made.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if before else spaces
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if before else parts)
    return made, merges


def _by_scores(data: Metadata, vocabulary: dict[str, int], scores: list[float]) -> _Merges:
    """All ways to make a token of two others, best scores first; of one score in the order that transformers has."""
    kinds = _vocabulary(data)[1]
    found: list[tuple[float, int, int, int, int, int, str, str]] = []
    for token, number in vocabulary.items():
        if kinds[number] != 1 or number >= len(scores) or len(token) > _LONGEST_PIECE:
            continue
        for cut in range(1, len(token)):
            first, last = vocabulary.get(token[:cut]), vocabulary.get(token[cut:])
            if first is not None and last is not None:
                order = -scores[number], -cut, cut - len(token), number, first, last
                found.append((*order, token[:cut], token[cut:]))
    return [(first, last) for *_, first, last in sorted(found)]


def _gemma(data: Metadata, _vocabulary: dict[str, int]) -> tuple[Any, _Merges]:
    """The same of Gemma 4: pieces with merges."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    made: Any = Tokenizer(models.BPE(unk_token=_unknown(data), byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Replace(" ", _SPACE)
    made.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    made.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return made, _merges(data)


def _unknown(data: Metadata) -> str | None:
    """The token for what has no other: by its id, or by its kind."""
    tokens, kinds = _vocabulary(data)
    return _named(data, "unknown") or next((tokens[at] for at, kind in enumerate(kinds) if kind == _UNKNOWN), None)


def _named(data: Metadata, kind: str) -> str | None:
    """The token of an id in the metadata."""
    key, tokens = f"tokenizer.ggml.{kind}_token_id", data.texts("tokenizer.ggml.tokens")
    if not data.says(key):
        return None
    number = data.whole(key)
    return tokens[number] if 0 <= number < len(tokens) else None


def _config(data: Metadata) -> dict[str, Any]:
    fields: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, kind in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        fields[f"{name}_token"] = _named(data, kind)
    for name in ("add_bos_token", "add_eos_token"):
        if data.says(f"tokenizer.ggml.{name}"):
            fields[name] = data.flag(f"tokenizer.ggml.{name}", default=False)
    return fields


def _generation(data: Metadata) -> dict[str, Any]:
    """Which tokens end an answer, and how the publisher samples, where the file says it."""
    fields: dict[str, Any] = {}
    ends = [data.whole(key) for kind in ("eos", "eot", "eom") if data.says(key := f"tokenizer.ggml.{kind}_token_id")]
    if ends:
        fields["eos_token_id"] = list(dict.fromkeys(ends))
    if data.says("tokenizer.ggml.bos_token_id"):
        fields["bos_token_id"] = data.whole("tokenizer.ggml.bos_token_id")
    for name, key in _SAMPLING:
        if data.says(f"general.sampling.{key}"):
            value = data.real(f"general.sampling.{key}")
            fields |= {name: int(value) if name == "top_k" else value, "do_sample": True}
    return fields
