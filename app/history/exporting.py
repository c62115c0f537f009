"""Conversations as files: Markdown to read, JSON to store (`importing.py` reads it)."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from ...models.catalog import short_name
from ...models.visible import CONTROLS
from ..text.plain_text import printable
from ..text.units import rate_of, seconds
from .records import LATEST, AnswerStats, Message, Tree

FORMAT = "floe-chat history"
FORMAT_VERSION = 1

_LONGEST_NAME = 60
# JSON escapes only some of the characters that a terminal would act on or reorder.
_UNSAFE = re.compile(f"[{CONTROLS}\u200e\u200f\u2028\u2029]")
_REASONS = {
    "stop": "end of turn",
    "length": "length limit",
    "context": "context full",
    "cancelled": "stopped by you",
}


def as_json(trees: Sequence[Tree]) -> str:
    """All of `trees` with all branches, as one JSON document that ends in a newline.

    Message ids count from 1 within a conversation; times are ISO 8601, UTC. Control characters are escaped, so that
    the text may go to a terminal.
    """
    document = {"format": FORMAT, "version": FORMAT_VERSION, "conversations": [_fields(tree) for tree in trees]}
    return json_text(document, indent=1) + "\n"


def as_markdown(tree: Tree) -> str:
    """The shown branch, for reading; control characters appear as U+FFFD."""
    conversation, branch = tree.conversation, _shown(tree)
    begun = stamp(conversation.created)[:16].replace("T", " ") + " UTC"
    facts = (short_name(conversation.setup.model), conversation.setup.preset or "", begun)
    parts = [f"# {_one_line(tree.name)}", _one_line(" · ".join(fact for fact in facts if fact))]
    if conversation.setup.system_prompt:
        parts += ["## System prompt", conversation.setup.system_prompt]
    for message in branch:
        parts += _section(message)
    return printable("\n\n".join(part.strip("\n") for part in parts)) + "\n"


def json_text(value: object, indent: int | None = None) -> str:
    """`value` as JSON, with all characters escaped that a terminal would act on or reorder."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, allow_nan=False)
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def file_name(number: int, name: str, ending: str) -> str:
    """A name that every file system takes, such as "12-what-is-an-expert.md"."""
    words = re.sub(r"[^\w]+", "-", name.lower()).strip("-_")
    while len(words.encode()) > _LONGEST_NAME:
        words = words[:-1].rstrip("-_")
    return f"{number}-{words}{ending}" if words else f"{number}{ending}"


def stamp(milliseconds: int) -> str:
    """A time as ISO 8601, UTC, such as "2026-11-21T19:20:31.123Z"."""
    at = min(max(milliseconds, 0), LATEST)
    moment = datetime.fromtimestamp(at // 1000, UTC).replace(microsecond=at % 1000 * 1000, tzinfo=None)
    return moment.isoformat(timespec="milliseconds") + "Z"


def thought_for(stats: AnswerStats | None) -> str:
    """The line that stands for an answer's thinking: "Thought for 1,234 tokens"."""
    count = 0 if stats is None else stats.thought_tokens
    return f"Thought for {count:,} token{'' if count == 1 else 's'}" if count else "Thought"


def footer(stats: AnswerStats) -> str:
    """The line under an answer, without figures that were not measured."""
    parts = [f"{stats.tokens} token{'' if stats.tokens == 1 else 's'}"]
    if stats.tokens_per_s is not None:
        parts.append(rate_of(stats.tokens_per_s))
    if stats.first_token_s is not None:
        parts.append(f"first token {seconds(stats.first_token_s)}")
    if stats.virtual:
        parts.append("virtual time")
    parts.append(_REASONS.get(stats.stop_reason, stats.stop_reason))
    return " · ".join(parts)


def closing(message: Message) -> str:
    """The line under an answer that is complete, or why it is not."""
    if message.stats is not None:
        return footer(message.stats)
    reasons = {
        "stopped": "cut off",
        "failed": "stopped by an error",
        "streaming": "another floe-chat is writing this",
        "complete": "written by you",
    }
    return reasons[message.state]


def _section(message: Message) -> list[str]:
    who = " · ".join(part for part in (message.model or "Answer", message.preset) if part)
    parts = ["## You" if message.role == "user" else f"## {_one_line(who)}"]
    if message.thought:  # as a quotation, which no mark in it can end
        thought = [f"*{thought_for(message.stats)}*", "", *printable(message.thought).strip().splitlines()]
        parts.append("\n".join(f"> {line}".rstrip() for line in thought))
    parts.append(message.text)
    for file in message.attachments:
        fence = "`" * (max((len(run) for run in re.findall("`+", file.text)), default=2) + 1)
        parts += [f"### Attached: {_one_line(file.name)}", f"{fence.ljust(3, '`')}\n{file.text}\n{fence.ljust(3, '`')}"]
    if message.stats is not None:
        parts.append(f"*{footer(message.stats)}*")
    elif message.state in ("stopped", "failed"):
        parts.append(f"*{closing(message)}*")
    return parts


def _shown(tree: Tree) -> list[Message]:
    known = {message.id: message for message in tree.messages}
    branch: list[Message] = []
    at = tree.conversation.head
    while at is not None and at in known:
        branch.append(known.pop(at))
        at = branch[-1].parent
    return branch[::-1]


def _fields(tree: Tree) -> dict[str, Any]:
    conversation = tree.conversation
    ids = {message.id: place for place, message in enumerate(tree.messages, 1)}
    return {
        "title": conversation.title,
        "created": stamp(conversation.created),
        "updated": stamp(conversation.updated),
        **asdict(conversation.setup),
        "model": short_name(conversation.setup.model),  # the folder on this machine is private
        "head": None if conversation.head is None else ids.get(conversation.head),
        "messages": [
            {
                "id": ids[message.id],
                "parent": None if message.parent is None else ids[message.parent],
                "role": message.role,
                "text": message.text,
                "thought": message.thought,
                "state": message.state,
                "created": stamp(message.created),
                "model": message.model,
                "preset": message.preset,
                "stats": None if message.stats is None else asdict(message.stats),
                "attachments": [asdict(file) for file in message.attachments],
            }
            for message in tree.messages
        ],
    }


def _one_line(text: str) -> str:
    return " ".join(text.split())
