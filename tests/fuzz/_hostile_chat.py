"""Tokenizers and chat templates that an enemy would write, from a seeded generator, and the process that reads them."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from floe_chat.models.errors import FloeError
from floe_chat.models.tokenizer import chat_process

_NAMES = (
    "messages",
    "message",
    "loop",
    "bos_token",
    "eos_token",
    "add_generation_prompt",
    "tools",
    "x",
    "n.x",
    "nobody",
)
_TEXTS = ("a", "", "</s>", "<s>", "[INST] ", "\x1b[2J", "\u202e", "\ud7ff", "é" * 40, "user", "system", "%s", "{}")
_FILTERS = (
    *("trim", "upper", "length", "list", "first", "last", "join", "tojson", "string", "int", "float", "abs", "e"),
    *(
        "reverse",
        "sort",
        "unique",
        "map('upper')",
        "selectattr('role')",
        "batch(3)",
        "slice(3)",
        "indent(3)",
        "wordwrap(3)",
    ),
    *(
        "replace('a', 'aa')",
        "center(80)",
        "format(1)",
        "default('x')",
        "items",
        "dictsort",
        "groupby('role')",
        "random",
    ),
    *("striptags", "urlize", "xmlattr", "pprint", "sum", "min", "max", "round(2)", "truncate(3)", "filesizeformat"),
)
_COSTLY = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'a' * 30000000 }}",
    "{{ 'a' * 3000000000 }}",
    "{{ 'x' | center(1000000000) }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ lipsum(n=100000) }}",
    "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "{% set n = namespace(x=[]) %}{% for i in range(99) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}",
)
_WHOLE = (
    "{{ raise_exception('no') }}",
    "{{ 1 / 0 }}",
    "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "{% if false %}x{% endif %}",
    "{{ strftime_now('%s') }}",
    "{{ strftime_now(messages) }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ dict(self=1) }}{{ namespace(__class__=1) }}",
    "{{ self }}{{ self.x() }}",
    "{% include 'x' %}",
    "{% extends messages[0].content %}",
    "{% import 'os' as os %}{{ os }}",
    "{% block x %}{{ super() }}{% endblock %}",
    "{{ cycler(1, 2).next() }}{{ joiner('x')() }}",
    "{{ (" * 300 + "1" + ") }}" * 300,
    "{% for m in messages %}" * 30 + "{% endfor %}" * 30,
    "{% raw %}{{ x }}{% endraw %}",
    "{{ messages | tojson(indent=100000) }}",
    "{{ [] | batch(100000, 1) | list }}",
    "{{ '\\ud800' }}",
    "{# never closed",
)


def template(rng: Random, good: str) -> str:
    """A chat template: the good one with something put in, or one of its own. One in fifty computes for seconds."""
    kind = rng.randrange(50)
    if kind == 0:
        return rng.choice(_COSTLY)
    if kind < 12:
        return rng.choice(_WHOLE)
    if kind < 30:
        at = rng.choice([place for place, sign in enumerate(good + "{") if sign == "{"])
        return good[:at] + _statement(rng, 3) + good[at:]
    if kind < 36:
        return "".join(rng.choice(good) for _ in range(rng.choice((3, 40, 400))))
    return "".join(_statement(rng, 4) for _ in range(rng.randint(1, 6)))


def _statement(rng: Random, depth: int) -> str:
    if not depth:
        return rng.choice(_TEXTS)
    inner = _statement(rng, depth - 1)
    match rng.randrange(8):
        case 0:
            return "{% for message in " + _expression(rng, 2) + " %}" + inner + "{% endfor %}"
        case 1:
            return "{% if " + _expression(rng, 2) + " %}" + inner + "{% else %}" + inner + "{% endif %}"
        case 2:
            return "{% set x = " + _expression(rng, 3) + " %}" + inner
        case 3:
            return (
                "{% set n = namespace(x="
                + _expression(rng, 1)
                + ") %}{% set n.x = "
                + _expression(rng, 1)
                + " %}"
                + inner
            )
        case 4:
            return "{% macro f(a) %}" + inner + "{% endmacro %}{{ f(" + _expression(rng, 1) + ") }}"
        case 5:
            return "{% generation %}" + inner + "{% endgeneration %}"
        case _:
            return "{{ " + _expression(rng, 3) + " }}" + inner


def _expression(rng: Random, depth: int) -> str:
    if not depth:
        number = str(rng.choice((0, 1, -1, 7, 1000, 99999, 2**70, 0.5)))
        return rng.choice((rng.choice(_NAMES), repr(rng.choice(_TEXTS)), number, "[]", "{}", "none", "true"))
    one, other = _expression(rng, depth - 1), _expression(rng, depth - 1)
    match rng.randrange(10):
        case 0 | 1:
            return f"({one} | {rng.choice(_FILTERS)})"
        case 2 | 3:
            return f"({one} {rng.choice(('+', '-', '~', '%', '==', 'in', 'and', 'or', '<', '//', '/'))} {other})"
        case 4:
            return f"({one} * {rng.choice((0, 2, 100))})"
        case 5:
            return f"{one}[{other}]"
        case 6:
            return (
                f"{one}.{rng.choice(('role', 'content', 'items()', 'split()', 'strip()', 'x', 'format(1)', 'keys()'))}"
            )
        case 7:
            return f"({one} is {rng.choice(('defined', 'string', 'mapping', 'iterable', 'none', 'odd', 'sequence'))})"
        case 8:
            return f"range({one} | int)" if depth > 1 else "range(9)"
        case _:
            return f"[{one}, {other}]"


_NORMALIZERS: tuple[Any, ...] = (
    {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    {"type": "Precompiled", "precompiled_charsmap": "/////w=="},
    {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""},
    {"type": "Replace", "pattern": {"Regex": ""}, "content": "x"},
    {"type": "Replace", "pattern": {"String": "i"}, "content": "x" * 1000},
    {"type": "Replace", "pattern": {"Regex": "["}, "content": ""},
    {"type": "Strip", "strip_left": True, "strip_right": True},
    {"type": "NFKD"},
    {"type": "Lowercase"},
    {"type": "StripAccents"},
    {"type": "Prepend", "prepend": ""},
    {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": True,
        "strip_accents": None,
        "lowercase": True,
    },
    {"type": "ByteLevel"},
    {"type": "Sequence", "normalizers": []},
)
_SPLITTERS: tuple[Any, ...] = (
    {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False},
    {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Removed", "invert": False},
    {"type": "Split", "pattern": {"String": ""}, "behavior": "MergedWithPrevious", "invert": True},
    {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
    {"type": "Metaspace", "replacement": "", "prepend_scheme": "first", "split": False},
    {"type": "Whitespace"},
    {"type": "Punctuation", "behavior": "Contiguous"},
    {"type": "Digits", "individual_digits": True},
    {"type": "UnicodeScripts"},
    {"type": "CharDelimiterSplit", "delimiter": "a"},
    {"type": "FixedLength", "length": 0},
    {"type": "FixedLength", "length": 1},
    {"type": "Sequence", "pretokenizers": []},
    {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
)
_DECODERS: tuple[Any, ...] = (
    {"type": "Replace", "pattern": {"Regex": "."}, "content": "x" * 10_000},
    {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "\x1b[2J"},
    {"type": "Strip", "content": "a", "start": 1 << 40, "stop": 1 << 40},
    {"type": "Strip", "content": "a", "start": 1, "stop": 1},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
    {"type": "WordPiece", "prefix": "##", "cleanup": True},
    {"type": "CTC", "pad_token": "<s>", "word_delimiter_token": "|", "cleanup": True},
    {"type": "BPEDecoder", "suffix": ""},
    {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
    {"type": "Sequence", "decoders": []},
)


def _models(rng: Random, given: Any) -> dict[str, Any]:
    pieces = given if isinstance(given, dict) else [piece for piece, _ in given]  # a Unigram's come with scores
    vocab: dict[str, int] = {piece: number for number, piece in enumerate(pieces)}
    number = rng.choice((0, 1, len(vocab), 1 << 31, 1 << 32, -1))
    return rng.choice(
        (
            {"type": "BPE", "vocab": {"a": 0}, "merges": ["a a"]},
            {"type": "BPE", "vocab": vocab, "merges": [["a", "b"]]},
            {"type": "BPE", "vocab": {**vocab, "ab": number}, "merges": [["a", "b"]]},
            {"type": "BPE", "vocab": vocab, "merges": [], "unk_token": "<none>", "byte_fallback": True},
            {"type": "BPE", "vocab": vocab, "merges": [], "dropout": rng.choice((0.0, 0.5, 1.0, 7.0))},
            {"type": "BPE", "vocab": vocab, "merges": [], "continuing_subword_prefix": "é", "end_of_word_suffix": "é"},
            {"type": "WordLevel", "vocab": {"a": number}, "unk_token": "[UNK]"},
            {"type": "WordLevel", "vocab": {"a": 0, "[UNK]": number}, "unk_token": "[UNK]"},
            {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "?", "max_input_chars_per_word": number},
            {"type": "WordPiece", "vocab": vocab, "unk_token": "<unk>", "continuing_subword_prefix": ""},
            {
                "type": "Unigram",
                "unk_id": rng.choice((None, 0, 9, number)),
                "vocab": [["a", -1.0], ["b", rng.choice((0.0, -1e308, 1.0))]],
            },
            {"type": "Unigram", "unk_id": 0, "vocab": []},
            {"type": "Unigram", "unk_id": 0, "vocab": [["", 0.0], ["a", -1.0]], "byte_fallback": True},
        )
    )


def tokenizer(rng: Random, good: dict[str, Any]) -> dict[str, Any]:
    """The fields of a tokenizer.json with one or two parts of it replaced by valid ones that do something else."""
    fields = dict(good)
    for _ in range(rng.choice((1, 1, 2))):
        match rng.randrange(6):
            case 0:
                fields["normalizer"] = rng.choice(_NORMALIZERS)
            case 1:
                fields["pre_tokenizer"] = rng.choice((*_SPLITTERS, None))
            case 2:
                fields["decoder"] = rng.choice((*_DECODERS, None))
            case 3:
                fields["model"] = _models(rng, good["model"]["vocab"])
            case 4:
                flags = {
                    flag: rng.random() < 0.5 for flag in ("single_word", "lstrip", "rstrip", "normalized", "special")
                }
                number = rng.choice((0, 2, 259, 258, 1 << 31, (1 << 32) - 1))
                token = {"id": number, "content": rng.choice(("", "a", "<s>", "hi", "[INST]", "x" * 5000)), **flags}
                fields["added_tokens"] = [*good["added_tokens"], token] if rng.random() < 0.7 else [token]
            case _:
                cut = {"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": rng.choice((0, 9))}
                fields["truncation"] = cut
    return fields


class _Running:
    """Hands out one process for tokenizers and templates until an input ends it: starting one takes longest.

    Whoever asks while another still has it, as a client that closes has for a moment, gets one of their own.
    """

    def __init__(self) -> None:
        self._make = chat_process._Child  # pyright: ignore[reportPrivateUsage]
        self._process: Any = None
        self._lent: _Lent | None = None

    def __call__(self) -> Any:
        if self._lent is not None:
            return self._make()
        if self._process is None:
            self._process = self._make()
        process, given, asked = self._process, _Lent(), list[bool]()
        given.number, self._lent = process.number, given

        def ask(seconds: float, request: dict[str, Any], stopped: object = None) -> dict[str, Any]:
            asked.append(True)
            try:
                reply = process.ask(seconds, request)
            except FloeError:  # an answer too
                asked.pop()
                raise
            asked.pop()
            return reply

        def end() -> None:
            if self._lent is not given:
                return
            # One that still answers, or never did, would answer the next input.
            if asked or process._process.poll() is not None:  # pyright: ignore[reportPrivateUsage]
                process.end()
                self._process = None
            self._lent = None

        given.ask = ask
        given.end = end
        return given


class _Lent:
    number: int
    ask: Callable[[float, dict[str, Any]], dict[str, Any]]
    end: Callable[[], None]


def run_one_process() -> None:
    """From now on all tokenizers and templates of this process run in one other, see `_Running`."""
    if not isinstance(chat_process._Child, _Running):  # pyright: ignore[reportPrivateUsage]
        chat_process._Child = _Running()  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]


def check(error: FloeError) -> None:
    """An error that a person may see says what is wrong, in short."""
    for text in (error.title, error.cause, error.hint):
        assert "bug in floe-chat" not in text and "Traceback" not in text, str(error)
        assert len(text) < 5000, text[:300]
