"""Chat templates of a stranger: published ones with something put in, and programs that do anything.

Each is opened as a chat does, with the tokenizer of a family, tried out, and asked for prompts of conversations, with
tools and without; some tokens of an answer are read.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from floe_chat.models.errors import FloeError
from floe_chat.models.tokenizer.chat_process import ChatProcess, Fitted
from floe_chat.models.visible import visible

from ..models.chat_families import FAMILIES, TEMPLATES, write_family, write_tools
from . import _hostile, _hostile_chat

_TEXTS = (
    "hi",
    "",
    "</s>",
    "<|im_end|>\n<|im_start|>system\n",
    "<think>",
    "</think>",
    "[INST]",
    "é🎉",
    "a\0\x1b[2J",
    "\ud800",
)
_LONG = "word " * 20_000
_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Finds <|im_end|> a thing.",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
        },
    }
    for name in ("find", "seek")
]


def good(scratch: Path) -> None:
    """The families' own templates."""
    _hostile_chat.run_one_process()
    for name in (*FAMILIES, *(f"tools {name}" for name in TEMPLATES)):
        folder = scratch / "good" / name
        folder.mkdir(parents=True)
        write_tools(folder, name.removeprefix("tools ")) if name.startswith("tools ") else write_family(folder, name)
        assert asked(Random(0), folder) != "refused", name


def attempt(seed: int, scratch: Path) -> str:
    rng = Random(seed)
    folder = scratch / "attempt"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(rng.choice(sorted((scratch / "good").iterdir())), folder)
    _change(rng, folder)
    return asked(rng, folder)


def _change(rng: Random, folder: Path) -> None:
    """Another template, in its own file or among the tokenizer's fields; sometimes other fields too."""
    own, fields = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    settings = json.loads(fields.read_text())
    source = _hostile_chat.template(rng, own.read_text())
    if rng.random() < 0.7:
        own.write_bytes(source.encode("utf-8", "surrogatepass"))
    else:
        own.unlink()
        settings["chat_template"] = rng.choice((source, {"default": source}, [{"name": "default", "template": source}]))
    if rng.random() < 0.1:
        settings = _hostile.altered(rng, settings)
    fields.write_text(json.dumps(settings))


def asked(rng: Random, folder: Path) -> str:
    """What becomes of a chat with the tokenizer and template in a folder."""
    try:
        chat = ChatProcess(folder)
    except FloeError as error:
        _hostile_chat.check(error)
        return "refused"
    try:
        assert chat.thinking in ("never", "optional", "less", "always")
        outcomes = [_tried(rng, chat, turn) for turn in rng.sample((_fit, _whole, _continued, _read), 3)]
        return "answered" if all(outcomes) else "failed"
    finally:
        chat.close()


def _tried(rng: Random, chat: ChatProcess, turn: Any) -> bool:
    try:
        turn(rng, chat)
    except FloeError as error:
        _hostile_chat.check(error)
        return False
    return True


def _messages(rng: Random) -> list[dict[str, Any]]:
    roles = ["system"] * (rng.random() < 0.3) + ["user", "assistant"] * rng.randrange(3) + ["user"]
    return [{"role": role, "content": _text(rng), "thought": rng.choice(("", "", "Hm."))} for role in roles]


def _text(rng: Random) -> str:
    return _LONG if rng.random() < 0.02 else "".join(rng.choices(_TEXTS, k=rng.randrange(1, 4)))


def _limit(rng: Random) -> int:
    return rng.choice((1, 50, 4096))


def _fit(rng: Random, chat: ChatProcess) -> None:
    begun = {"answer": _text(rng), "thought": rng.choice(("", "Hm."))} if rng.random() < 0.3 else {}
    limit = _limit(rng)
    found = chat.fit(_messages(rng), limit, **begun, think=rng.random() < 0.5, begin=1)
    _fits(found, chat, limit)


def _whole(rng: Random, chat: ChatProcess) -> None:
    call = {"id": "1", "name": "find", "arguments": rng.choice(('{"at": "sea"}', "{}", '{"at": "</tool_call>"}'))}
    talk: list[dict[str, Any]] = [{"role": "user", "content": _text(rng), "thought": "", "calls": [], "answers": ""}]
    if rng.random() < 0.5:
        plain = {"thought": "", "calls": [], "answers": ""}
        talk += [{**plain, "role": "assistant", "content": _text(rng), "calls": [call] * rng.randrange(1, 3)}]
        talk += [{**plain, "role": "tool", "content": _text(rng), "answers": "1"}]
    choice = rng.choice(("auto", "required", "named"))
    tools: dict[str, Any] = {"listed": _TOOLS, "choice": choice, "named": "find", "parallel": rng.random() < 0.5}
    if rng.random() < 0.3:
        tools |= {"listed": [], "choice": "auto"}
    schema = rng.choice(("", "", '{"type": "object"}'))
    limit = _limit(rng)
    tools["strict"] = ["find"] if rng.random() < 0.3 and tools["listed"] else []
    found = chat.whole(talk, limit, tools, schema, chat.largest[0] + 1, think=rng.random() < 0.5, begin=2)
    _fits(found, chat, limit)
    if isinstance(found, Fitted) and found.constrained:
        assert any(chat.allowed(None, 2)), "no token may come"


def _fits(found: Any, chat: ChatProcess, limit: int) -> None:
    if isinstance(found, Fitted):
        assert 0 < len(found.ids) <= limit and found.dropped >= 0
        assert min(found.ids) >= 0 and max(found.ids) <= chat.largest[0]


def _continued(rng: Random, chat: ChatProcess) -> None:
    found = chat.continued(_text(rng), _limit(rng), 3)
    assert not isinstance(found, Fitted) or found.dropped == 0
    assert chat.count(_text(rng)) >= 0


def _read(rng: Random, chat: ChatProcess) -> None:
    _pushed(chat, [rng.randrange(chat.largest[0] + 1) for _ in range(rng.randrange(9))], rng.randrange(5))


def _pushed(chat: ChatProcess, ids: Sequence[int], request: int) -> None:
    for last in (False, True):
        pushed = chat.push(ids, last=last, request=request)
        assert 0 <= pushed.thought <= len(ids)
        for part in pushed.parts:
            for text in (part.text, part.name, part.trouble):
                assert text == visible(text), ascii(text[:100])
