"""tokenizer.json for models that publish their vocabulary in tiktoken's form alone, and code of their own to read it.

A line of such a file is a token's bytes in base64, and its rank: the id, and which neighbours are merged first. What
the code adds, how words are split and which special tokens follow, is written here.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = (rf"[{kinds}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for kinds in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
_FIRST = r"[^\r\n\p{L}\p{N}]?"
_LONGEST = 256  # bytes of a token
_MOST = 1 << 20  # tokens, and merges of them: 200,000 and 450,000 are known
_MOST_BYTES = 1 << 23  # of all tokens: one and a half million are known
_PLAIN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


@dataclass(frozen=True, slots=True)
class Way:
    """How a maker's code reads its file.

    Attributes:
        split: what a text's parts are, as a pattern. specials: names of the special tokens behind the vocabulary; {} is
            their id. composed: whether a text is brought into Unicode's form NFC.
    """

    split: str
    specials: tuple[str, ...]
    composed: bool = False


WAYS = {  # by the file's name
    "tiktoken.model": Way(  # Kimi
        rf"[\p{{Han}}]+|{_FIRST}{_UPPER}*{_LOWER}+{_ENDINGS}?|{_FIRST}{_UPPER}+{_LOWER}*{_ENDINGS}?"
        rf"|\p{{N}}{{1,3}}|{_OTHERS}",
        ("<|reserved_token_{}|>",) * 256,
    ),
    "hy.tiktoken": Way(  # Hunyuan
        rf"{_ENDINGS}|{_FIRST}\p{{L}}+|\p{{N}}|{_OTHERS}",
        (
            *("<|endoftext|>", "<|startoftext|>", "<|bos|>", "<|eos|>", "<|pad|>"),
            *(f"<|extra_{number}|>" for number in range(205)),
        ),
        composed=True,
    ),
}


def tokenizer_json(file: str, content: bytes, config: Mapping[str, Any]) -> bytes:
    """Such a file as tokenizer.json. config: the fields of tokenizer_config.json, which names special tokens.

    Raises:
        ValueError: it is no vocabulary; says why.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    way, ranks = WAYS[file], _ranks(content)
    made: Any = Tokenizer(models.BPE(ignore_merges=True))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(way.split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    if way.composed:
        made.normalizer = normalizers.NFC()
    fields = json.loads(made.to_str())
    signs = _signs()
    words = {token: "".join(signs[byte] for byte in token) for token in ranks}
    specials = {number: name.format(number) for number, name in enumerate(way.specials, len(ranks))}
    specials |= _named(config, specials)
    vocabulary = {words[token]: rank for token, rank in ranks.items()}
    taken = len(vocabulary)
    vocabulary |= {name: number for number, name in specials.items()}
    if len(vocabulary) != taken + len(specials):
        raise ValueError("two of its tokens are the same")
    fields["model"] |= {"vocab": vocabulary, "merges": [[words[each] for each in pair] for pair in _merges(ranks)]}
    fields["added_tokens"] = [
        {"id": number, "content": name, **_PLAIN, "special": True} for number, name in sorted(specials.items())
    ]
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
    Tokenizer.from_str(text)  # which checks it
    return text.encode()


def _ranks(content: bytes) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    room = _MOST_BYTES
    for number, line in enumerate(filter(bytes.strip, io.BytesIO(content))):
        try:
            token, rank = line.split(maxsplit=2)
            found = base64.b64decode(token, validate=True)
            wanted = int(rank)
        except (ValueError, binascii.Error) as error:
            raise ValueError(f"line {number + 1} is not a token and its rank") from error
        if not 0 < len(found) <= _LONGEST or wanted != number or found in ranks:
            raise ValueError(f"line {number + 1} has a token twice, a wrong rank, or more than {_LONGEST} bytes")
        ranks[found] = wanted
        room -= len(found)
        if number >= _MOST or room < 0:
            raise ValueError(f"it has more than {_MOST:,} tokens, or {_MOST_BYTES:,} bytes of them")
    if missing := sum(bytes([byte]) not in ranks for byte in range(256)):
        raise ValueError(f"it lacks {missing} of the 256 bytes")
    return ranks


def _merges(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Pairs, those of the lowest rank first: any two tokens whose bytes together are a token may be merged.

    Raises:
        ValueError: there are more than in any vocabulary that was learned, as in one of all pieces of a text.
    """
    found: list[tuple[bytes, bytes]] = []
    room = 4 * _MOST_BYTES
    for token in ranks:  # in the order of ranks
        pairs = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
        found += sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        room -= len(token) * len(known)
        if len(found) > _MOST or room < 0:
            raise ValueError(f"its tokens can be merged in more than {len(found):,} ways, which no learned ones can")
    return found


def _named(config: Mapping[str, Any], specials: Mapping[int, str]) -> dict[int, str]:
    """What tokenizer_config.json calls special tokens, by their ids."""
    stated: Any = config.get("added_tokens_decoder")
    given = {number: stated.get(str(number)) for number in specials} if isinstance(stated, Mapping) else {}
    named = {number: fields.get("content") for number, fields in given.items() if isinstance(fields, Mapping)}
    return {number: name for number, name in named.items() if isinstance(name, str) and name}


def _signs() -> list[str]:
    """The letter that stands for each byte in such a vocabulary: itself if it can be seen, or one behind them all."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in seen]
    return [chr(byte) if byte in seen else chr(256 + hidden.index(byte)) for byte in range(256)]
