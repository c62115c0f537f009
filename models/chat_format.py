"""A packed model's tokenizer and chat template: messages to token ids, token ids to text as they come."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from .errors import PackError, UsageError


class ChatFormat:
    """What turns a conversation into a prompt.

    Attributes:
        stop_ids: tokens that end an answer, from generation_config.json, config.json and the tokenizer.
    """

    def __init__(self, folder: Path) -> None:
        """Raises PackError: no tokenizer in `folder`, or one that cannot be read."""
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                folder, trust_remote_code=False, local_files_only=True, use_fast=True
            )
            self._raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
        # tokenizers reports a damaged file as a bare Exception, so nothing narrower can be caught here.
        except Exception as error:
            raise PackError(
                f"The tokenizer at {folder} cannot be read",
                str(error).splitlines()[0] if str(error) else type(error).__name__,
                "Restore tokenizer.json and tokenizer_config.json from the source checkpoint.",
            ) from error
        if not self._tokenizer.chat_template:
            raise PackError(
                f"The model at {folder} has no chat template",
                "It is a base model: it continues text but does not know turns.",
                "Use the model's instruction-tuned version.",
            )
        self.stop_ids = _stop_ids(folder, self._tokenizer.eos_token_id)
        self._added = {token.content for token in self._raw.get_added_tokens_decoder().values()}

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
            prompt = self._tokenizer.apply_chat_template(safe, tokenize=False, add_generation_prompt=True)
        # A template is a program: besides its own errors it can divide by zero or add a number to a list.
        except Exception as error:
            raise UsageError(
                "The model's chat template refuses this conversation",
                str(error),
                "Turns must alternate between you and the model, starting with you.",
            ) from error
        # The template writes the begin token itself: adding special tokens again would double it.
        return list(self._raw.encode(prompt, add_special_tokens=False).ids)

    def encode_text(self, text: str) -> list[int]:
        """Plain text to ids, without special tokens (for calibration and counting)."""
        return list(self._raw.encode(text, add_special_tokens=False).ids)

    def decoder(self) -> Detokenizer:
        """A fresh incremental decoder for one answer."""
        return Detokenizer(self._raw)

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
