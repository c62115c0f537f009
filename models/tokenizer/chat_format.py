"""A packed model's chat template around its tokenizer: messages to token ids.

Template and tokenizer are programs by the model's publisher. The chat runs this file in its own process, see
chat_process.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

from jinja2 import TemplateError

from ..errors import FloeError, NoTemplateError, PackError, UsageError, verify_hint
from ..transformers_import import import_library, untimed
from .chat_process import most_text
from .chat_template import ChatTemplate, TooMuchError
from .convention import Convention
from .parts import CALL, RETURN, Mark
from .tokens import Detokenizer, Tokens, contained, first_line
from .tool_talk import ToolTalk


class Template(Protocol):
    """A chat template, whoever runs it; see `ChatTemplate.render`."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tokens: Mapping[str, str],
        most: int | None,
        options: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]],
    ) -> str: ...


class _LibraryTemplate:
    """The template of transformers' own tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tokens: Mapping[str, str],
        most: int | None,
        options: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]],
    ) -> str:
        """`tokens` are left to the tokenizer, which names them itself."""
        usual: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True, "tools": list(tools) or None}
        text: str = self._tokenizer.apply_chat_template(list(messages), **{**options, **usual})
        if most is not None and len(text) > most:
            raise TooMuchError(most)
        return text


def read(folder: Path) -> tuple[Template, dict[str, str], str, str, ChatTemplate] | None:
    """The chat template in `folder`, its special tokens by their names, why transformers reads it or "", and the
    template's source, as text and read.

    None for a base model.

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
        known = {name: content for name, content in contents.items() if content is not None}
        return template, known, "", source, template
    with untimed():
        import_library()
        from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    return _LibraryTemplate(tokenizer), tokenizer.special_tokens_map, reason, source, template


def _source(folder: Path, fields: Mapping[str, Any]) -> str | None:
    """The template in its own file, or else the one of tokenizer_config.json: the default one where there are more."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    source = fields.get("chat_template")
    if isinstance(source, list):
        source = {named["name"]: named["template"] for named in source}
    source = source["default"] if isinstance(source, dict) else source
    if source is not None and not isinstance(source, str):
        raise TypeError(f"The chat template is a {type(source).__name__}.")
    return source


def _object(path: Path) -> dict[str, Any]:
    """The fields of a JSON file; none where there is no such file.

    Raises:
        ValueError: it holds something else.
    """
    if not path.is_file():
        return {}
    fields: Any = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(fields, dict):
        raise ValueError(f"{path.name} holds no object")
    return fields


def _content(token: Any) -> str | None:
    """A special token's text, as files write it: plain, or together with how it is matched; None where it is none."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def stop_ids(folder: Path, eos: int | None) -> tuple[int, ...]:
    ids = {eos} if eos is not None else set[int]()
    for name in ("generation_config.json", "config.json"):
        try:
            fields = _object(folder / name)
        except (OSError, ValueError, RecursionError):
            continue
        nested: Any = fields.get("text_config")  # of a model that also sees or hears
        for part in (fields, nested if isinstance(nested, dict) else {}):
            value = part.get("eos_token_id")
            ids |= {item for item in (value if isinstance(value, list) else [value]) if type(item) is int}
    return tuple(sorted(item for item in ids if 0 <= item < 1 << 31))


Thinking = Literal["never", "optional", "less", "always"]
"""Whether a model thinks before it answers, as its template shows: "optional" can be switched off, "less" reduced."""

