"""How byte-level vocabularies split text into words before they merge bytes, by the names of llama.cpp's converter.

A file names the way and does not hold it. These are the ways of the published tokenizers.
"""

from __future__ import annotations

from typing import Any

_CLASSIC = ("gpt-2", "olmo", "mpt")  # what ByteLevel does by itself
_SINGLE_DIGITS = ("refact", "starcoder", "smollm", "mellum2")
_LIKE = {"glm4": "llama3", "chatglm-bpe": "llama3", "hunyuan": "qwen2", "solar-open": "qwen2"}  # another way's name
_NORMALIZED = ("qwen2", "qwen35", "olmo")  # to NFC
_WHOLE_WORDS = (  # words in the vocabulary are not merged
    *("llama3", "llama-v3", "llama-bpe", "lfm2", "tekken", "gpt-4o", "pixtral"),
)
_CHINESE = r"[一-龥ࠀ-一가-퟿]+"
_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ONE_BY_ONE: dict[str, tuple[str, ...]] = {  # patterns that split what the ones before them left
    "deepseek-llm": (
        r"[\r\n]",
        r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
        r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
        r"\s+$",
        _CHINESE,
        r"\p{N}",
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE, r"\p{N}"),
    "deepseek-v3": (
        r"\p{N}{1,3}",
        r"[一-龥぀-ゟ゠-ヿ]+",
        _WORDS,
    ),
    "afmoe": (
        r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",  # in threes, from the last digit
        r"[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+",
        _WORDS,
    ),
    "kimi-k2": (
        r"\p{Han}+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "laguna": (
        r"[^\n]+|\n+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+",
    ),
    "exaone-moe": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
}


def normalizes(way: str) -> bool:
    """Whether text becomes NFC first."""
    return way in _NORMALIZED


def keeps_words(way: str) -> bool:
    """Whether a word that is in the vocabulary is one token, whatever the merges are."""
    return way in _WHOLE_WORDS


def splitter(way: str) -> Any:
    """A pre-tokenizer of the tokenizers library.

    Raises:
        ValueError: the way is not known.
    """
    from tokenizers import Regex, pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    if way in _CLASSIC:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if way in _SINGLE_DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    known = GGUF_PRE_TOKENIZER_SPLITS.get(_LIKE.get(way, way))
    patterns = _ONE_BY_ONE.get(way) or ((known,) if known else ())
    if not patterns:
        raise ValueError(f"it splits text in the way {way[:40]!r}, which is not known")
    parts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*parts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
