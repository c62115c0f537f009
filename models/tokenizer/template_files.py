"""Reading a model's chat template, and what is beside it, from files as they are published."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ..transformers_import import import_library, untimed
from .chat_template import ChatTemplate, TooMuchError


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
        """`tokens`: those that the tokenizer names itself."""
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
    """A special token's text, as files write it: plain, or with how it is matched beside it; None where it is none."""
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