_PROBE = "floe-chat answers"  # as an answer: text that no template writes itself
_PROBE_TEXT = 1 << 20  # characters of a prompt with it, at most


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's token ids, and how many of the oldest messages it leaves out.

    `opened`: it ends inside the thinking, before what there is of the answer. `closed`: it ends after it.
    """

    ids: list[int]
    dropped: int
    opened: bool = False
    closed: bool = False


class TooLongError(Exception):
    """Not even the last message fits.

    Attributes:
        tokens: of the prompt; None for one with more text than could ever fit, which is not tokenized.
        system: whether the system prompt is too long already, without any message.
    """

    def __init__(self, tokens: int | None, *, system: bool) -> None:
        super().__init__("the last message does not fit")
        self.tokens, self.system = tokens, system


class ChatFormat:
    """Turns a conversation into a prompt.

    Attributes:
        stop_ids: tokens that end an answer, from generation_config.json, config.json and the tokenizer; see `ends`.
        convention: how the model marks thinking and calls.
        tokens: the tokenizer. reason: why transformers reads the template; "" where floe-chat does.
        folder: of the files. step: called with "chat template" or "tokenizer" before either runs.
    """

    def __init__(self, folder: Path, step: Callable[[str], None] = lambda _: None) -> None:
        """Raises PackError: the tokenizer or the template in `folder` is missing, or cannot be used."""
        self.folder, self.step = folder, step
        step("tokenizer")
        self.tokens = Tokens(folder)
        step("chat template")
        with contained(f"The chat template at {folder} cannot be read", folder):
            found = read(folder)
        if found is None:
            raise NoTemplateError(
                f"The model at {folder} has no chat template",
                "It is a base model: it continues text but does not know turns.",
                "Use the model's instruction-tuned version.",
            )
        self._template, self._named, self.reason, source, parsed = found
        self.convention = Convention.of(source, parsed, self.tokens.added)
        eos = self._named.get("eos_token")
        self.stop_ids = stop_ids(folder, None if eos is None else self.tokens.id_of(eos))

    def ends(self) -> tuple[int, ...]:
        """Special tokens that the template writes right after an answer: each of them ends the model's turn."""
        special = self.tokens.special
        if self.convention.channels:  # there an answer has several messages, whose ends look the same in the history
            return tuple(special[name] for name in (CALL, RETURN) if name in special)
        found = set[int]()
        for role in ("user", "tool"):
            talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _PROBE}]
            try:
                text = self._render([*talk, {"role": role, "content": "?"}], _PROBE_TEXT, {})
            except (FloeError, TooMuchError):  # it does not know that role
                continue
            after = text.rpartition(_PROBE)[2].lstrip()
            name = max((name for name in special if after.startswith(name)), key=len, default=None)
            found |= {special[name]} if name is not None else set()
        return tuple(sorted(found))

    def thinking(self) -> Thinking:
        """Whether the model thinks, and whether its template has a switch for that."""
        convention = self.convention
        if not convention.channels and convention.tags is None:
            return "never"
        if any(value is False for value in convention.off.values()):
            prompt = self._render([{"role": "user", "content": "?"}], _PROBE_TEXT, convention.off)
            if not convention.opened(prompt):
                return "optional"
        return "less" if "reasoning_effort" in convention.off else "always"

    def encode(self, messages: Sequence[Mapping[str, str]], most: int | None = None) -> list[int]:
        """The prompt that asks for the next answer.

        Args:
            messages: {"role": "system" | "user" | "assistant", "content": text} in order; the last is the user's. An
                earlier answer may have its thinking under "thought": the template gets it if it looks for it.
            most: characters that the prompt may have; None for any number.

        Text that spells a control token of the model ("</s>") is broken up first, so no text can end or open a turn.

        Raises:
            UsageError: the model's template does not accept these roles in this order.
            PackError: the template or the tokenizer fails, or the prompt is empty.
            TooMuchError: more text than `most`.
        """
        return self._encode(messages, most, think=True).ids

    def whole(
        self,
        messages: Sequence[Mapping[str, Any]],
        limit: int,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        think: bool = True,
    ) -> Prompt:
        """The prompt of all messages, which may have calls of tools in them, see `ToolTalk.written`.

        Raises:
            TooLongError: more than `limit` tokens. Otherwise as `encode`.
        """
        try:
            prompt = self._encode(messages, most_text(limit, self.tokens.longest), tools, think=think)
        except TooMuchError:
            raise TooLongError(None, system=False) from None
        if len(prompt.ids) > limit:
            raise TooLongError(len(prompt.ids), system=False)
        return prompt

    @cached_property
    def tool_talk(self) -> ToolTalk:
        """How its conversations have tools."""
        return ToolTalk.of(lambda messages, tools: self._render(messages, _PROBE_TEXT, {}, tools), self.convention)

    def _encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        most: int | None,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        think: bool,
    ) -> Prompt:
        self.step("chat template")
        options = self.convention.on if think else self.convention.off
        if tools or any(message["role"] == "tool" or message.get("calls") for message in messages):
            given, tools = self.tool_talk.written(messages, tools, self._safe, self.tokens.defused)
        else:
            given = [self._safe(message) for message in messages]
        try:
            prompt = self._render(given, most, options, tools)
        except PackError as error:
            if not tools:
                raise
            # It wrote the functions that it was tried out with (`ToolTalk.of`).
            title = "The model's chat template cannot write these tools"
            raise UsageError(title, error.cause, "Simplify their parameters.") from error
        self.step("tokenizer")
        # The template writes the begin token itself: adding special tokens again would double it.
        ids = self.tokens.encode(prompt)
        if not ids:
            wrote = "Its chat template writes nothing." if not prompt else "Its tokenizer makes no tokens of a prompt."
            raise PackError(f"The model at {self.folder} cannot chat", wrote, verify_hint(self.folder))
        return Prompt(ids, 0, self.convention.opened(prompt), self.convention.closed(prompt))

    def begun(self, answer: str, thought: str, *, opened: bool) -> list[str]:
        """The beginning of an answer, with its thinking, as text and marks."""
        pieces = self.convention.begun(thought, answer, opened=opened)
        return [piece if isinstance(piece, Mark) else self.tokens.defused(piece) for piece in pieces]

    def _safe(self, message: Mapping[str, Any]) -> dict[str, Any]:
        field, thought = self.convention.field, message.get("thought")
        safe = {"role": message["role"], "content": self.tokens.defused(message["content"])}
        return {**safe, field: self.tokens.defused(thought)} if field and thought else safe

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        most: int | None,
        options: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        try:
            return self._template.render(messages, self._named, most, options, tools)
        except TooMuchError:
            raise
        except TemplateError as error:
            if type(error) is TemplateError:  # what raise_exception raises; other errors are mistakes of the template
                raise UsageError(
                    "The model's chat template refuses this conversation",
                    first_line(error),
                    "Turns must alternate between you and the model, starting with you.",
                ) from error
            raise self._faulty(error) from error
        # A template is a program: it can divide by zero, add a number to a list, or run out of memory.
        except Exception as error:
            raise self._faulty(error) from error

    def _faulty(self, error: Exception) -> PackError:
        cause = "It needs more memory than it may use." if isinstance(error, MemoryError) else first_line(error)
        return PackError(f"The chat template at {self.folder} fails", cause, verify_hint(self.folder))

    def encode_text(self, text: str) -> list[int]:
        """Plain text to ids, without special tokens. Raises PackError as `Tokens.encode`."""
        self.step("tokenizer")
        return self.tokens.encode(text)

    def fit(
        self,
        messages: Sequence[Mapping[str, str]],
        limit: int,
        answer: str = "",
        thought: str = "",
        *,
        think: bool = True,
    ) -> Prompt:
        """As many of the latest messages as fit into `limit` tokens, followed by the beginning of an answer (`thought`,
        then `answer`).

        Without `think` the template is asked for no thinking, or for less, if it can be. A system message at the front
        stays, and a question is left out together with its answer.

        Raises:
            TooLongError: the last message alone does not fit. Otherwise as `encode`.
        """
        system = list(messages[:1]) if messages and messages[0]["role"] == "system" else []
        turns = list(messages[len(system) :])
        most = most_text(limit, self.tokens.longest)
        rounds_in_all = (len(turns) + 1) // 2

        def first(rounds: int) -> int:
            return 0 if rounds == rounds_in_all else len(turns) + 1 - 2 * rounds

        opened = False

        def prompt(kept: Sequence[Mapping[str, str]]) -> list[int] | None:
            """None for more text than could ever fit."""
            nonlocal opened
            try:
                made = self._encode(kept, most, think=think)
            except TooMuchError:
                return None
            opened = made.opened
            begun = "".join(self.begun(answer, thought, opened=opened))
            return made.ids + (self.tokens.encode(begun) if begun else [])

        best = prompt((*system, *turns[first(1) :]))
        if best is None or len(best) > limit:
            bare = prompt((*system, {"role": "user", "content": ""}))
            over = bare is None or len(bare) > limit
            if over and not system:
                raise PackError(
                    f"The model at {self.folder} cannot chat",
                    "Its chat template writes more than fits into its context window, whatever the message.",
                    verify_hint(self.folder),
                )
            raise TooLongError(None if best is None else len(best), system=over)
        # In steps that double, then by halves: a chat of thousands of turns is not encoded thousands of times.
        fits, over, step = 1, rounds_in_all + 1, 1
        while over - fits > 1:
            rounds = min(fits + step, rounds_in_all) if over > rounds_in_all else (fits + over) // 2
            longer = prompt((*system, *turns[first(rounds) :]))
            if longer is not None and len(longer) <= limit:
                best, fits, step = longer, rounds, step * 2
            else:
                over = rounds
        return Prompt(best, first(fits), opened)

    def decoder(self) -> Detokenizer:
        """A new incremental decoder for one answer."""
        return self.tokens.decoder(self.convention.marks)
