"""What `floe-chat history` prints of conversations and messages: a line for people, an object for JSON."""

from __future__ import annotations

import sys
from dataclasses import asdict
from datetime import datetime
from typing import Any

from ....models.catalog import short_name
from ...history.exporting import stamp
from ...history.records import LATEST, Hit, Message, Summary, shortened
from ...text.plain_text import printable

_LONGEST = 400  # characters of a snippet, which has sixteen words: one of them may be endless


def summary(each: Summary) -> dict[str, Any]:
    """A conversation of the list, for JSON."""
    times = {"created": stamp(each.created), "updated": stamp(each.updated)}
    return {"number": each.number, "title": each.name, "model": each.model, "messages": each.messages, **times}


def line(each: Summary) -> str:
    """A conversation of the list, for people."""
    model = printable(short_name(each.model))[:20]
    return (
        f"{each.number:>5}  {_local(each.updated)}  {each.messages:>5}  {model:<20}  {shortened(_one_line(each.name))}"
    )


def hit(found: Hit) -> dict[str, Any]:
    """A search hit, for JSON; `marks` are the positions of matches, in characters of `snippet`."""
    fields = asdict(found)
    return {name: fields[name] for name in ("number", "name", "position", "shown", "snippet", "marks")}


def hit_line(found: Hit) -> str:
    """A search hit, for people, in two lines; on a terminal matches are bold."""
    where = (
        "title" if found.message is None else f"message {found.position + 1}{'' if found.shown else ', another branch'}"
    )
    snippet = printable(found.snippet)[:_LONGEST]  # each character in its place: a snippet is one line
    if sys.stdout.isatty():
        for start, end in reversed([mark for mark in found.marks if mark[0] < _LONGEST]):
            snippet = f"{snippet[:start]}\x1b[1m{snippet[start:end]}\x1b[0m{snippet[end:]}"
    return f"{found.number:>5}  {shortened(_one_line(found.name))} ({where})\n       {snippet}"


def message(found: Message) -> dict[str, Any]:
    """A message of a branch, for JSON."""
    fields = asdict(found)
    names = ("position", "role", "text", "state", "model", "preset", "stats", "attachments", "sibling", "siblings")
    return {name: fields[name] for name in names} | {"created": stamp(found.created)}


def _local(milliseconds: int) -> str:
    return f"{datetime.fromtimestamp(min(max(milliseconds, 0), LATEST) / 1000):%Y-%m-%d %H:%M}"


def _one_line(text: str) -> str:
    return " ".join(printable(text).split())
