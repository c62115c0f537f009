"""A packed model's tokenizer and chat template: messages to token ids, token ids to text as they come."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from .chat_template import ChatTemplate
from .errors import PackError, UsageError
from .lean import import_library

_log = logging.getLogger("floe_chat.models")


class ChatFormat:
    """What turns a conversation into a prompt.

    Attributes:
        stop_ids: tokens that end an answer, from generation_config.json, config.json and the tokenizer.
    """

    def __init__(self, folder: Path) -> None:
        """Raises PackError: no tokenizer in `folder`, or one that cannot be read."""
        try:
            self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            found = _read(folder)
        # tokenizers reports a damaged file as a bare Exception, so nothing narrower can be caught here.
        except Exception as error:
            raise PackError(
                f"The tokenizer at {folder} cannot be read",
                str(error).splitlines()[0] if str(error) else type(error).__name__,
                "Restore tokenizer.json and tokenizer_config.json from the source checkpoint.",
            ) from error
        if found is None:
            raise PackError(
                f"The model at {folder} has no chat template",
                "It is a base model: it continues text but does not know turns.",
                "Use the model's instruction-tuned version.",
            )
        self._template, self._tokens = found
        # What a file of another program's may ask for: a prompt is neither cut nor filled up.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        eos = self._tokens.get("eos_token")
        self.stop_ids = _stop_ids(folder, None if eos is None else self._tokenizer.token_to_id(eos))
        self._added = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}

    def encode(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The prompt that asks for the next answer.

        Args:
            messages: {"role": "system" | "user" | "assistant", "content": text} in order; the last is the user's.

        Text that spells a control token of the model ("</s>") is broken up first, so that nobody's text can end a
        turn or open one.

        Raises:
            UsageError: the model's template does not accept these roles in this order.
        """
        safe = [{"role": m["role"], "content": self._defuse(m["content"])} for m in messages]
        try:
            prompt = self._template.render(safe, self._tokens)
        # A template is a program: besides its own errors it can divide by zero or add a number to a list.
        except Exception as error:
            raise UsageError(
                "The model's chat template refuses this conversation",
                str(error),
                "Turns must alternate between you and the model, starting with you.",
            ) from error
        # The template writes the begin token itself: adding special tokens again would double it.
        return list(self._tokenizer.encode(prompt, add_special_tokens=False).ids)

    def encode_text(self, text: str) -> list[int]:
        """Plain text to ids, without special tokens (for calibration and counting)."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decoder(self) -> Detokenizer:
        """A fresh incremental decoder for one answer."""
        return Detokenizer(self._tokenizer)

    def _defuse(self, text: str) -> str:
        for token in self._added:
            broken = token[0] + "\u200b" + token[1:] if len(token) > 1 else ""
            text = text.replace(token, broken)
        return text.encode("utf-8", "replace").decode()  # half a surrogate pair is no text


class Detokenizer:
    """Token ids to text, piece by piece: holds back bytes until a character is whole. Special tokens are dropped."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)

    def push(self, ids: Sequence[int]) -> str:
        """The text that became certain with `ids`; control characters that a terminal would obey are made visible."""
        return visible("".join(map(self._step, ids)))

    def _step(self, token: int) -> str:
        try:
            return self._stream.step(self._tokenizer, token) or ""
        # Bytes that form no character change what was decoded before them; the library gives up on such a stream
        # with a bare Exception.
        except Exception:  # noqa: BLE001
            self._stream = DecodeStream(skip_special_tokens=True)
            return "\ufffd" + (self._stream.step(self._tokenizer, token) or "")


def visible(text: str) -> str:
    """`text` with control characters, newline and tab apart, as their Unicode pictures, so none reaches a terminal.

    C0 controls become U+2400..., DEL U+2421, C1 controls and Unicode's direction overrides U+FFFD; carriage returns go.
    """
    return text.translate(_VISIBLE)


_VISIBLE: dict[int, int | None] = {
    **{code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"},
    **dict.fromkeys([*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)], 0xFFFD),
    ord("\r"): None,
    0x7F: 0x2421,
}


class _Template(Protocol):
    def render(self, messages: Sequence[Mapping[str, str]], tokens: Mapping[str, str]) -> str: ...


class _LibraryTemplate:
    """The template of transformers' own tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def render(self, messages: Sequence[Mapping[str, str]], tokens: Mapping[str, str]) -> str:
        """`tokens`: those that the tokenizer names itself."""
        return self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)


def _read(folder: Path) -> tuple[_Template, dict[str, str]] | None:
    """The chat template in `folder`, and its special tokens by their names; None for a base model.

    Raises:
        Exception: of any kind, for files that cannot be read.
    """
    fields = _object(folder / "tokenizer_config.json")
    source = _source(folder, fields)
    if not source:
        return None
    template = ChatTemplate(source)
    own = fields if "added_tokens_decoder" in fields else fields | _object(folder / "special_tokens_map.json")
    named = {name: token for name, token in own.items() if name.endswith("_token")}
    if isinstance(extra := own.get("extra_special_tokens"), dict):
        named |= extra
    wanted = {"eos_token", *(name for name in template.names if name.endswith("_token"))}
    reason = ""
    if unnamed := sorted(wanted - named.keys()):  # transformers' class for this kind of tokenizer may know it
        reason = f"no file names its {unnamed[0]}"
    elif "auto_map" in fields:  # transformers decides, and never runs it
        reason = "it asks for code of its own"
    if not reason:
        contents = {name: _content(token) for name, token in named.items()}
        return template, {name: content for name, content in contents.items() if content is not None}
    _log.info("transformers reads the tokenizer at %s, since %s", folder, reason)
    import_library()
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    return _LibraryTemplate(tokenizer), tokenizer.special_tokens_map


def _source(folder: Path, fields: Mapping[str, Any]) -> str | None:
    """The template in its own file, or else the one of tokenizer_config.json: the default one where there are more."""
    try:
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    except FileNotFoundError:
        source = fields.get("chat_template")
    if isinstance(source, list):
        source = {named["name"]: named["template"] for named in source}
    return source["default"] if isinstance(source, dict) else source


def _object(path: Path) -> dict[str, Any]:
    """The fields of a JSON file; none where there is no such file.

    Raises:
        ValueError: it holds something else.
    """
    try:
        fields: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    if not isinstance(fields, dict):
        raise ValueError(f"{path.name} holds no object")
    return fields


def _content(token: Any) -> str | None:
    """A special token's text, as files write it: plain, or with how it is matched beside it; None where it is none."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _stop_ids(folder: Path, eos: int | None) -> tuple[int, ...]:
    ids = {eos} if eos is not None else set[int]()
    for name in ("generation_config.json", "config.json"):
        try:
            fields = json.loads((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        value = fields.get("eos_token_id") if isinstance(fields, dict) else None
        ids |= {item for item in (value if isinstance(value, list) else [value]) if type(item) is int}
    return tuple(sorted(ids))
