"""JSON schemas of strangers, for answers that have to follow one and for the arguments of tools.

Where one is taken, an answer is drawn by it token by token, as the engine does: some token may always come, and what
has come at its end is JSON. None of them is the fault of the tokenizer, which is a good one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

from floe_chat.models.errors import FloeError, PackError
from floe_chat.models.tokenizer.chat_process import ChatProcess, Fitted, WrongSchema
from tokenizers import Tokenizer

from ..models.chat_families import write_tools
from . import _hostile, _hostile_chat

_FAMILIES = ("qwen3_moe", "qwen3_moe instruct", "mixtral", "glm4_moe", "gpt_oss")
_NAMES = ("a", "at", "", "é", '"', "\\", "a b", "$ref", "x" * 300, "<|im_end|>", "</think>", "\ud800", "\0")
_PATTERNS = (
    *("a", "^a+$", "", "(", "(a+)+$", "^(?=a)b", r"\d{3}", '[^"\\\\]*', "(a{1,9}){1,9}", "a{100000}", ".*", "\\p{L}+"),
    *("(?i)a", "^$", "[", "\\", "a|b|", "\0", "(.*a){20}", "^[a-z]{2,4000}$", "\\bword\\b", "(?:a)(?P<n>b)\\1", "é+"),
)
_FORMATS = (
    "date-time",
    "date",
    "time",
    "email",
    "uri",
    "uuid",
    "ipv4",
    "ipv6",
    "hostname",
    "duration",
    "regex",
    "none",
)
_NUMBERS = (0, 1, -1, 3, 0.5, 1e-9, 1e308, 10**30, -(10**30), 2**63, 0.1, 7.25)
_SIZES = (0, 1, 3, 50, 1000, 10**6, 10**12, -1, 2**64)
_VALUES = (None, True, 0, 1.5, "a", "", [], {}, [1, [2]], {"a": 1}, "\ud800", 10**40, "x" * 3000)
_chats: list[tuple[ChatProcess, Any]] = []


def good(scratch: Path) -> None:
    """Tokenizers of families that call tools in their own way, and a schema of the usual kind."""
    usual = {"type": "object", "properties": {"at": {"type": "string", "maxLength": 5}}, "required": ["at"]}
    for name in _FAMILIES:
        folder = scratch / name
        folder.mkdir()
        write_tools(folder, name)
        _chats.append((ChatProcess(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))))
        assert _asked(Random(0), *_chats[-1], usual, own=True) in ("ended", "drawn"), name
        assert _asked(Random(0), *_chats[-1], usual, own=False) in ("ended", "drawn"), name


def attempt(seed: int, scratch: Path) -> str:
    rng = Random(seed)
    schema = _schema(rng, 3)
    if rng.random() < 0.2:
        schema = _hostile.altered(rng, schema, rng.choice((1, 2)))
    if rng.random() < 0.02:
        schema = _large(rng)
    return _asked(
        rng, *rng.choice(_chats), schema if isinstance(schema, dict) else {"x": schema}, own=rng.random() < 0.6
    )


def _schema(rng: Random, depth: int) -> dict[str, Any]:
    """A schema of some keywords, right ones and wrong ones."""
    schema: dict[str, Any] = {}
    if rng.random() < 0.7:
        kinds = ("object", "array", "string", "integer", "number", "boolean", "null", "objekt")
        schema["type"] = rng.choice(kinds[: -1 if rng.random() < 0.95 else None])
        if rng.random() < 0.1:
            schema["type"] = rng.sample(kinds, rng.randrange(4))
    for _ in range(rng.choice((0, 1, 1, 2, 4))):
        schema |= rng.choice(_KEYWORDS)(rng, depth - 1) if depth else {}
    return schema


def _inner(rng: Random, depth: int) -> Any:
    return _schema(rng, depth) if rng.random() < 0.9 else rng.choice((True, False, {}, [], 1, "x"))


def _several(rng: Random, depth: int) -> dict[str, Any]:
    return {rng.choice(_NAMES): _inner(rng, depth) for _ in range(rng.choice((0, 1, 2, 30)))}


_KEYWORDS: tuple[Callable[[Random, int], dict[str, Any]], ...] = (
    lambda rng, depth: {"properties": _several(rng, depth), "required": rng.sample(_NAMES, rng.randrange(3))},
    lambda rng, depth: {"properties": _several(rng, depth)},
    lambda rng, depth: {"additionalProperties": _inner(rng, depth)},
    lambda rng, depth: {"patternProperties": {rng.choice(_PATTERNS): _inner(rng, depth)}},
    lambda rng, _: {rng.choice(("minProperties", "maxProperties")): rng.choice(_SIZES)},
    lambda rng, depth: {"items": _inner(rng, depth)},
    lambda rng, depth: {"prefixItems": [_inner(rng, depth) for _ in range(rng.randrange(4))]},
    lambda rng, _: {rng.choice(("minItems", "maxItems", "minContains")): rng.choice(_SIZES)},
    lambda rng, _: {"uniqueItems": rng.choice((True, False, 1))},
    lambda rng, depth: {rng.choice(("contains", "not", "if", "then", "else", "propertyNames")): _inner(rng, depth)},
    lambda rng, depth: {rng.choice(("anyOf", "oneOf", "allOf")): [_inner(rng, depth) for _ in range(rng.randrange(5))]},
    lambda rng, _: {"$ref": rng.choice(("#", "#/$defs/a", "#/properties/a", "http://x/y", "", "#/$defs/%22", 7))},
    lambda rng, depth: {"$defs": {"a": _inner(rng, depth)}, "$ref": "#/$defs/a"},
    lambda rng, depth: {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, _inner(rng, depth)]}}, "$ref": "#/$defs/a"},
    lambda rng, _: {"enum": [rng.choice(_VALUES) for _ in range(rng.choice((0, 1, 3, 40)))]},
    lambda rng, _: {"const": rng.choice(_VALUES)},
    lambda rng, _: {rng.choice(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")): rng.choice(_NUMBERS)},
    lambda rng, _: {"minimum": rng.choice(_NUMBERS), "maximum": rng.choice(_NUMBERS)},
    lambda rng, _: {"multipleOf": rng.choice(_NUMBERS)},
    lambda rng, _: {rng.choice(("minLength", "maxLength")): rng.choice(_SIZES)},
    lambda rng, _: {"minLength": rng.choice(_SIZES), "maxLength": rng.choice(_SIZES)},
    lambda rng, _: {"type": "string", "pattern": rng.choice(_PATTERNS)},
    lambda rng, _: {"type": "string", "format": rng.choice(_FORMATS)},
    lambda rng, _: {
        rng.choice(("title", "description", "$schema", "$id", "default", "x-guidance")): rng.choice(_VALUES)
    },
)


def _large(rng: Random) -> dict[str, Any]:
    """What is meant to take long."""
    many = rng.choice((30, 300, 3000))
    string = {"type": "string", "maxLength": 10**6}
    deep: dict[str, Any] = {}
    for _ in range(min(many, 60)):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    return rng.choice(
        (
            {"type": "object", "properties": {f"k{number}": string for number in range(many)}},
            {"enum": ["x" * number for number in range(many)]},
            {"allOf": [{"pattern": f"(a|b){{{number}}}"} for number in range(min(many, 40))], "type": "string"},
            {"type": "string", "pattern": f"((a{{1,{many}}}){{1,{many}}}){{1,{many}}}"},
            {"type": "array", "minItems": many, "items": {"type": "array", "minItems": many, "items": string}},
            {"anyOf": [{"const": {f"k{number}": number}} for number in range(many)]},
            {"oneOf": [{"type": "object", "properties": {f"k{n}": string}} for n in range(min(many, 300))]},
            deep,
        )
    )


def _asked(rng: Random, chat: ChatProcess, tokenizer: Any, schema: dict[str, Any], *, own: bool) -> str:
    """An answer of this form, or that calls a function with such arguments."""
    tools: dict[str, Any] = {"listed": [], "choice": "auto", "named": "", "parallel": rng.random() < 0.5, "strict": []}
    if not own:
        function = {"name": "find", "description": "", "parameters": {"type": "object", "properties": {}, **schema}}
        tools["listed"] = [{"type": "function", "function": function}]
        tools["choice"], tools["named"] = rng.choice((("required", ""), ("named", "find"), ("auto", "")))
        tools["strict"] = ["find"] if tools["choice"] == "auto" or rng.random() < 0.5 else []
    talk = [{"role": "user", "content": "hi", "thought": "", "calls": [], "answers": ""}]
    size = tokenizer.get_vocab_size()
    try:
        found = chat.whole(talk, 1 << 20, tools, json.dumps(schema) if own else "", size, think=False, begin=1)
        if not isinstance(found, Fitted):
            assert isinstance(found, WrongSchema) and found.tool == (-1 if own else 0) and found.why, found
            return "refused"
        assert found.constrained
        return _drawn(rng, chat, tokenizer, size, own=own)
    except FloeError as error:
        _hostile_chat.check(error)
        assert not isinstance(error, PackError), f"a good tokenizer is blamed: {error}"
        return "given up"


def _drawn(rng: Random, chat: ChatProcess, tokenizer: Any, size: int, *, own: bool) -> str:
    drawn: list[int] = []
    for _ in range(rng.choice((1, 8, 40))):
        mask = chat.allowed(drawn[-1] if drawn else None, 1)
        may = [token for token in range(size) if mask[token >> 3] >> (token & 7) & 1]
        assert may, f"nothing may follow {tokenizer.decode(drawn, skip_special_tokens=False)!r}"
        ends = [token for token in may if token in chat.stop_ids]
        drawn.append(rng.choice(ends if ends and rng.random() < 0.7 else _shortest(rng, tokenizer, may)))
        if drawn[-1] in chat.stop_ids:
            if own:
                text = tokenizer.decode(drawn[:-1], skip_special_tokens=False)
                json.loads(text.rpartition("<|message|>")[2])
            return "ended"
    return "drawn"


def _shortest(rng: Random, tokenizer: Any, may: Sequence[int]) -> Sequence[int]:
    """Those that end a value, if there are some, most of the time."""
    ending = [token for token in may if tokenizer.id_to_token(token) in ('"', "}", "]")]
    return ending if ending and rng.random() < 0.6 else may
